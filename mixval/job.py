"""A run from its recipe to its report: what the command line calls."""

import logging
from pathlib import Path

from mixval.environment import environment
from mixval.errors import UserError, exit_state
from mixval.external import check_external
from mixval.recipe import Recipe
from mixval.store import Store
from mixval.work import Work, with_replayed

log = logging.getLogger(__name__)


def run_job(
    recipe: Recipe,
    out: Path | str,
    *,
    stage: str = "run",
    arms: list[str] | None = None,
    panels: list[str] | None = None,
    dry_run: bool = False,
    command: str = "",
) -> Path | None:
    """Run the recipe up to a stage in the directory `out`; return the path of its report, if any.

    Everything that can be checked without torch is checked first, and nothing is written
    before it is.
    """
    for name, teacher in recipe.teachers.items():
        if teacher.weights is not None:
            check_external(recipe, f"teachers.{name}", teacher)
    store = Store(Path(out))
    store.check(recipe)

    from mixval.estimate import Estimate, estimate
    from mixval.runner import run_cells

    chosen = list(recipe.arms) if arms is None else arms
    over = list(recipe.panels) if panels is None else panels
    work = Work(recipe, store, stage, with_replayed(recipe, chosen), over)
    if dry_run:
        print(estimate(work))
        print("dry run: the recipe is sound, one batch trained, nothing was written")
        return None
    note = {"command": command, "seeds": recipe.seeds, "stage": stage}

    def begin(cost: Estimate) -> None:
        print(cost, flush=True)
        store.bind(recipe)
        store.write_json("environment.json", environment())
        store.write_json("status.json", {**note, "state": "running"})

    with store.locked():
        try:
            reused = run_cells(work, begin)
        except BaseException as error:
            state, code = exit_state(error)
            ending = {"state": state, "exit_code": code, "cause": str(error)}
            if store.recipe() is not None:
                store.write_json("status.json", {**note, **ending})
            raise
        store.write_json("status.json", {**note, "state": "finished", "exit_code": 0})
        if reused:
            print("reused:", ", ".join(f"{count} {kind}" for kind, count in reused.items()))
        if stage != "run":
            print(stage_summary(store, stage))
            return None
        return _summarise(store)


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


_PLACES = {
    "base": "base",
    "failures": "failures",
    "teacher": "teachers/**",
    "score": "scores/*",
    "student": "students/*",
}


def stage_summary(store: Store, stage: str) -> str:
    """Return the facts of a stage's artifacts, averaged over seeds, and where they lie."""
    found: dict[str, list[dict[str, float]]] = {}
    for place, facts in store.finished(f"*/seed-*/{_PLACES[stage]}"):
        name = "/".join([place[0], "seed-*", *place[2:]])
        found.setdefault(name, []).append(
            {k: v for k, v in facts.items() if not isinstance(v, dict)}
        )
    lines = []
    for name, every in found.items():
        means = {key: sum(facts[key] for facts in every) / len(every) for key in every[0]}
        shown = ", ".join(f"{key} {value:.4g}" for key, value in means.items())
        lines.append(f"{store.root}/{name}: {shown} (mean of {len(every)})")
    return "\n".join(lines)


def _summarise(store: Store) -> Path:
    from mixval.report.render import text_table
    from mixval.results import Results

    recipe = store.recipe()
    assert recipe is not None
    print(text_table(Results.read(recipe, store)))
    path = write_report(store.root)
    print(f"\nreport: {path}")
    return path
