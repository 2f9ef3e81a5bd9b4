"""The most harmful and the most helpful of scored mixes, class pairs and parents, as text."""

from collections.abc import Sequence

import numpy as np

from mixval.columns import aligned
from mixval.types import Column, ScoreTable

Rows = list[tuple[str, ...]]


def top(table: ScoreTable, classes: Sequence[str] = (), count: int = 10) -> str:
    """Return the `count` mixes, pairs and parents at both ends of r_hat.

    Pairs and parents are ordered by the mean r_hat of their mixes; of one mix alone nothing
    is said of them, so two at least are asked for.
    """
    epoch = int(table.epoch.max())
    names = _Names(classes)
    lines = [f"{len(table):,} mixes, epoch {epoch}; r_hat > 0: fitting the failures conflicts"]
    lines.append(f"kept by sign: {(table.r_hat <= 0).mean():.1%}; {_stability(table)}")
    for title, order in _both_ends(table.r_hat, count):
        lines += ["", f"{title} mixes", *aligned(_mixes(table, order, names), "  ")]
    pairs = np.sort(np.stack([table.label_i, table.label_j], axis=1), axis=1)
    parents = np.concatenate([table.i, table.j])[:, None]
    twice = np.concatenate([table.r_hat, table.r_hat])
    for kind, keys, values, label in (
        ("class pairs", pairs, table.r_hat, names.of_pair),
        ("parents", parents, twice, lambda parent: str(parent[0])),
    ):
        known = (keys >= 0).all(1)  # of mixes that came made, nobody knows the parents
        if not known.any():
            continue
        found, means, sizes, kept = _grouped(keys[known], values[known])
        for title, order in _both_ends(means, count):
            rows: Rows = [(kind[:-1], "mean r_hat", "kept", "mixes")]
            rows += [
                (
                    label(found[k].tolist()),
                    f"{means[k]:+.4f}",
                    f"{kept[k]:.0%}",
                    str(sizes[k]),
                )
                for k in order
            ]
            lines += ["", f"{title} {kind}", *aligned(rows, "  ")]
    return "\n".join(lines)


class _Names:
    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = classes

    def __call__(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else str(label)

    def of_pair(self, pair: list[int]) -> str:
        return " + ".join(map(self, pair))


def _stability(table: ScoreTable) -> str:
    known = table.p_negative[~np.isnan(table.p_negative)]
    if not len(known):
        return "one draw, so how stable that is can't be said"
    return f"decisions stable on average to {np.maximum(known, 1 - known).mean():.1%}"


def _both_ends(values: Column, count: int) -> list[tuple[str, Column]]:
    order = np.argsort(values, kind="stable")
    return [("most harmful", order[::-1][:count]), ("most helpful", order[:count])]


def _mixes(table: ScoreTable, order: Column, names: _Names) -> Rows:
    rows: Rows = [("row", "i", "j", "lambda", "classes", "r_hat", "std. error", "P(r_hat <= 0)")]
    for k in order:
        error, probable = table.std_error[k], table.p_negative[k]
        rows.append(
            (
                *map(str, (table.row[k], table.i[k], table.j[k])),
                f"{table.lam[k]:.3f}",
                names.of_pair([int(table.label_i[k]), int(table.label_j[k])]),
                f"{table.r_hat[k]:+.4f}",
                "" if np.isnan(error) else f"{error:.4f}",
                "" if np.isnan(probable) else f"{probable:.2f}",
            )
        )
    spread = bool(np.isfinite(table.std_error[order]).any())
    return rows if spread else [row[:-2] for row in rows]


def _grouped(keys: Column, values: Column) -> tuple[Column, Column, Column, Column]:
    """Return keys of two values or more, the mean of each, how many, and the share <= 0."""
    found, place = np.unique(keys, axis=0, return_inverse=True)
    place = place.ravel()
    sizes = np.bincount(place)
    means = np.bincount(place, values) / sizes
    kept = np.bincount(place, values <= 0) / sizes
    several = sizes > 1
    return found[several], means[several], sizes[several], kept[several]
