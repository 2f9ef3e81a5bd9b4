"""Words of the command line -> a verb, its arguments, and settings by their place in a recipe."""

import argparse
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mixval import choose
from mixval.errors import UserError
from mixval.recipe import Choice, Recipe
from mixval.recipe_loading import load_recipe, packaged_recipes, parse_yaml

VERBS = {
    "the whole job": {
        "run": "base, teachers, students and their controls, evaluated, with a report",
    },
    "one stage, with what it needs (finished stages are reused)": {
        "base": "train the network whose failures are looked for",
        "failures": "find what the base network fails",
        "teacher": "train the teachers",
        "posteriors": "fit p(θ|D) and p(θ|D,F) around the base network",
        "score": "score probe mixes under teachers and posteriors; or mixes under your own models",
        "student": "train the students",
        "repair": "find the train samples behind the failures, and take them out of the base",
        "report": "write the report of a run again, from its files",
    },
    "looking around": {
        "top": "show the most harmful and helpful mixes, class pairs and parents of a run",
        "datasets": "show the named datasets: size, licence, and whether they are here",
        "list": "show recipes and the options of every choice, with their parameters",
    },
    "measuring": {
        "bench": "speed of training and scoring beside the limit and other libraries, as ratios",
    },
}
BENCH_SUITES = (
    "mixup",
    "guided",
    "scoring",
)  # of mixval.bench.suites, named here without loading torch


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


class _Overview(_Parser):
    def format_help(self) -> str:
        lines = ["mixval: value mixup samples and train on the ones that help", ""]
        lines += ["usage: mixval VERB [RECIPE] [--section.key value ...]", ""]
        for group, verbs in VERBS.items():
            lines += [f"{group}:", *(f"  {verb:<10} {text}" for verb, text in verbs.items()), ""]
        lines += ["mixval VERB --help shows every setting with its default.", ""]
        return "\n".join(lines)


