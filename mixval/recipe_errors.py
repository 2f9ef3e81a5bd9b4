"""A mistake in a recipe, as one line: the field, the rule, the value, and what may be meant."""

import difflib
import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mixval import choose


def one_line(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first mistake as `field: rule, got value`; for an unknown key the nearest."""
    # An unknown key first: it may be the one that is missed elsewhere.
    errors = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    first, path = errors[0], _path(errors[0])
    place = ".".join(path)
    if first["type"] == "extra_forbidden":
        hint = choose.nearest(path[-1], _fields_at(model, path[:-1]))
        return f"{place}: unknown key; {hint}"
    if first["type"] == "missing":
        return f"{place}: must be given"
    cause = first.get("ctx", {}).get("error")
    if cause is not None:
        return f"{place}: {cause}" if place else str(cause)
    rules = [_rule(e) for e in errors if _path(e) == path]
    return f"{place}: must be {', or '.join(rules)}, got {first['input']!r}{_near(errors)}"


def _rule(error: Any) -> str:
    """Return what a value must be, in words that go on from `must be`."""
    if error["type"] == "string_pattern_mismatch":
        return f"text like {error['ctx']['pattern']}"
    if error["type"] == "too_short":
        return f"a list of at least {error['ctx']['min_length']}"
    if error["type"] == "model_type":
        return "a mapping of its keys"
    return str(error["msg"]).removeprefix("Input should be ")


def _path(error: Any) -> list[str]:
    """Return the keys that lead to a mistake; a union adds its member, which is no key."""
    path = [str(part) for part in error["loc"]]
    members = ("constrained-", "function-", "literal[")
    return path[:-1] if path and path[-1].startswith(members) else path


def _near(errors: Any) -> str:
    """Return `; did you mean X?` where one of a few words was asked for."""
    given = errors[0]["input"]
    words = [
        w for e in errors for w in re.findall(r"'([^']+)'", str(e.get("ctx", {}).get("expected")))
    ]
    close = difflib.get_close_matches(given, words, n=1) if isinstance(given, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


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
