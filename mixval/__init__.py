"""Value mixup samples and train on the ones that help.

The names below are the public surface. They are loaded when first used, so that
importing mixval (and `mixval --help`) does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixval.compare import Interval, mean_interval, paired_difference
    from mixval.guide import Guide
    from mixval.job import run_job as run
    from mixval.mixing import draw_plan, mix, mixed_targets
    from mixval.offline import OfflineScores, score_mixes
    from mixval.own_dataset import from_dataset
    from mixval.posteriors import ensemble, point
    from mixval.recipe import Recipe
    from mixval.recipe_loading import load_recipe, make_recipe
    from mixval.results import Results
    from mixval.rhat import Scorer, exact_r, probability_negative, score
    from mixval.score_store import read_scores, write_scores
    from mixval.store import Store
    from mixval.types import FailureSet, MixPlan, Part, Posterior, ScoreTable, Splits

_HOMES = {
    "compare": ("Interval", "mean_interval", "paired_difference"),
    "guide": ("Guide",),
    "mixing": ("draw_plan", "mix", "mixed_targets"),
    "offline": ("OfflineScores", "score_mixes"),
    "own_dataset": ("from_dataset",),
    "posteriors": ("ensemble", "point"),
    "recipe": ("Recipe",),
    "recipe_loading": ("load_recipe", "make_recipe"),
    "results": ("Results",),
    "rhat": ("Scorer", "exact_r", "probability_negative", "score"),
    "score_store": ("read_scores", "write_scores"),
    "store": ("Store",),
    "types": ("FailureSet", "MixPlan", "Part", "Posterior", "ScoreTable", "Splits"),
}
_WHERE = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "FailureSet",
    "Guide",
    "Interval",
    "MixPlan",
    "OfflineScores",
    "Part",
    "Posterior",
    "Recipe",
    "Results",
    "ScoreTable",
    "Scorer",
    "Splits",
    "Store",
    "draw_plan",
    "ensemble",
    "exact_r",
    "from_dataset",
    "load_recipe",
    "make_recipe",
    "mean_interval",
    "mix",
    "mixed_targets",
    "paired_difference",
    "point",
    "probability_negative",
    "read_scores",
    "run",
    "score",
    "score_mixes",
    "write_scores",
]


def __getattr__(name: str) -> Any:
    if name == "run":
        from mixval.job import run_job

        return run_job
    if name not in _WHERE:
        raise AttributeError(f"module 'mixval' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mixval.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
