"""Lines of results -> the figures of the study, with bands of one standard error over seeds."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from score_protocols.mislabels import SHARES
from score_protocols.removal import FRACTIONS
from score_protocols.summary import Line, chosen, datasets

# r_hat's variants in warm colours, what looks at V's labels in blue, the rest in grey and green.
COLOURS = {
    "r̂ EWC": "#d62728",
    "r̂ teacher D+F": "#ff9f40",
    "r̂ teacher D+V": "#8c2d04",
    "r̂ teacher D+F, lowest": "#ff9f40",
    "r̂ teacher D+V, lowest": "#8c2d04",
    "r̂ EWC ≤ 0": "#d62728",
    "r̂ out-of-fold": "#e377c2",
    "RHO-LOSS": "#1f77b4",
    "loss": "#555555",
    "EL2N": "#2ca02c",
    "forgetting": "#9467bd",
    "linear influence": "#bcbd22",
    "entropy": "#17becf",
    "random": "#000000",
}
DASHES = {"random": ":", "r̂ teacher D+V": "--", "r̂ teacher D+V, lowest": "--"}


def draw(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Write the figures of what was run; return where they are."""
    makers = {
        "mislabels": mislabel_figure,
        "removal": removal_figure,
        "steps": steps_figure,
        "repair": repair_figure,
    }
    done = []
    for protocol, make in makers.items():
        if datasets(lines, protocol):
            path = folder / f"evaluate_{protocol}.png"
            _save(make(lines), path)
            done.append(path)
    return done


def _save(figure: Figure, path: Path) -> None:
    """Write with 200 colours: bands over each other have thousands, and a file thrice as large."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=90)
    plt.close(figure)
    Image.open(buffer).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def mislabel_figure(lines: Sequence[Line]) -> Figure:
    """Share of flipped labels found against the share inspected, of samples and of mixes."""
    variant = "10% flipped, plain"
    names = [dataset for dataset, each in datasets(lines, "mislabels") if each == variant]
    figure, axes = _grid(names, ("samples", "mixes"))
    for row, dataset in zip(axes, names, strict=True):
        found = chosen(lines, protocol="mislabels", dataset=dataset, variant=variant)
        for axis, kind in zip(row, ("samples", "mixes"), strict=True):
            for name in COLOURS:
                curves = [
                    each[kind][name]["found"] for each in found.values() if name in each[kind]
                ]
                _band(axis, name, SHARES, curves)
            axis.set(title=f"{dataset}, {kind}, 10 % of labels flipped", xlim=(0, 0.5), ylim=(0, 1))
            axis.set(xlabel="share inspected", ylabel="share of the bad found")
    return _with_legend(figure, axes)


def removal_figure(lines: Sequence[Line]) -> Figure:
    """Test accuracy after retraining without the most, or the least, suspicious."""
    names = [dataset for dataset, _ in datasets(lines, "removal")]
    figure, axes = _grid(names, ("most", "least"))
    for row, dataset in zip(axes, names, strict=True):
        found = chosen(lines, protocol="removal", dataset=dataset)
        for axis, end in zip(row, ("most", "least"), strict=True):
            for name in COLOURS:
                curves = [
                    [each["nothing removed"], *each["curves"][name][end]]
                    for each in found.values()
                    if name in each["curves"]
                ]
                _band(axis, name, (0.0, *FRACTIONS), curves)
            axis.set(title=f"{dataset}: {end} suspicious removed")
            axis.set(xlabel="share removed", ylabel="test accuracy")
    return _with_legend(figure, axes)


def steps_figure(lines: Sequence[Line]) -> Figure:
    """Test accuracy over the steps of training on chosen rows."""
    names = [dataset for dataset, _ in datasets(lines, "steps")]
    figure, axes = _grid(names, ("samples", "mixes"))
    for row, dataset in zip(axes, names, strict=True):
        found = chosen(lines, protocol="steps", dataset=dataset)
        for axis, kind in zip(row, ("samples", "mixes"), strict=True):
            for name in COLOURS:
                arms = [each[kind][name]["curve"] for each in found.values() if name in each[kind]]
                if arms:
                    steps = [step for step, _ in arms[0]]
                    _band(axis, name, steps, [[hit for _, hit in arm] for arm in arms])
            best = max(line.get_ydata().max() for line in axis.lines)
            axis.set(
                title=f"{dataset}, {kind}, 10 % of labels flipped", ylim=(best - 0.25, best + 0.01)
            )
            axis.set(xlabel="optimiser steps", ylabel="test accuracy")
    return _with_legend(figure, axes)


def repair_figure(lines: Sequence[Line]) -> Figure:
    """Accuracy on failures in test after fine-tuning without each score's causes."""
    names = [dataset for dataset, _ in datasets(lines, "repair")]
    figure, axes = plt.subplots(
        1, len(names), figsize=(5.2 * len(names), 5.6), layout="constrained", squeeze=False
    )
    for axis, dataset in zip(axes[0], names, strict=True):
        found = chosen(lines, protocol="repair", dataset=dataset)
        after = {
            name: [100 * each["fine-tuned"][name]["failures in test"] for each in found.values()]
            for name in next(iter(found.values()))["fine-tuned"]
        }
        _bars(axis, after)
        axis.set(title=dataset, xlabel="failures in test that are right after the repair, %")
    return figure


def _bars(axis: Axes, values: Mapping[str, Sequence[float]]) -> None:
    order = sorted(values, key=lambda name: float(np.mean(values[name])))
    means = [np.mean(values[name]) for name in order]
    errors = [np.std(values[name]) / max(1, len(values[name]) - 1) ** 0.5 for name in order]
    colours = ["#d62728" if name.startswith("r̂") else "#9aa5b1" for name in order]
    axis.barh(order, means, xerr=errors, color=colours, ecolor="#333333")
    axis.tick_params(axis="y", labelsize=8)


def _grid(rows: Sequence[str], columns: Sequence[str]) -> tuple[Figure, np.ndarray]:
    return plt.subplots(
        len(rows),
        len(columns),
        figsize=(10, 3.4 * len(rows) + 0.6),
        layout="constrained",
        squeeze=False,
    )


def _band(axis: Axes, name: str, places: Sequence[float], curves: Sequence) -> None:
    if not curves:
        return
    values = np.array(curves)  # (seeds, places)
    mean, error = values.mean(0), values.std(0) / max(1, len(values) - 1) ** 0.5
    axis.plot(places, mean, DASHES.get(name, "-"), color=COLOURS[name], label=name, linewidth=1.4)
    axis.fill_between(places, mean - error, mean + error, color=COLOURS[name], alpha=0.12, lw=0)


def _with_legend(figure: Figure, axes: np.ndarray) -> Figure:
    named = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, fontsize=8)
    return figure
