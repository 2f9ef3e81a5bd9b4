"""What `mixval repair` found, as a table over seeds; read from the store without torch."""

from collections.abc import Iterator, Sequence
from typing import Any

from mixval.columns import aligned
from mixval.compare import mean_interval
from mixval.store import Store

GROUPS = ("query", "holdout", "right before", "test")
_HEAD = ("causes by", "removed by", "query", "hold-out", "right before", "test")
Facts = dict[str, Any]


def repair_table(store: Store) -> str:
    """Return accuracies in % by selector and removal, with 95 % intervals over seeds."""
    recipe = store.recipe()
    assert recipe is not None
    found: dict[tuple[str, str], list[Facts]] = {}
    for place, facts in store.finished("*/seed-*/repair/*"):
        found.setdefault((place[0], place[-1]), []).append(facts)
    blocks = []
    for panel in recipe.panels:
        by_selector = {name: every for (of, name), every in found.items() if of == panel}
        if by_selector:
            blocks.append(_panel(panel, by_selector, recipe.repair.removals))
    return "\n\n".join(blocks)


def _panel(panel: str, by_selector: dict[str, list[Facts]], removals: Sequence[str]) -> str:
    some = next(iter(by_selector.values()))
    leak = ", leaks test labels" if any(facts["leaks_test_labels"] for facts in some) else ""
    lines = [f"{panel}: accuracy in % (mean ± half of the 95 % interval over seeds){leak}"]
    lines += aligned([_HEAD, *_rows(by_selector, removals)])
    return "\n".join([*lines, *(_sentence(name, every) for name, every in by_selector.items())])


def _rows(
    by_selector: dict[str, list[Facts]], removals: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    first = next(iter(by_selector.values()))
    yield "-", "none", *_cells([facts["removals"]["none"] for facts in first])
    for selector, every in by_selector.items():
        for removal in removals:
            yield selector, removal, *_cells([facts["removals"][removal] for facts in every])


def _cells(every: Sequence[Facts | None]) -> list[str]:
    """Return a cell for each group; removals that diverged have no numbers and are counted."""
    held = [numbers for numbers in every if numbers is not None]
    cells = [_cell([n[group] for n in held if n[group] is not None]) for group in GROUPS]
    lost = len(every) - len(held)
    return [*cells, f"diverged in {lost} of {len(every)} seeds"] if lost else cells


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    interval = mean_interval([100 * value for value in values])
    return f"{interval.mean:.1f}" + (f" ± {interval.half_width:.1f}" if len(values) > 1 else "")


def _sentence(selector: str, every: list[Facts]) -> str:
    """Say how many causes a selector named, and how many of them were damaged on purpose."""

    def mean(key: str) -> float:
        return float(sum(facts[key] for facts in every) / len(every))

    named = f"{selector}: {mean('causes'):.4g} causes of {mean('train'):.4g} train samples"
    if not mean("corrupted"):
        return f"{named} (mean of {len(every)})"
    hits, damaged = mean("causes corrupted"), mean("corrupted")
    precision = f"precision {hits / max(mean('causes'), 1e-9):.0%}"
    recall = f"recall {hits / damaged:.0%} of the {damaged:.4g} corrupted"
    return f"{named}, {precision}, {recall} (mean of {len(every)})"
