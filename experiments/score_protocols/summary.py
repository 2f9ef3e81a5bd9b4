"""Lines of results -> tables: mean over seeds ± the half-width of its 95 % t interval."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mixval import mean_interval, paired_difference
from score_protocols.cases import SETTINGS
from score_protocols.measures import steps_to
from score_protocols.mislabels import SHARES
from score_protocols.removal import FRACTIONS

Line = Mapping[str, Any]


def tables(lines: Sequence[Line]) -> str:
    """Return all tables in Markdown, of what was run."""
    parts = [mislabel_tables, removal_tables, steps_tables, repair_tables, library_tables]
    return "\n".join(text for part in parts for text in part(lines))


def chosen(lines: Iterable[Line], **wanted: str) -> dict[int, Any]:
    """Return what was found, by seed."""
    return {
        line["seed"]: line["found"]
        for line in lines
        if all(line[name] == value for name, value in wanted.items())
    }


def datasets(lines: Iterable[Line], protocol: str) -> list[tuple[str, str]]:
    """Return the datasets and variants that a protocol was run on, as they came."""
    pairs = [(x["dataset"], x["variant"]) for x in lines if x["protocol"] == protocol]
    return list(dict.fromkeys(pairs))


def over_seeds(found: Mapping[int, Any], get: Callable[[Any], float | None], digits: int) -> str:
    """Return 'mean ± half-width' of what `get` takes from each seed; a dash where none has it."""
    values = [value for each in found.values() if (value := get(each)) is not None]
    if not values:
        return "–"
    interval = mean_interval(values)
    fewer = "" if len(values) == len(found) else f" ({len(values)} of {len(found)})"
    spread = "" if np.isnan(interval.half_width) else f" ± {interval.half_width:.{digits}f}"
    return f"{interval.mean:.{digits}f}{spread}{fewer}"


def table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [f"\n**{title}**\n", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join(lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def seeds(found: Mapping[int, Any]) -> str:
    return f"{len(found)} seeds" if len(found) != 1 else "1 seed"


def mislabel_tables(lines: Sequence[Line]) -> Iterable[str]:
    """AUROC of each kind of rows, and what was found after inspecting a fifth, by condition."""
    places = datasets(lines, "mislabels")
    if not places:
        return
    found = {
        f"{dataset}, {variant}": chosen(
            lines, protocol="mislabels", dataset=dataset, variant=variant
        )
        for dataset, variant in places
    }
    fifth = SHARES.index(0.2)
    views: dict[str, tuple[Any, ...]] = {
        "AUROC, samples": ("samples", "auroc"),
        "share found in the first 20 %, samples": ("samples", "found", fifth),
        "AUROC, mixes with a flipped parent": ("mixes", "auroc"),
        "AUROC, mixes of which half or more is flipped": ("mixes, flipped share ≥ ½", "auroc"),
    }
    for title, (kind, *path) in views.items():
        rows = {
            name: [
                over_seeds(each, lambda one, n=name, k=kind, p=path: _part(one, k, n, *p), 3)
                for each in found.values()
            ]
            for name in _best_first(found, kind)
        }
        columns = [place.replace(" flipped,", "") for place in found]
        fewest = min(found.values(), key=len)
        yield table(f"Mislabels: {title}, {seeds(fewest)}", columns, rows)


def _best_first(found: Mapping[str, Mapping[int, Any]], kind: str) -> list[str]:
    """Return the scores of a kind of rows by their mean AUROC over everything that was run."""
    every = [one[kind] for each in found.values() for one in each.values()]
    return sorted(every[0], key=lambda name: -np.mean([one[name]["auroc"] for one in every]))


def _part(found: Any, *path: Any) -> float | None:
    for step in path:
        if isinstance(found, Mapping) and step not in found:
            return None
        found = found[step]
    return found


def removal_tables(lines: Sequence[Line]) -> Iterable[str]:
    """Test accuracy in %, and its difference to random removal, paired over seeds."""
    for dataset, variant in datasets(lines, "removal"):
        found = chosen(lines, protocol="removal", dataset=dataset, variant=variant)
        names = next(iter(found.values()))["curves"]
        rows = {}
        for name in names:
            ends = [(end, place) for end in ("most", "least") for place in range(len(FRACTIONS))]
            rows[name] = [
                over_seeds(
                    found, lambda each, n=name, e=end, p=place: 100 * each["curves"][n][e][p], 1
                )
                for end, place in ends
            ] + [to_random(found, name, lambda each, n: 100 * each["curves"][n]["most"][0])]
        for name in ("nothing removed", "flipped removed"):
            whole = over_seeds(found, lambda each, n=name: 100 * each[n], 1)
            rows[name] = [whole] + ["–"] * 2 * len(FRACTIONS)
        columns = [
            f"{end} suspicious {part:.0%} gone" for end in ("most", "least") for part in FRACTIONS
        ]
        title = f"Removal: test accuracy in %, {dataset}, {variant}, {seeds(found)}"
        yield table(title, [*columns, "most 10% gone, to random"], rows)


def to_random(found: Mapping[int, Any], name: str, get: Callable[[Any, str], float]) -> str:
    """Return what a score has over a random one, paired over seeds."""
    own, random = (
        {seed: get(each, who) for seed, each in found.items()} for who in (name, "random")
    )
    difference = paired_difference(own, random)
    assert difference is not None
    if name == "random":
        return "–"
    return f"{difference.mean:+.1f} ± {difference.half_width:.1f}".replace(" ± nan", "")


def steps_tables(lines: Sequence[Line]) -> Iterable[str]:
    """Steps to the target, accuracy at the end, and how many trained labels were wrong."""
    for dataset, variant in datasets(lines, "steps"):
        found = chosen(lines, protocol="steps", dataset=dataset, variant=variant)
        target = SETTINGS[dataset].target
        for kind in ("samples", "mixes"):
            rows = {}
            for name in next(iter(found.values()))[kind]:
                arm = {seed: each[kind][name] for seed, each in found.items()}
                rows[name] = [
                    over_seeds(arm, lambda each, t=target: steps_to(each["curve"], t), 0),
                    over_seeds(arm, lambda each: 100 * max(a for _, a in each["curve"]), 1),
                    over_seeds(arm, lambda each: 100 * each["curve"][-1][1], 1),
                    to_random(found, name, lambda e, n, k=kind: 100 * e[k][n]["curve"][-1][1]),
                    over_seeds(arm, lambda each: 100 * each["wrong"], 1),
                ]
            columns = [f"steps to {target:.0%}", "best, %", "at the end, %"]
            columns += ["at the end, to random", "wrong labels seen, %"]
            yield table(f"Steps, {kind}: {dataset}, {variant}, {seeds(found)}", columns, rows)


def repair_tables(lines: Sequence[Line]) -> Iterable[str]:
    """How many of the causes named are flipped labels, and accuracies after fine-tuning."""
    measures = ("F", "failures in test", "right before", "test")
    for dataset, variant in datasets(lines, "repair"):
        found = chosen(lines, protocol="repair", dataset=dataset, variant=variant)
        first = next(iter(found.values()))
        rows = {}
        for name in first["fine-tuned"]:
            named = over_seeds(found, lambda each, n=name: _percent(each["found"].get(n)), 0)
            rows[name] = [named] + [
                over_seeds(found, lambda each, n=name, m=m: 100 * each["fine-tuned"][n][m], 1)
                for m in measures
            ]
        title = f"Repair by fine-tuning without the causes: {dataset}, {seeds(found)}"
        yield table(title, ["causes that are flipped, %", *measures], rows)
        rows = {
            f"{way}, causes: {name}": [
                over_seeds(
                    found, lambda each, n=name, w=way, m=m: _treated(each["treatments"][n][w], m), 1
                )
                for m in measures
            ]
            for name, ways in first["treatments"].items()
            for way in ways
        }
        yield table(f"Ways to remove the causes: {dataset}, {seeds(found)}", measures, rows)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _treated(after: Mapping[str, float] | None, measure: str) -> float | None:
    return None if after is None else 100 * after[measure]


def library_tables(lines: Sequence[Line]) -> Iterable[str]:
    for dataset, variant in datasets(lines, "libraries"):
        found = chosen(lines, protocol="libraries", dataset=dataset, variant=variant)
        rows = {}
        for library, pairs in next(iter(found.values())).items():
            if "left out" in pairs:
                rows[f"{library}: left out"] = [str(pairs["left out"]), "", ""]
                continue
            for what in pairs:
                rows[f"{library}: {what.replace('|', '/')}"] = [
                    over_seeds(found, lambda each, p=(library, what, m): _part(each, *p), 3)
                    for m in ("rank correlation", "our auroc", "their auroc")
                ]
        columns = ["rank correlation", "our AUROC", "its AUROC"]
        yield table(f"Libraries: ours / theirs, {dataset}, {seeds(found)}", columns, rows)
