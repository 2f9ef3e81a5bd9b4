"""Recipes from files, dictionaries and the command line's dotted settings."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mixval import choose
from mixval.errors import UserError
from mixval.recipe import NAMED, UNREAD, Recipe
from mixval.recipe_errors import one_line
from mixval.recipe_rules import NOT_REPLAYED, check

PACKAGED = Path(__file__).parent / "recipes"


def load_recipe(source: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Return the packaged recipe or the file `source`, with dotted `overrides` laid over it.

    Only the overrides may name code (`module:function`), never the file.
    """
    described = _read_extended(_find(source))
    # `x.name` first: it exchanges the option, and with it the parameters given beside it.
    for key, value in sorted((overrides or {}).items(), key=lambda item: item[0][-5:] != ".name"):
        _lay_over(described, key, value)
    return make_recipe(described, code=_names_of_code(list((overrides or {}).values())))


def make_recipe(described: Mapping[str, Any], code: Collection[str] | None = None) -> Recipe:
    """Return the recipe of nested dictionaries; a mistake is one line that names the field.

    `code` holds the names `module:function` that may be used; None allows any, because
    who calls this from Python runs code of their own anyway.
    """
    try:
        recipe = Recipe.model_validate(_with_inherited(described), context={"code": code})
        check(recipe)
    except ValidationError as error:
        raise UserError(one_line(error, Recipe)) from error
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    return recipe


def _with_inherited(described: Mapping[str, Any]) -> dict[str, Any]:
    """Give controls what they do not say themselves: it is as in the arm that they replay."""
    arms = described.get("arms")
    if not isinstance(arms, dict):
        return dict(described)
    filled = {}
    for name, arm in arms.items():
        chosen = arm.get("filter") if isinstance(arm, dict) else None
        of = chosen.get("of") if isinstance(chosen, dict) else None
        guided = arms.get(of) if isinstance(of, str) else None
        inherited = guided if isinstance(guided, dict) and isinstance(arm, dict) else {}
        kept = {key: value for key, value in inherited.items() if key not in NOT_REPLAYED}
        filled[name] = {**kept, **arm} if isinstance(arm, dict) else arm
    return {**described, "arms": filled}


def recorded_recipe(path: Path) -> Recipe:
    """Return a recipe that a run recorded, to read and compare. Nothing it names is run."""
    try:
        return Recipe.model_validate(read_yaml(path), context={"code": UNREAD})
    except ValidationError as error:
        raise UserError(f"{path}: {one_line(error, Recipe)}") from error


def packaged_recipes() -> list[str]:
    """Return the names of the recipes to run; one that begins with _ is there to be extended."""
    return sorted(path.stem for path in PACKAGED.glob("[!_]*.yaml"))


def _read_extended(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a file's mapping laid over that of the recipe it `extends`, and so on."""
    described = read_yaml(path)
    if "extends" not in described:
        return described
    source = described.pop("extends")
    if not isinstance(source, str):
        raise UserError(f"{path}: extends: must be a packaged recipe or a file, got {source!r}")
    beside = path.parent / source
    parent = beside if beside.is_file() else _find(source)
    if parent in (path, *chain):
        raise UserError(f"{path}: extends: goes round in a circle through {source!r}")
    return _extended(_read_extended(parent, (path, *chain)), described)


def _extended(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return nested mappings with changes laid over them; null removes a named arm or teacher.

    A mapping with a name is an option with its parameters, and replaces the one before.
    """
    extended = dict(base)
    for key, value in changes.items():
        before = extended.get(key)
        if value is None and isinstance(before, dict):
            del extended[key]
        elif isinstance(value, dict) and isinstance(before, dict) and "name" not in value:
            extended[key] = _extended(before, value)
        else:
            extended[key] = value
    return extended


def _find(source: str) -> Path:
    packaged = PACKAGED / f"{source}.yaml"
    if packaged.parent == PACKAGED and packaged.is_file():
        return packaged
    if Path(source).is_file():
        return Path(source)
    hint = choose.nearest(source, packaged_recipes())
    raise UserError(f"recipe: no packaged recipe and no file {source!r}; {hint}")


class _Loader(yaml.SafeLoader):
    """YAML's plain types, with 1e-3 a number, as YAML 1.2 has it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    try:
        described = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not readable as YAML: {reason}") from error
    if not isinstance(described, dict):
        kind = type(described).__name__
        raise UserError(f"{path}: a recipe is a mapping of sections, got {kind}")
    return described


def _names_of_code(value: Any) -> set[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return set().union(*map(_names_of_code, value)) if value else set()
    return {value} if isinstance(value, str) and ":" in value else set()


def _lay_over(described: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    if len(path) > 1 and path[0] in NAMED and path[1] not in described.get(path[0], {}):
        hint = choose.nearest(path[1], described.get(path[0], {}))
        raise UserError(f"{dotted}: {path[0]} has no {path[1]!r}; {hint}")
    for key in path:
        inner = described.setdefault(key, {})
        if not isinstance(inner, dict):  # a choice in its short form: `alpha: easy`
            inner = described[key] = _long_form(inner)
        described = inner
    if last == "name" and path:  # another option: the parameters of the old one do not fit it
        described.clear()
    described[last] = value


def _long_form(value: Any) -> dict[str, Any]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"name": "constant", "value": value}
    return {} if value is None else {"name": value}
