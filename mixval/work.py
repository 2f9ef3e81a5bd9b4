"""What is asked of a run: the recipe, where, which arms and panels, up to which stage."""

from dataclasses import dataclass

from mixval.recipe import Recipe
from mixval.store import Store


@dataclass(frozen=True)
class Work:
    """One order to the pipeline. `arms` hold those that chosen controls replay, too."""

    recipe: Recipe
    store: Store
    stage: str
    arms: list[str]
    panels: list[str]
    workers: int = 1

    @property
    def cells(self) -> list[tuple[str, int]]:
        return [(panel, seed) for seed in self.recipe.seeds for panel in self.panels]


def with_replayed(recipe: Recipe, arms: list[str]) -> list[str]:
    """Return the arms in the recipe's order, with those that the chosen controls replay."""
    needed = set(arms) | {recipe.arms[arm].yoked_to for arm in arms}
    return [arm for arm in recipe.arms if arm in needed]
