"""The rules between the sections of a recipe, each with a line that says how to mend it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mixval import choose

if TYPE_CHECKING:
    from mixval.recipe import Arm, Learner, Recipe, Teacher


def check(recipe: "Recipe") -> None:
    """Raise ValueError at the first rule that the recipe breaks."""
    training, data = recipe.training, recipe.data
    if training.warmup_epochs >= training.epochs:
        _refuse(
            "training.warmup_epochs",
            f"below training.epochs ({training.epochs})",
            training.warmup_epochs,
        )
    if data.train is not None and training.batch_size > data.train:
        _refuse("training.batch_size", f"at most data.train ({data.train})", training.batch_size)
    if training.accumulate > training.batch_size:
        _refuse(
            "training.accumulate",
            f"at most batch_size ({training.batch_size})",
            training.accumulate,
        )
    for kind in ("arms", "teachers", "panels"):
        for name in getattr(recipe, kind):
            if not name.replace("_", "").replace("-", "").isalnum():
                _refuse(
                    f"{kind}", "named with letters, digits, - and _ (names become folders)", name
                )
    if recipe.base.data != "train":
        _refuse(
            "base.data", "train, so that its failures are on samples it never saw", recipe.base.data
        )
    if recipe.base.clean == "filtered":
        _refuse("base.clean", "full or none: the base has no teacher", "filtered")
    for place, learner in _learners(recipe):
        _check_epochs(recipe, place, learner)
    for name, teacher in recipe.teachers.items():
        _check_teacher(f"teachers.{name}", teacher)
    for name, arm in recipe.arms.items():
        _check_arm(recipe, f"arms.{name}", arm)


def _learners(recipe: "Recipe") -> Iterator[tuple[str, "Learner"]]:
    yield "base", recipe.base
    for kind in ("teachers", "arms"):
        for name, learner in getattr(recipe, kind).items():
            yield f"{kind}.{name}", learner


def _check_epochs(recipe: "Recipe", place: str, learner: "Learner") -> None:
    from mixval.recipe import alpha_at

    epochs = recipe.epochs_of(learner)
    if recipe.training.warmup_epochs >= epochs:
        _refuse(
            f"{place}.epochs",
            f"above training.warmup_epochs ({recipe.training.warmup_epochs})",
            epochs,
        )
    _check_moment(f"{place}.mixup_until", learner.mixup_until, epochs)
    if learner.alpha.name != "constant" and epochs < 4:
        _refuse(
            f"{place}.epochs",
            f"at least 4, for the schedule {learner.alpha.name!r} to have a shape",
            epochs,
        )
    try:
        for epoch in range(epochs):
            alpha_at(learner, epoch, epochs)
    except ValueError as error:
        raise ValueError(f"{place}.alpha: {error}") from error


def _check_moment(place: str, moment: int | float | None, epochs: int) -> None:
    from mixval.recipe import epoch_of

    if moment is not None and not 0 < epoch_of(moment, epochs) < epochs:
        _refuse(place, f"an epoch between 0 and the number of epochs ({epochs})", moment)


def _check_teacher(place: str, teacher: "Teacher") -> None:
    if teacher.clean == "filtered":
        _refuse(f"{place}.clean", "full or none: a teacher has no teacher", "filtered")
    if teacher.folds > 1 and teacher.data not in ("train", "train+failures"):
        _refuse(f"{place}.folds", "1 unless data is train or train+failures", teacher.folds)
    if teacher.folds > 1 and teacher.weights:
        _refuse(f"{place}.weights", "left out when folds > 1", teacher.weights)


def _check_arm(recipe: "Recipe", place: str, arm: "Arm") -> None:
    if arm.teacher is not None and arm.teacher not in recipe.teachers:
        hint = choose.nearest(arm.teacher, recipe.teachers)
        raise ValueError(f"{place}.teacher: no teacher {arm.teacher!r}; {hint}")
    if arm.control is not None and arm.control not in recipe.arms:
        raise ValueError(
            f"{place}.control: no arm {arm.control!r}; {choose.nearest(arm.control, recipe.arms)}"
        )
    needs = {
        "filter": arm.is_guided,
        "clean": arm.clean == "filtered" and arm.filter.name != "yoked",
        "excluded": arm.excluded in ("relabel", "refill"),
        "guide_until": arm.guide_until == "overtake",
    }
    for key, needed in needs.items():
        if needed and arm.teacher is None:
            _refuse(f"{place}.teacher", f"given: {place}.{key} needs one", None)
    if arm.guide_until != "overtake":
        _check_moment(f"{place}.guide_until", arm.guide_until, recipe.epochs_of(arm))
    if arm.filter.name == "top_k" and arm.filter.parameters["k"] > recipe.training.batch_size:
        limit = recipe.training.batch_size
        _refuse(
            f"{place}.filter.k",
            f"at most training.batch_size ({limit})",
            arm.filter.parameters["k"],
        )
    if arm.teacher and recipe.teachers[arm.teacher].folds > 1 and arm.data != "train":
        _refuse(f"{place}.data", "train, because its teachers are out-of-fold", arm.data)
    if arm.yoked_to is not None:
        _check_yoke(recipe, place, arm, arm.yoked_to)


def _check_yoke(recipe: "Recipe", place: str, arm: "Arm", other: str) -> None:
    if other not in recipe.arms:
        hint = choose.nearest(other, recipe.arms)
        raise ValueError(f"{place}.filter.of: no arm {other!r}; {hint}")
    guided = recipe.arms[other]
    if guided.yoked_to is not None:
        _refuse(f"{place}.filter.of", "a guided arm, not another control", other)
    if "refill" in (arm.excluded, guided.excluded):
        _refuse(
            f"{place}.excluded", "other than refill: refilled mixes can't be replayed", "refill"
        )
    own = {"title", "control", "teacher", "filter", "guide_until", "guide_fade", "refill_draws"}
    for key in type(arm).model_fields.keys() - own:
        if getattr(arm, key) != getattr(guided, key):
            _refuse(f"{place}.{key}", f"as in arms.{other}, which it replays", getattr(arm, key))


def _refuse(place: str, rule: str, value: object) -> None:
    raise ValueError(f"{place}: must be {rule}, got {value!r}")
