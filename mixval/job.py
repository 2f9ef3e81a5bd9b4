"""A run from its recipe to its report: what the command line calls."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from mixval import choose
from mixval.environment import environment
from mixval.errors import UserError, exit_state
from mixval.external import check_external
from mixval.recipe import Recipe
from mixval.store import Store
from mixval.work import Work, with_replayed

if TYPE_CHECKING:
    from mixval.types import ScoreTable


def run_job(
    recipe: Recipe,
    out: Path | str,
    *,
    stage: str = "run",
    arms: list[str] | None = None,
    panels: list[str] | None = None,
    dry_run: bool = False,
    command: str = "",
    say: Callable[[str], None] = print,
) -> Path | None:
    """Run the recipe up to a stage in the directory `out`; return the path of its report, if any.

    Everything that can be checked without torch is checked first, and nothing is written
    before it is.
    """
    chosen = choose.subset("arms", arms, recipe.arms)
    over = choose.subset("panels", panels, recipe.panels)
    for name, teacher in recipe.teachers.items():
        if teacher.weights is not None:
            check_external(recipe, f"teachers.{name}", teacher)
    store = Store(Path(out))

    recipe = store.settled(recipe)
    store.check(recipe)

    from mixval.engine import num_workers, resolve_device
    from mixval.processes import start_processes
    from mixval.sources import forget_sources
    from mixval.tuning import tuned

    forget_sources()
    settings = recipe.engine
    processes = start_processes(resolve_device(settings.device))
    workers = num_workers(settings.device, settings.workers, len(over) * len(recipe.seeds))
    workers = workers if processes.world == 1 else 1
    say = say if processes.is_main else lambda text: None  # one speaks for all
    best = tuned(recipe, over[0])
    if best.found:
        say(best.found)
        forget_sources()  # workers load their own
    work = Work(best.recipe, store, stage, with_replayed(recipe, chosen), over, workers)
    if dry_run:
        _rehearse(work, say)
        return None
    with ExitStack() as stack:
        processes.from_main(lambda: stack.enter_context(store.locked()))
        _run_recorded(work, command, say, processes.is_main)
        report = stage == "run" and processes.is_main
        path = _summarise(store, say) if report else None
        processes.wait()  # so that none ends while another is still at work
        return path


def _rehearse(work: Work, say: Callable[[str], None]) -> None:
    from mixval.estimate import estimate, rehearse

    rehearse(work)
    say(str(estimate(work)))
    say("dry run: every network trained a few steps on a part of the data; nothing was kept")


def _run_recorded(work: Work, command: str, say: Callable[[str], None], writes: bool) -> None:
    """Run the cells, and keep on record how it stands: running, finished, interrupted, failed."""
    from mixval.estimate import Estimate
    from mixval.runner import run_cells

    store = work.store
    before = (store.read_json("status.json") or {}).get("commands", [])
    commands = [*(old for old in before if old != command), command]
    note = {"commands": commands, "seeds": work.recipe.seeds, "stage": work.stage}

    if not writes:
        run_cells(work, lambda cost: None)
        return

    def begin(cost: Estimate) -> None:
        say(str(cost))
        store.bind(work.recipe)
        store.write_json("status.json", {**note, "state": "running"})
        known = store.read_json("environment.json") or []
        if environment() not in known:
            store.write_json("environment.json", [*known, environment()])

    try:
        reused = run_cells(work, begin)
    except BaseException as error:
        state, code = exit_state(error)
        if store.recipe() is not None:
            ending = {"state": state, "exit_code": code, "cause": str(error)}
            store.write_json("status.json", {**note, **ending})
        raise
    store.write_json("status.json", {**note, "state": "finished", "exit_code": 0})
    if reused:
        say("reused: " + ", ".join(f"{count} {kind}" for kind, count in reused.items()))
    if work.stage == "repair":
        from mixval.repair_table import repair_table

        say(repair_table(store))
    elif work.stage != "run":
        say(stage_summary(store, work.stage))


def write_report(run: Path) -> Path:
    """Write the report of a run again from its files, and return its path."""
    store = Store(run)
    recipe = store.recipe()
    if recipe is None:
        raise UserError(f"{run}: is not a run directory (it has no recipe.yaml)")
    from mixval.results import Results
    from mixval.stages.report import report

    results = Results.read(recipe, store)
    if not results.facts:
        raise UserError(f"{run}: has no finished arm yet; run `mixval run` first")
    return report(results, store)


def find_scores(
    path: Path, panel: str | None = None, seed: int | None = None, teacher: str | None = None
) -> tuple["ScoreTable", list[str]]:
    """Return scores of a run's probe mixes, or those in a folder or file, and class names."""
    from mixval.score_store import read_scores

    store = Store(path)
    recipe = store.recipe() if path.is_dir() else None
    if recipe is None:
        if not path.exists():
            raise UserError(f"{path}: does not exist; give a run directory or scores")
        return read_scores(path), []
    panel = choose.subset("panel", [panel] if panel else None, recipe.panels)[0]
    named = [*recipe.teachers, *recipe.posteriors]
    teachers = choose.subset("teacher", [teacher] if teacher else None, named)
    seed = recipe.seeds[0] if seed is None else seed
    folder = store.place(panel, seed, "scores", *teachers[:1])
    if not folder.is_dir():
        raise UserError(f"{path}: has no scores of {panel}, seed {seed}; make them: mixval score")
    facts = dict(store.finished(f"{panel}/seed-{seed}/data"))
    named = next(iter(facts.values()), {}).get("classes", [])
    return read_scores(folder), list(named)


_PLACES = {
    "base": "base",
    "failures": "failures",
    "teacher": "teachers/**",
    "posteriors": "posteriors/*",
    "score": "scores/*",
    "student": "students/*",
}


def stage_summary(store: Store, stage: str) -> str:
    """Return the facts of a stage's artifacts, averaged over seeds, and where they lie."""
    found: dict[str, list[dict[str, float]]] = {}
    leaking: set[str] = set()
    for place, facts in store.finished(f"*/seed-*/{_PLACES[stage]}"):
        name = "/".join([place[0], "seed-*", *place[2:]])
        if facts.pop("leaks_test_labels", False):
            leaking.add(name)
        numbers = {key: value for key, value in facts.items() if not isinstance(value, dict)}
        found.setdefault(name, []).append(numbers)
    lines = []
    for name, every in found.items():
        means = {key: sum(facts[key] for facts in every) / len(every) for key in every[0]}
        shown = ", ".join(f"{key} {value:.4g}" for key, value in means.items())
        leak = ", leaks test labels" if name in leaking else ""
        lines.append(f"{store.root}/{name}: {shown} (mean of {len(every)}){leak}")
    return "\n".join(lines)


def _summarise(store: Store, say: Callable[[str], None]) -> Path:
    from mixval.report.render import text_table
    from mixval.results import Results

    recipe = store.recipe()
    assert recipe is not None
    say(text_table(Results.read(recipe, store)))
    path = write_report(store.root)
    say(f"\nreport: {path}")
    return path
