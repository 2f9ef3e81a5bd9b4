"""A run's results -> table for the terminal, and one HTML page that works offline."""

import io
import math
import unicodedata
from typing import Any

import matplotlib
import yaml
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from mixval.compare import Interval
from mixval.results import METRICS, Results, Row

_HEADER = (
    *("arm", "accuracy %", "NLL", "ECE %", "Δ accuracy", "Δ NLL", "Δ ECE", "to"),
    *("kept", "steps", "forwards", "seconds", "n"),
)
_LOWER_IS_BETTER = ("nll", "ece")


def text_table(results: Results) -> str:
    """Return the table of every panel, for a terminal; differences are to the arm's control."""
    lines = []
    for panel in results.panels():
        rows = results.rows(panel)
        cells = [_HEADER, *map(_text_cells, rows)]
        widths = [max(_width(row[column]) for row in cells) for column in range(len(cells[0]))]
        lines += ["", panel_title(results, panel)]
        for name, *numbers in cells:
            right = (text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))
            left = name + " " * (widths[0] - _width(name))
            lines.append("  ".join([left, *right]).rstrip())
        lines += ["", *results.verdicts(panel)]
    return "\n".join(lines)


def _width(text: str) -> int:
    """Return the columns a text takes: the hat of r̂ is a character without a width."""
    return sum(not unicodedata.combining(character) for character in text)


def _text_cells(row: Row) -> tuple[str, ...]:
    return (
        row.title + (" (LEAKS TEST LABELS)" if row.leaks_test_labels else ""),
        percent(row.accuracy),
        plain(row.nll),
        percent(row.ece),
        signed(row.differences.get("accuracy")),
        signed(row.differences.get("nll"), 1, "{:+.3f}"),
        signed(row.differences.get("ece")),
        row.control or "",
        _kept(row),
        _with_before(row, "steps", "{:.0f}"),
        _with_before(row, "forwards", "{:.0f}k", 1e-3),
        _with_before(row, "seconds", "{:.1f}"),
        str(row.n),
    )


def _kept(row: Row) -> str:
    """Return the share of mixes kept and, where the clean term is filtered, that of it."""
    if math.isnan(row.kept):
        return ""
    return f"{row.kept:.0%}" + ("" if row.clean_kept == 1 else f", clean {row.clean_kept:.0%}")


def _with_before(row: Row, cost: str, form: str, scale: float = 1.0) -> str:
    """Return what the arm cost and, behind a plus, what its base and teachers cost."""
    own = form.format(scale * row.cost[cost])
    before = row.preparation[cost]
    return f"{own}+{form.format(scale * before)}" if before else own


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
    damage = {panel: recipe.data_of(panel).corruption.name for panel in results.panels()}
    noisy += [f"{name} in {panel!r}" for panel, name in damage.items() if name != "none"]
    return jinja.get_template("page.html.j2").render(
        recipe=recipe,
        environment=environment,
        seeds=results.seeds(),
        panels=panels,
        holdout=results.recipe.failures.holdout,
        leaks=any(fact["leaks_test_labels"] for fact in results.facts),
        noise_note=f"Train labels flipped or samples damaged on purpose: {', '.join(noisy)}."
        if noisy
        else "",
        command=command,
        recipe_text=yaml.safe_dump(
            recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True
        ),
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
    return f"{text}±{form.replace('+', '').format(scale * interval.half_width)}"


def _html_row(results: Results, row: Row) -> dict[str, Any]:
    control = results.title(row.control) if row.control else ""
    cells = [{"text": percent(row.accuracy)}, {"text": plain(row.nll)}, {"text": percent(row.ece)}]
    for metric in METRICS:
        difference = row.differences.get(metric)
        scale, form = (1, "{:+.3f}") if metric == "nll" else (100, "{:+.2f}")
        cells.append({"text": signed(difference, scale, form), "tone": _tone(metric, difference)})
    cells += [
        {"text": control},
        {"text": _kept(row)},
        {"text": _with_before(row, "steps", "{:,.0f}")},
        {"text": _with_before(row, "forwards", "{:,.0f}")},
        {"text": _with_before(row, "seconds", "{:.2f}")},
        {"text": "" if row.holdout is None else percent(row.holdout)},
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
