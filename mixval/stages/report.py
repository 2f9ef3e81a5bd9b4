"""The last stage: figures and the page of a run, from its files alone."""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mixval import plots
from mixval.report.render import page
from mixval.results import Results
from mixval.score_store import read_scores
from mixval.store import Store
from mixval.types import ScoreTable

_CURVES = 5  # lines that one can still tell apart


def report(results: Results, store: Store) -> Path:
    """Write report.html into the run and return its path."""
    figures = {panel: _figures(results, panel, store) for panel in results.panels()}
    environment = (store.read_json("environment.json") or [{"mixval": "?", "torch": "?"}])[-1]
    commands = (store.read_json("status.json") or {}).get("commands", [])
    command = "\n".join(command for command in commands if command) or "from Python: mixval.run"
    return store.write_text("report.html", page(results, environment, figures, command))


def _figures(results: Results, panel: str, store: Store) -> list[tuple[Figure, str]]:
    rows = results.rows(panel)
    arms = results.recipe.arms
    figures = [
        (
            plots.arm_intervals(
                [row.title for row in rows],
                [100 * row.accuracy.mean for row in rows],
                [100 * row.accuracy.half_width for row in rows],
                [arms[row.arm].is_guided for row in rows],
            ),
            "Mean and 95 % interval over seeds. Judge differences by the table, where they are "
            "paired by seed, and not by whether these intervals overlap.",
        )
    ]
    curves = _dev_curves(results, panel, store)
    if curves:
        caption = "Mean over seeds on val_dev, which nothing trains on."
        figures.append((plots.training_curves(curves, label="val_dev NLL"), caption))
    for teacher in results.recipe.teachers:
        folder = store.place(panel, results.seeds()[0], "scores", teacher)
        if folder.is_dir():
            figures.append(_probe_figure(read_scores(folder), teacher, results.seeds()[0]))
    return figures


def _probe_figure(table: ScoreTable, teacher: str, seed: int) -> tuple[Figure, str]:
    leak = " (leaks test labels)" if table.provenance.get("leaks test labels") == "yes" else ""
    caption = (
        f"r̂ of the probe mixes, base network against teacher {teacher!r}{leak}, seed {seed}. "
        "If the kept share depends on λ, the filter partly selects λ."
    )
    return plots.r_hat_by_lam(table), caption


def _dev_curves(
    results: Results, panel: str, store: Store
) -> dict[str, tuple[list[float], list[float]]]:
    """Return val_dev NLL by epoch, averaged over seeds, of a few arms."""
    arms = results.recipe.arms
    order = sorted(
        arms, key=lambda name: (not arms[name].is_guided, arms[name].yoked_to is not None)
    )
    shown = [name for name in order if results.values(panel, name)][:_CURVES]
    curves = {}
    for name in shown:
        files = store.places(panel, "students", name, "metrics.jsonl")
        runs = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        runs = [[row for row in run if "val_dev_nll" in row] for run in runs]
        values = np.mean([[row["val_dev_nll"] for row in run] for run in runs], axis=0)
        curves[arms[name].title or name] = ([row["epoch"] + 1 for row in runs[0]], list(values))
    return curves
