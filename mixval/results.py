"""What a run found: arms × seeds × panels, read from its store without torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mixval.compare import Interval, mean_interval, paired_difference, verdict
from mixval.recipe import Recipe
from mixval.store import Store

METRICS = ("accuracy", "nll", "ece")
COSTS = ("steps", "forwards", "seconds")


@dataclass(frozen=True)
class Row:
    """One arm of one panel, over its seeds."""

    panel: str
    arm: str
    title: str
    n: int
    accuracy: Interval
    nll: Interval
    ece: Interval
    control: str | None  # the arm it is compared with
    differences: dict[str, Interval]  # to the control, by metric; empty without one
    kept: float  # share of the mixes; NaN where nothing is mixed
    clean_kept: float
    cost: dict[str, float]  # steps, forwards, seconds
    preparation: dict[str, float]  # the same, of the base and teachers that this arm needs
    holdout: Interval | None  # accuracy on failures that no teacher saw
    leaks_test_labels: bool


@dataclass(frozen=True)
class Results:
    """Every finished evaluation of a run."""

    recipe: Recipe
    facts: list[dict[str, Any]]

    @staticmethod
    def read(recipe: Recipe, store: Store) -> "Results":
        return Results(recipe, [facts for _, facts in store.finished("*/seed-*/results/*")])

    def seeds(self) -> list[int]:
        return sorted({fact["seed"] for fact in self.facts})

    def panels(self) -> list[str]:
        """Return the panels that have results, in the recipe's order."""
        return [p for p in self.recipe.panels if any(f["panel"] == p for f in self.facts)]

    def values(self, panel: str, arm: str, metric: str = "accuracy") -> dict[int, float]:
        """Return the metric by seed."""
        return {
            fact["seed"]: fact[metric]
            for fact in self.facts
            if fact["panel"] == panel and fact["arm"] == arm
        }

    def rows(self, panel: str) -> list[Row]:
        """Return the arms that have results, in the recipe's order."""
        arms = [arm for arm in self.recipe.arms if self.values(panel, arm)]
        return [self._row(panel, arm) for arm in arms]

    def title(self, arm: str) -> str:
        return self.recipe.arms[arm].title.strip() or arm

    def verdicts(self, panel: str) -> list[str]:
        """Return a sentence for each guided arm, and which arm was best of all."""
        sentences = [self._verdict(panel, arm) for arm in self._judged(panel)]
        enough = sentences and len(self.seeds()) > 1 and len(self.rows(panel)) > 1
        best = self._best(panel) if enough else ""
        return [*sentences, best] if best else sentences

    def _judged(self, panel: str) -> Iterator[str]:
        for name, arm in self.recipe.arms.items():
            judged = arm.is_guided and arm.filter.name != "positive"
            if judged and self.values(panel, name):
                yield name

    def _best(self, panel: str) -> str:
        """Say which arm came out on top of those that saw no label outside D, filtered or not."""
        arms = self.recipe.arms
        rows = [
            row
            for row in self.rows(panel)
            if row.n == len(self.seeds()) and not row.leaks_test_labels
            if self.recipe.knows_only_train(arms[row.arm]) and arms[row.arm].yoked_to is None
        ]
        if not rows:
            return ""
        best = max(rows, key=lambda row: row.accuracy.mean)
        mean, width = 100 * best.accuracy.mean, 100 * best.accuracy.half_width
        shown = f"{best.title.strip()} ({mean:.2f} ± {width:.2f})"
        return f"Highest mean accuracy of the arms that know D only, controls aside: {shown}."

    def _verdict(self, panel: str, name: str) -> str:
        controls: dict[bool, dict[str, Interval]] = {False: {}, True: {}}
        for other, settings in self.recipe.arms.items():
            if settings.yoked_to == name:
                within = settings.filter.parameters["within_lam_deciles"]
                controls[within] = self.differences(panel, name, other)
        rival = self._same_labels(panel, name)
        same = self.differences(panel, name, rival)
        title = self.title(rival) if rival else ""
        sentence = verdict(self.title(name), controls[False], controls[True], same, title)
        facts = [f for f in self.facts if f["panel"] == panel and f["arm"] == name]
        leak = any(fact["leaks_test_labels"] for fact in facts)
        return sentence + (" Its numbers leak test labels." if leak else "")

    def _same_labels(self, panel: str, name: str) -> str | None:
        """Return the best unguided arm that trains directly on what the arm's teacher saw."""
        seen = self.recipe.teachers[self.recipe.arms[name].teacher or ""].data
        rivals = {
            other: mean_interval(list(values.values())).mean
            for other, arm in self.recipe.arms.items()
            if seen != "train" and arm.data == seen and arm.filter.name == "all"
            if (values := self.values(panel, other))
        }
        return max(rivals, key=lambda other: rivals[other]) if rivals else None

    def differences(self, panel: str, arm: str, control: str | None) -> dict[str, Interval]:
        """Return the paired differences arm - control by metric; empty if they share no seed."""
        found = {}
        for metric in METRICS if control is not None else ():
            mine, theirs = (self.values(panel, name, metric) for name in (arm, control or ""))
            if (difference := paired_difference(mine, theirs)) is not None:
                found[metric] = difference
        return found

    def _row(self, panel: str, arm: str) -> Row:
        facts = [f for f in self.facts if f["panel"] == panel and f["arm"] == arm]
        settings = self.recipe.arms[arm]

        held = [fact["holdout_accuracy"] for fact in facts if "holdout_accuracy" in fact]

        def mean(read: Any) -> float:
            return mean_interval([read(fact) for fact in facts]).mean

        return Row(
            panel=panel,
            arm=arm,
            title=settings.title or arm,
            n=len(facts),
            **{m: mean_interval(list(self.values(panel, arm, m).values())) for m in METRICS},
            control=settings.control,
            differences=self.differences(panel, arm, settings.control),
            kept=mean(lambda fact: fact["kept"]) if settings.mixes else math.nan,
            clean_kept=mean(lambda fact: fact["clean_kept"]),
            cost={key: mean(lambda fact, key=key: fact["cost"][key]) for key in COSTS},
            preparation={
                key: mean(lambda fact, key=key: fact["preparation"][key]) for key in COSTS
            },
            holdout=mean_interval(held) if held else None,
            leaks_test_labels=any(fact["leaks_test_labels"] for fact in facts),
        )
