"""Artifacts -> matplotlib Figure, each with a caption that says what to read from it."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from mixval.types import ScoreTable

__all__ = ["arm_intervals", "r_hat_by_lam", "schedule_curves", "training_curves"]

_COLOURS = ("#3b6fb6", "#c8553d", "#4a8f5c", "#8a5fa8", "#b08a2e", "#4d4d4d")
_QUIET = {"color": "#888888", "linewidth": 0.8}


def arm_intervals(
    names: Sequence[str],
    means: Sequence[float],
    half_widths: Sequence[float],
    highlighted: Sequence[bool],
    *,
    label: str = "test accuracy (%)",
) -> Figure:
    """Mean and 95 % interval of each arm over seeds; the guided arms stand out."""
    figure = Figure(figsize=(7.2, 0.3 * len(names) + 0.9), layout="constrained")
    axes = figure.subplots()
    for row, (mean, width, strong) in enumerate(zip(means, half_widths, highlighted, strict=True)):
        width = 0.0 if np.isnan(width) else width
        colour = _COLOURS[1] if strong else _COLOURS[0]
        axes.errorbar(mean, row, xerr=width, fmt="o", color=colour, capsize=3, markersize=5)
    axes.set_yticks(range(len(names)), [name.strip() for name in names], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    _plain(axes)
    return figure


def r_hat_by_lam(table: ScoreTable) -> Figure:
    """r_hat of each probed mix against lambda: above zero it conflicts with the failures."""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for sign, colour, name in (
        (1, _COLOURS[1], "r̂ > 0: excluded"),
        (-1, _COLOURS[0], "r̂ ≤ 0: kept"),
    ):
        chosen = (table.r_hat > 0) == (sign > 0)
        left.scatter(
            table.lam[chosen], table.r_hat[chosen], s=5, alpha=0.5, color=colour, label=name
        )
    left.axhline(0, **_QUIET)
    left.set(xlabel="λ", ylabel="r̂", xlim=(0, 1))
    left.legend(fontsize=8, markerscale=2)
    bins = np.linspace(0, 1, 11)
    middle = (bins[1:] + bins[:-1]) / 2
    which = np.clip(np.digitize(table.lam, bins) - 1, 0, 9)
    kept = [
        np.mean(table.r_hat[which == k] <= 0) if (which == k).any() else np.nan for k in range(10)
    ]
    right.bar(middle, kept, width=0.08, color=_COLOURS[0])
    right.set(xlabel="λ", ylabel="share kept (r̂ ≤ 0)", xlim=(0, 1), ylim=(0, 1))
    for axes in (left, right):
        _plain(axes)
    return figure


def schedule_curves(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Alpha over training, a panel for each schedule: high alpha mixes strongly, 0 not at all."""
    columns = 3
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(8.4, 2.1 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, (progress, alpha)) in zip(grid.flat, curves.items(), strict=False):
        axes.axhline(1, linestyle=":", **_QUIET)
        axes.plot(progress, alpha, color=_COLOURS[0], linewidth=2)
        axes.set_title(name, fontsize=10)
        axes.set_yticks([0, 1, 5, 10])
        axes.grid(alpha=0.2)
        _plain(axes)
    for axes in list(grid.flat)[len(curves) :]:
        axes.set_visible(False)
    figure.supxlabel("progress of training", fontsize=10)
    figure.supylabel("α of Beta(α, α)", fontsize=10)
    return figure


def training_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, label: str
) -> Figure:
    """A quantity over epochs, one line per arm, on data that nothing trains on."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for index, (epochs, values) in enumerate(curves.values()):
        axes.plot(epochs, values, color=_COLOURS[index % len(_COLOURS)])
    axes.set(xlabel="epoch", ylabel=label)
    axes.grid(alpha=0.3)
    legend = axes.legend(axes.get_lines(), [name.strip() for name in curves], fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a title is text, whatever signs are in it
    _plain(axes)
    return figure


def _plain(axes: object) -> None:
    axes.spines[["top", "right"]].set_visible(False)  # type: ignore[attr-defined]
