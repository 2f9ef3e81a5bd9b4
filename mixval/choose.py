"""Name -> function of a choice module, and what its parameters may be.

A choice module (or package) lists its options in `__all__`. Their signatures are read from the
source, not by importing it, so that a recipe is checked (names, parameters, ranges)
before torch is loaded. An option of the user's own is `module:function`.
"""

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

from mixval import bounds
from mixval.errors import UserError

_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (float, int, bool, str, list, dict, tuple)},
    **{name: kind for name, kind in vars(bounds).items() if name[0].isupper()},
    "Literal": Literal,
}


@dataclass(frozen=True)
class Option:
    """One function of a choice module, as its source describes it."""

    name: str
    summary: str
    parameters: type[BaseModel]

    @property
    def signature(self) -> str:
        fields = self.parameters.model_fields.items()
        shown = (f"{key}=?" if f.is_required() else f"{key}={f.default!r}" for key, f in fields)
        return f"{self.name}({', '.join(shown)})"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `did you mean X?` or, failing that, the list of what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    if not names:
        return "there is none to choose from"
    return f"choose from {', '.join(names)}" if len(names) <= 20 else "see --help for what there is"


def subset(what: str, names: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """Return the chosen names in the order of the known ones; all of them for None."""
    order = list(known)
    for name in names or []:
        if name not in order:
            raise UserError(f"{what}: unknown {name!r}; {nearest(name, order)}")
    return [name for name in order if names is None or name in names]


def option(module: str, name: str) -> Option:
    """Return the option `name` of `mixval.<module>`, or of the user's own `module:function`."""
    if ":" in name:
        home, function = name.split(":", 1)
        functions = _functions(_source(home))
        if function not in functions:
            hint = nearest(function, functions)
            raise UserError(f"{name}: {home} has no function {function!r}; {hint}")
        return _option(functions[function])
    known = options(module)
    if name not in known:
        raise UserError(f"unknown option {name!r} of {module}; {nearest(name, known)}")
    return known[name]


@functools.cache
def options(module: str) -> dict[str, Option]:
    """Return the options of `mixval.<module>` by name."""
    folder = Path(__file__).parent / module
    if not folder.is_dir():
        return _options(folder.with_suffix(".py"), [])
    return _options(folder / "__init__.py", sorted(folder.glob("*.py")))


def _options(home: Path, files: list[Path]) -> dict[str, Option]:
    """Return what `home` exports, written in it or, if it is a package, in its files."""
    functions = {key: node for path in [*files, home] for key, node in _functions(path).items()}
    return {name: _option(functions[name]) for name in _exported(home)}


def pick(module: str, name: str, parameters: dict[str, Any]) -> Callable[..., Any]:
    """Return the option's function with its own parameters bound."""
    home, function = name.split(":", 1) if ":" in name else (f"mixval.{module}", name)
    if ":" in name:
        _source(home)
    return functools.partial(getattr(importlib.import_module(home), function), **parameters)


def own_code(described: Any) -> dict[str, str]:
    """Return the digest of the source behind every `module:function` that settings name."""
    if isinstance(described, list):
        described = dict(enumerate(described))
    if not isinstance(described, dict):
        return {}
    name, found = str(described.get("name")), {}
    if ":" in name:
        found[name] = hashlib.sha256(_source(name.split(":")[0]).read_bytes()).hexdigest()
    for inner in described.values():
        found |= own_code(inner)
    return found


def _source(home: str) -> Path:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # the user's own module lies where the command was given
    try:
        spec = importlib.util.find_spec(home)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not str(spec.origin).endswith(".py"):
        raise UserError(
            f"no module {home!r} with a .py file here or on the Python path; run from its folder"
        )
    return Path(str(spec.origin))


def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _exported(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _option(function: ast.FunctionDef) -> Option:
    fields: dict[str, Any] = {}
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        kind = Any if argument.annotation is None else _type(argument.annotation)
        fields[argument.arg] = (kind, ... if default is None else ast.literal_eval(default))
    config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True, strict=True)
    summary = (ast.get_docstring(function) or "").split("\n")[0]
    model = create_model(function.name, __config__=config, **fields)
    return Option(function.name, summary, model)


def _type(node: ast.expr) -> Any:
    """Return the type an annotation names; a name that is not ours is not checked."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _TYPES.get(name, Any)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _type(left) | _type(right)
        case ast.Subscript(value=outer, slice=ast.Tuple(elts=inner)):
            return _type(outer)[tuple(map(_type, inner))]
        case ast.Subscript(value=outer, slice=inner):
            return _type(outer)[_type(inner)]
    return Any
