"""The verbs: parse, call, print. Nothing here imports torch before the recipe is checked."""

import argparse
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from mixval import choose
from mixval.arguments import BENCH_SUITES, parse, run_recipe, scores_own_models, value_of
from mixval.columns import aligned
from mixval.dataset_facts import data_root, describe
from mixval.errors import Interrupted, UserError, exit_state
from mixval.recipe import Arm, Choice, Panel, Teacher
from mixval.recipe_loading import PACKAGED, load_recipe, packaged_recipes

CHOICE_MODULES = (
    "alpha_schedules",
    "augmentations",
    "class_weights",
    "corruptions",
    "datasets",
    "failure_rules",
    "filter_policies",
    "losses",
    "models",
    "plots",
    "posterior_fits",
)


def command() -> NoReturn:
    """Run the command of this process and end it."""
    code = main()
    processes = sys.modules.get("mixval.processes")
    if processes is not None:
        processes.leave(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 failed, 2 bad input, 130/143 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = sorted(words, key=lambda word: word in ("--debug", "--quiet"))  # anywhere will do
    try:
        arguments, overrides = parse(words)
        level = logging.WARNING if arguments.quiet else logging.INFO
        logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
        COMMANDS.get(arguments.verb, _run)(arguments, overrides)
    except BrokenPipeError:
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return _fail(error, debug)
    return 0


def _fail(error: BaseException, debug: bool) -> int:
    state, code = exit_state(error)
    message = " ".join(str(error).split())
    if state == "interrupted":
        message = f"{message or 'stopped'}; run the same command again to go on"
    elif not isinstance(error, UserError | FloatingPointError | OSError):
        message = f"{type(error).__name__}: {message}"
        message += "" if debug else "; run again with --debug for the traceback"
    if debug:
        traceback.print_exception(error)
    if not _said_by_another(error):
        print(f"mixval: {message}", file=sys.stderr)
    return code


def _said_by_another(error: BaseException) -> bool:
    """Say whether this is one of several processes, and the main one ends for the same reason."""
    if os.environ.get("RANK", "0") == "0":
        return False
    processes = sys.modules.get("mixval.processes")  # not loaded yet: all read the same words
    together = processes is not None and processes.joined()
    shared = isinstance(error, Interrupted) or getattr(error, "said_by_main", False)
    return shared or not together


# -- commands -----------------------------------------------------------------------------


def _run(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    recipe = load_recipe(arguments.recipe, overrides)
    from mixval.job import run_job

    run_job(
        recipe,
        Path(arguments.out or Path("runs") / recipe.name),
        stage=arguments.verb,
        arms=arguments.arms,
        panels=arguments.panels,
        dry_run=arguments.dry_run,
        command=shlex.join(["mixval", *arguments.words]),
        say=_say_nothing if arguments.quiet else _say,
    )


def _score(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    if scores_own_models(arguments.words):
        _score_own_models(arguments, overrides)
        return
    recorded = run_recipe(arguments.recipe)
    if recorded is not None:
        arguments.out = arguments.out or arguments.recipe
        arguments.recipe = recorded
    _run(arguments, overrides)


def _score_own_models(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    given = {key: value for key, value in vars(arguments).items() if value is not None}
    _check_own_models(given, overrides)
    names = ["split", "rows", "alpha", "seed", "mixes", "batches", "mean", "std"]
    names += ["chunk", "device", "precision", "threads"]
    from mixval.offline import score_mixes

    scores = score_mixes(
        given["base"],
        given["updated"],
        value_of(given["data"]) if "data" in given else None,
        out=given["out"],
        command=shlex.join(["mixval", *arguments.words]),
        progress=not arguments.quiet,
        **{name: given[name] for name in names if name in given},
    )
    if not arguments.quiet and os.environ.get("RANK", "0") == "0":
        print(f"scores: {scores.folder} ({scores.rows:,} mixes)")
        print(f"share r_hat <= 0: {scores.share:.1%}")
        print(f"next: {shlex.join(['mixval', 'top', str(scores.folder)])}")


def _check_own_models(given: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Refuse what does not go together, before torch is loaded."""
    if overrides:
        raise UserError(f"--{next(iter(overrides))}: is a recipe's; it does not go with --base")
    for name in ("base", "updated", "out"):
        if name not in given:
            raise UserError(f"--{name}: must be given to score your own models")
    of_drawn, of_data = ["rows", "alpha", "seed"], ["data", "split", "mean", "std"]
    for kind, useless in (("mixes", of_drawn), ("batches", ["mixes", *of_drawn, *of_data])):
        for name in useless:
            if kind in given and name in given:
                raise UserError(f"--{name}: does not go with --{kind}; leave one of them out")
    if "batches" not in given and "data" not in given:
        raise UserError("--data: must be given, such as fashion_mnist; or give --batches")


def _say(text: str) -> None:
    print(text, flush=True)


def _say_nothing(text: str) -> None:
    pass


def _report(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from mixval.job import write_report

    print(write_report(Path(arguments.run)))


def _top(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    if arguments.rows < 1:
        raise UserError(f"--rows: must be at least 1, got {arguments.rows}")
    from mixval.job import find_scores
    from mixval.offline.folder import class_names
    from mixval.top import top

    chosen = {key: getattr(arguments, key) for key in ("panel", "seed", "teacher")}
    table, classes = find_scores(Path(arguments.scores), **chosen)
    print(top(table, classes or class_names(Path(arguments.scores)), arguments.rows))


def _list(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    sections: dict[str, type[BaseModel]] = {"arms": Arm, "teachers": Teacher, "panels": Panel}
    everything = ["recipes", *sections, *CHOICE_MODULES]
    for module in choose.subset("list", arguments.what or None, everything):
        print(module)
        if module == "recipes":
            print("  " + "\n  ".join(str(PACKAGED / f"{name}.yaml") for name in packaged_recipes()))
        elif module in sections:
            for key, field in sections[module].model_fields.items():
                default = field.default.name if isinstance(field.default, Choice) else field.default
                print(f"  {key:<14} {field.description} (default: {default})")
        else:
            for option in choose.options(module).values():
                print(f"  {option.signature}\n      {option.summary}")


def _bench(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    suites = choose.subset("bench", arguments.suites or None, BENCH_SUITES)
    for flag, numbers in (
        ("batch-size", arguments.batch_size),
        ("seconds", [arguments.seconds]),
        ("samples", [arguments.samples]),
        ("threads", [] if arguments.threads is None else [arguments.threads]),
    ):
        if not all(0 < number < float("inf") for number in numbers):
            raise UserError(f"--{flag}: must be above 0, got {min(numbers)}")
    from mixval.bench.report import run_all

    run_all(
        suites,
        models=arguments.models,
        batch_sizes=arguments.batch_size,
        seconds=arguments.seconds,
        threads=arguments.threads,
        device=arguments.device,
        precision=arguments.precision,
        samples=arguments.samples,
        file=None if arguments.json is None else Path(arguments.json),
        say=_say_nothing if arguments.quiet else _say,
    )


def _datasets(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    root = data_root(arguments.root)
    print(f"below {root}" if root is not None else "no folder given by --root or MIXVAL_DATA")
    print("\n".join(aligned(describe(root))))
    print("Your own: image_folder, npz, and any torch Dataset by mixval.from_dataset.")


COMMANDS = {
    "bench": _bench,
    "datasets": _datasets,
    "list": _list,
    "report": _report,
    "score": _score,
    "top": _top,
}
