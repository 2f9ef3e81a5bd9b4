"""A run's results -> table for the terminal, and one HTML page that works offline."""

import io
import math
from typing import Any

import matplotlib
import yaml
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from mixval.compare import Interval
from mixval.results import METRICS, Results, Row

_LOWER_IS_BETTER = ("nll", "ece")


def text_table(results: Results) -> str:
    """Return the table of every panel, for a terminal."""
    lines = []
    for panel in results.panels():
        rows = results.rows(panel)
        width = max([len(row.title) for row in rows] + [3])
        lines += ["", panel_title(results, panel)]
        lines.append(
            f"{'arm':<{width}}  {'accuracy %':>13}  {'NLL':>12}  {'ECE %':>11}  "
            f"{'− control':>13}  {'kept':>5}  {'steps':>6}  {'forwards':>8}  {'seconds':>11}  {'n':>3}"
        )
        for row in rows:
            difference = (row.differences or {}).get("accuracy")
            lines.append(
                f"{row.title:<{width}}  {percent(row.accuracy):>13}  {plain(row.nll):>12}  "
                f"{percent(row.ece):>11}  {signed(difference):>13}  {row.kept:>5.0%}  {row.steps:>6.0f}  "
                f"{row.forwards:>8.0f}  {_seconds(row):>11}  {row.n:>3}"
                + ("  LEAKS TEST LABELS" if row.leaks_test_labels else "")
            )
        lines += ["", *results.verdicts(panel)]
    return "\n".join(lines)


def page(
    results: Results,
    environment: dict[str, str],
    figures: dict[str, list[tuple[Figure, str]]],
    command: str,
) -> str:
    """Return the HTML of a run; `figures` by panel, each with its caption."""
    recipe = results.recipe
    jinja = Environment(loader=PackageLoader("mixval.report", "."), autoescape=True)
    panels = [
        {
            "title": panel_title(results, panel),
            "verdicts": results.verdicts(panel),
            "rows": [_html_row(results, row) for row in results.rows(panel)],
            "figures": [
                {"svg": Markup(svg(f, f"{panel}{k}")), "caption": caption}  # noqa: S704 - matplotlib's own
                for k, (f, caption) in enumerate(figures.get(panel, []))
            ],
        }
        for panel in results.panels()
    ]
    noise = {panel: recipe.data_of(panel).label_noise for panel in results.panels()}
    noisy = [f"{share:.0%} in {panel!r}" for panel, share in noise.items() if share]
    return jinja.get_template("page.html.j2").render(
        recipe=recipe,
        environment=environment,
        seeds=results.seeds(),
        panels=panels,
        leaks=any(fact["leaks_test_labels"] for fact in results.facts),
        noise_note=f"Train labels flipped on purpose: {', '.join(noisy)}." if noisy else "",
        command=command,
        recipe_text=yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
    )


def svg(figure: Figure, salt: str) -> str:
    """Return a figure as inline SVG, the same bytes for the same figure."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def panel_title(results: Results, panel: str) -> str:
    return results.recipe.panels[panel].title or panel


def percent(interval: Interval) -> str:
    return _shown(interval, 100, "{:.2f}")


def plain(interval: Interval) -> str:
    return _shown(interval, 1, "{:.3f}")


def signed(interval: Interval | None, scale: float = 100, form: str = "{:+.2f}") -> str:
    return "" if interval is None else _shown(interval, scale, form)


def _shown(interval: Interval, scale: float, form: str) -> str:
    text = form.format(scale * interval.mean)
    if math.isnan(interval.half_width):
        return text
    return f"{text} ± {form.replace('+', '').format(scale * interval.half_width)}"


def _seconds(row: Row) -> str:
    return f"{row.seconds:.1f} + {row.preparation:.1f}"


def _html_row(results: Results, row: Row) -> dict[str, Any]:
    control = results.recipe.arms[row.control].title.strip() or row.control if row.control else ""
    cells = [{"text": percent(row.accuracy)}, {"text": plain(row.nll)}, {"text": percent(row.ece)}]
    for metric in METRICS:
        difference = (row.differences or {}).get(metric)
        scale, form = (1, "{:+.3f}") if metric == "nll" else (100, "{:+.2f}")
        cells.append({"text": signed(difference, scale, form), "tone": _tone(metric, difference)})
    cells += [
        {"text": control},
        {"text": f"{row.kept:.0%}"},
        {"text": f"{row.steps:,.0f}"},
        {"text": f"{row.forwards:,.0f}"},
        {"text": f"{row.seconds:.2f}"},
        {"text": f"{row.preparation:.2f}"},
        {"text": str(row.n)},
    ]
    return {
        "title": row.title.strip(),
        "indent": row.title.startswith(" "),
        "guided": results.recipe.arms[row.arm].is_guided,
        "leaks": row.leaks_test_labels,
        "cells": cells,
    }


def _tone(metric: str, difference: Interval | None) -> str:
    if difference is None or difference.sign == 0:
        return ""
    better = difference.sign > 0 if metric not in _LOWER_IS_BETTER else difference.sign < 0
    return "good" if better else "bad"