def parse(words: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    parser = _Overview(prog="mixval", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mixval {version('mixval')}")
    verbs = parser.add_subparsers(dest="verb", parser_class=_Parser)
    known = {verb: text for group in VERBS.values() for verb, text in group.items()}
    if words and not words[0].startswith("-") and words[0] not in known:
        raise UserError(f"unknown verb {words[0]!r}; {choose.nearest(words[0], known)}")
    for verb, text in known.items():
        sub = verbs.add_parser(verb, description=text, allow_abbrev=False, formatter_class=_Help)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.add_argument("--quiet", action="store_true", help="say only what went wrong")
        if words and verb == words[0]:  # the settings of the others are not needed
            _ADD_ARGUMENTS.get(verb, _add_run_arguments)(sub, words[1:])
    others, settings = _take_settings(words)
    arguments, unknown = parser.parse_known_args(others, argparse.Namespace(words=words))
    if arguments.verb is None:
        parser.print_help()
        raise SystemExit(0)
    if unknown:
        flags = verbs.choices[arguments.verb]._option_string_actions
        raise UserError(f"unknown argument {unknown[0]!r}; {choose.nearest(unknown[0], flags)}")
    if getattr(arguments, "model", None):
        settings["model"] = value_of(arguments.model)
    if getattr(arguments, "seeds", None):
        settings["seeds"] = _seeds(arguments.seeds)
    return arguments, settings


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=110)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        return f"usage: {self._prog} [options]\n\n"


def _add_run_arguments(parser: argparse.ArgumentParser, words: list[str]) -> None:
    add = parser.add_argument
    scores = parser.prog.endswith(" score")
    also = ", or a run directory" if scores else ""
    add(
        "recipe",
        nargs="?",
        default="digits",
        help=f"packaged recipe or YAML file{also} (default: digits)",
    )
    add("--out", metavar="DIR", help="run directory (default: runs/NAME)")
    add("--arms", nargs="+", metavar="ARM", help="only these arms (default: all of the recipe)")
    add("--panels", nargs="+", metavar="PANEL", help="only these panels (default: all)")
    add("--seeds", nargs="+", metavar="SEED", help="such as 0 1 2 or 0-9 (default: the recipe's)")
    add("--dry-run", action="store_true", help="check all, train one batch, estimate time and disk")
    named = words[0] if words and not words[0].startswith("-") else "digits"
    named = run_recipe(named) or named if scores else named
    recipe = load_recipe(named) if _asks_for_help(words) else None
    for section, summary, fields in _sections():
        title = section if recipe is None else f"{section} (defaults as in recipe {named})"
        group = parser.add_argument_group(title, summary)
        for dotted, field in fields:
            text = f"{field.description or ''} (default: {_default(recipe, dotted)})"
            group.add_argument(
                f"--{dotted}",
                metavar=_values(field),
                help=text.replace("%", "%%"),
            )
    parser.add_argument_group(
        "arms, teachers, posteriors and panels",
        "by their place, e.g. --arms.all.alpha 2; `mixval list arms teachers` shows their keys",
    )


def run_recipe(source: str) -> str | None:
    """Return the file of the recipe that a run directory was made by; None if it is no run."""
    path = Path(source, "recipe.yaml")
    return str(path) if source not in packaged_recipes() and path.is_file() else None


def _add_score_arguments(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Add what goes with --base, or with a recipe or run; all of it for the help."""
    own = scores_own_models(words)
    parser.description = (
        "`mixval score RECIPE` (or RUN, a run directory): the probe mixes of a run, base against "
        "each teacher. `mixval score --base MODEL --updated MODEL --data SOURCE --out DIR`: mixes "
        "under models of your own."
    )
    if own or _asks_for_help(words):
        group = parser.add_argument_group(
            "mixes under your own models: mixval score --base MODEL --updated MODEL --data SOURCE",
            "MODEL: NAME@FILE (a model of mixval or timm and its weights: safetensors, or a torch "
            "checkpoint), or module:function (returns an nn.Module). SOURCE: a dataset (mixval "
            "list datasets), {name: npz, path: x.npz}, or module:function (a torch Dataset). "
            "Give the same command again to go on where it stopped.",
        )
        for flag, kind in _OWN_MODELS.items():
            group.add_argument(flag, **kind)
        if own:
            group.add_argument("--out", metavar="DIR", help="folder for part-*.parquet")
    if not own:
        _add_run_arguments(parser, words)


def scores_own_models(words: list[str]) -> bool:
    """Say whether `mixval score` is given networks, and not a recipe or a run."""
    return any(word.partition("=")[0] in _OWN_MODELS for word in words)


def _asks_for_help(words: list[str]) -> bool:
    return bool({"-h", "--help"} & set(words))


def _many(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    return {"nargs": "+", "metavar": metavar, "help": text, **more}


_OWN_MODELS: dict[str, dict[str, Any]] = {
    "--base": _many("MODEL", "draws of p(theta | D); several are an ensemble"),
    "--updated": _many("MODEL", "draws of p(theta | D, F); as many as --base: paired with them"),
    "--data": {"metavar": "SOURCE", "help": "whose samples are mixed"},
    "--split": {"metavar": "{train,val,test}", "help": "of the data (default: train)"},
    "--rows": {"type": int, "metavar": "N", "help": "mixes to draw (default: one per sample)"},
    "--alpha": {"type": float, "metavar": "A", "help": "lambda ~ Beta(A, A) (default: 1)"},
    "--seed": {"type": int, "metavar": "S", "help": "of the drawn mixes (default: 0)"},
    "--mixes": {
        "metavar": "FILE",
        "help": ".csv or .parquet with i, j, lam instead; i and j are sample ids, as in the scores",
    },
    "--batches": _many(
        "FILE", ".npz or .safetensors with x, y_a, y_b, lam instead: mixes as the models see them"
    ),
    "--mean": _many("X", "of pixels in [0, 1]; one or per channel (default: of train)", type=float),
    "--std": _many("X", "as --mean: models see (pixel - mean) / std", type=float),
    "--chunk": {"type": int, "metavar": "N", "help": "mixes at a time (default: 256)"},
    "--device": {"metavar": "X", "help": "auto, cpu, cuda, mps (default: auto)"},
    "--precision": {"metavar": "{fp32,bf16}", "help": "of forward passes (default: fp32)"},
    "--threads": {"type": int, "metavar": "N", "help": "of torch (default: as torch has it)"},
}


def _add_report_arguments(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.add_argument("run", help="a run directory")


def _add_top_arguments(parser: argparse.ArgumentParser, words: list[str]) -> None:
    add = parser.add_argument
    add("scores", help="a run directory, or a folder or file of scores")
    add("--panel", metavar="PANEL", help="of the run (default: the first)")
    add("--seed", type=int, metavar="SEED", help="of the run (default: the first)")
    add("--teacher", metavar="NAME", help="teacher or posteriors of the run (default: the first)")
    add("--rows", type=int, default=10, metavar="N", help="of each table (default: 10)")


def _add_list_arguments(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.add_argument("what", nargs="*", help="recipes, or a choice module (default: everything)")


def _add_bench_arguments(parser: argparse.ArgumentParser, words: list[str]) -> None:
    add = parser.add_argument
    add("suites", nargs="*", help=f"of {', '.join(BENCH_SUITES)} (default: all)")
    add(
        "--model",
        nargs="+",
        dest="models",
        default=["conv_net"],
        metavar="MODEL",
        help="of mixval list models, or of timm, such as resnet18 (default: conv_net)",
    )
    add(
        "--batch-size",
        nargs="+",
        type=int,
        default=[64],
        metavar="N",
        help="samples per step (default: 64)",
    )
    add(
        "--seconds",
        type=float,
        default=20.0,
        metavar="N",
        help="for each suite, model and batch size; at least six rounds (default: 20)",
    )
    add("--threads", type=int, metavar="N", help="threads of torch (default: one per core)")
    add("--device", default="auto", metavar="X", help="auto, cpu, cuda, mps (default: auto)")
    add(
        "--precision",
        choices=("bf16", "fp32"),
        default="bf16",
        help="of every loop (default: bf16)",
    )
    add("--samples", type=int, default=50_000, metavar="N", help="images (default: 50000)")
    add("--json", metavar="FILE", help="write every round and ratio there")


def _add_datasets_arguments(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.add_argument("--root", metavar="DIR", help="where datasets lie (default: $MIXVAL_DATA)")


_ADD_ARGUMENTS = {
    "bench": _add_bench_arguments,
    "datasets": _add_datasets_arguments,
    "list": _add_list_arguments,
    "report": _add_report_arguments,
    "score": _add_score_arguments,
    "top": _add_top_arguments,
}


def _sections() -> Iterator[tuple[str, str, list[tuple[str, FieldInfo]]]]:
    """Yield the recipe's sections that have fixed keys, with the settings in them."""
    for name, field in Recipe.model_fields.items():
        kind = field.annotation
        if kind is Choice:
            yield name, "", [(name, field)]
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            summary = (kind.__doc__ or "").strip().split("\n")[0]
            yield name, summary, [(f"{name}.{key}", f) for key, f in kind.model_fields.items()]


def _default(recipe: Recipe | None, dotted: str) -> str:
    value: Any = recipe
    for key in dotted.split(".") if recipe is not None else ():
        value = getattr(value, key)
    if isinstance(value, Choice):
        shown = ", ".join(f"{key}={item}" for key, item in value.parameters.items())
        return f"{value.name}({shown})" if shown else value.name
    return "none" if value is None else str(value)


def _values(field: FieldInfo) -> str:
    literals = [arg for arg in get_args(field.annotation) if isinstance(arg, str)]
    return "{" + ",".join(literals) + "}" if literals else "X"


def _take_settings(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Take `--arms.erm.alpha 0` and `--arms.erm.alpha=0` out of the words, as {dotted key: value}.

    Before argparse sees them: it does not know the names of arms and teachers, and would
    take the value of an option it does not know for the recipe.
    """
    others, settings = [], {}
    rest = iter(words)
    for word in rest:
        key, equals, value = word.removeprefix("--").partition("=")
        if not (word.startswith("--") and "." in key):
            others.append(word)
            continue
        value = value if equals else next(rest, "")
        if not value or value.startswith("--"):
            raise UserError(f"{key}: needs a value, as in --{key} VALUE")
        settings[key] = value_of(value)
    return others, settings


def value_of(text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        if text.startswith(("{", "[")):
            raise UserError(f"{text!r}: is not readable as YAML; look at its brackets") from error
        return text


def _seeds(words: list[str]) -> list[int]:
    seeds: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(
                f"--seeds: must be numbers such as 0 1 2 or a range such as 0-9, got {word!r}"
            )
        chosen = range(int(first), int(last if dash else first) + 1)
        if not 0 < len(chosen) <= 10_000:
            raise UserError(f"--seeds: a range must hold 1 to 10000 seeds, got {word!r}")
        seeds += chosen
    return sorted(set(seeds))
