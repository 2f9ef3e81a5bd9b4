"""A mistake in a recipe, as one line: the field, the rule, the value, and what may be meant."""

from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mixval import choose


def one_line(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first mistake as `field: rule, got value`; for an unknown key the nearest."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *outer, key = map(str, first["loc"])
        return f"{place}: unknown key; {choose.nearest(key, _fields_at(model, outer))}"
    if first["type"] == "missing":
        return f"{place}: must be given"
    cause = first.get("ctx", {}).get("error")
    if cause is not None:
        return f"{place}: {cause}" if place else str(cause)
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{place}: {message}, got {first['input']!r}"


def _fields_at(model: type[BaseModel], place: list[str]) -> list[str]:
    """Return the keys that a recipe may have at `place`, e.g. below `arms.guided`."""
    inner: Any = model
    for key in place:
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            inner = inner.model_fields[key].annotation
        else:  # dict[str, Section]: the key is a name
            inner = get_args(inner)[1]
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return list(inner.model_fields)
    return []
