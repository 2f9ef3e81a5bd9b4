"""The rules between the sections of a recipe, each with a line that says how to mend it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mixval import choose
from mixval.moments import alpha_at, epoch_of

if TYPE_CHECKING:
    from mixval.recipe import Arm, Learner, Recipe, Teacher

# What a yoked control has of its own; all else is as in the arm that it replays.
NOT_REPLAYED = {
    *("title", "control", "teacher", "filter", "guide_until", "guide_fade", "refill_draws"),
}


def check(recipe: "Recipe") -> None:
    """Raise ValueError at the first rule that the recipe breaks."""
    _check_training(recipe)
    _check_names(recipe)
    _check_repair(recipe)
    if recipe.base.data != "train":
        _refuse(
            "base.data", "train, so that its failures are on samples it never saw", recipe.base.data
        )
    if recipe.base.clean == "filtered":
        _refuse("base.clean", "full or none: the base has no teacher", "filtered")
    for place, learner in _learners(recipe):
        _check_epochs(recipe, place, learner)
    for name, teacher in recipe.teachers.items():
        _check_teacher(recipe, f"teachers.{name}", teacher)
    for name, arm in recipe.arms.items():
        _check_arm(recipe, f"arms.{name}", arm)


def _check_training(recipe: "Recipe") -> None:
    training, samples = recipe.training, recipe.data.train
    if samples is not None and training.batch_size > samples:
        _refuse("training.batch_size", f"at most data.train ({samples})", training.batch_size)
    if training.accumulate > training.batch_size:
        limit = f"at most training.batch_size ({training.batch_size})"
        _refuse("training.accumulate", limit, training.accumulate)
    if len(set(recipe.seeds)) < len(recipe.seeds):
        _refuse("seeds", "all different", recipe.seeds)
    longest = max(recipe.epochs_of(arm) for arm in recipe.arms.values()) if recipe.arms else 0
    for epoch in recipe.scores.epochs if recipe.arms else ():
        if epoch > longest:
            _refuse("scores.epochs", f"at most the epochs of a student ({longest})", epoch)


def _check_names(recipe: "Recipe") -> None:
    for kind in ("arms", "teachers", "posteriors", "panels"):
        for name in getattr(recipe, kind):
            if not name.replace("_", "").replace("-", "").isalnum():
                _refuse(kind, "named with letters, digits, - and _ (names become folders)", name)
    for name in recipe.posteriors:
        if name in recipe.teachers:
            _refuse("posteriors", "named otherwise than teachers: scores go by these names", name)


def _check_repair(recipe: "Recipe") -> None:
    for key in ("selectors", "removals"):
        names = getattr(recipe.repair, key)
        if len(set(names)) < len(names):
            _refuse(f"repair.{key}", "all different", names)
    causes, samples = recipe.repair.causes, recipe.data.train
    if samples is not None and causes >= samples:
        _refuse("repair.causes", f"below data.train ({samples})", causes)


def _learners(recipe: "Recipe") -> Iterator[tuple[str, "Learner"]]:
    yield "base", recipe.base
    for kind in ("teachers", "arms"):
        for name, learner in getattr(recipe, kind).items():
            yield f"{kind}.{name}", learner


def _check_epochs(recipe: "Recipe", place: str, learner: "Learner") -> None:
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
        for epoch in range(0, epochs, -(-epochs // 1000)):  # a thousand places show its shape
            alpha_at(learner, epoch, epochs)
    except ValueError as error:
        raise ValueError(f"{place}.alpha: {error}") from error


def _check_moment(place: str, moment: int | float | None, epochs: int) -> None:
    if moment is not None and not 0 < epoch_of(moment, epochs) < epochs:
        _refuse(place, f"an epoch between 0 and the number of epochs ({epochs})", moment)


def _check_teacher(recipe: "Recipe", place: str, teacher: "Teacher") -> None:
    if teacher.clean == "filtered":
        _refuse(f"{place}.clean", "full or none: a teacher has no teacher", "filtered")
    if teacher.folds > 1 and teacher.data not in ("train", "train+failures"):
        _refuse(f"{place}.folds", "1 unless data is train or train+failures", teacher.folds)
    samples = recipe.data.train
    if samples is not None and teacher.folds > samples // 2:
        _refuse(f"{place}.folds", f"at most half of data.train ({samples // 2})", teacher.folds)
    if teacher.folds > 1 and teacher.members > 1:
        _refuse(f"{place}.members", "1 when folds > 1", teacher.members)
    if teacher.weights and teacher.folds * teacher.members > 1:
        _refuse(f"{place}.weights", "left out when folds or members > 1", teacher.weights)


def _check_arm(recipe: "Recipe", place: str, arm: "Arm") -> None:
    for key, known in (("teacher", recipe.teachers), ("control", recipe.arms)):
        name = getattr(arm, key)
        if name is not None and name not in known:
            raise ValueError(f"{place}.{key}: there is no {name!r}; {choose.nearest(name, known)}")
    if arm.yoked_to is not None and arm.excluded == "refill":
        rule = "other than refill: refilled mixes can't be replayed"
        _refuse(f"{place}.excluded", rule, "refill")
    needs = {
        "filter": arm.is_guided,
        "excluded": arm.excluded in ("relabel", "refill"),
        "guide_until": arm.guide_until == "overtake",
    }
    for key, needed in needs.items():
        if needed and arm.teacher is None:
            _refuse(f"{place}.teacher", f"given: {place}.{key} needs one", None)
    if arm.clean == "filtered" and arm.filter.name == "all":
        _refuse(f"{place}.filter", "other than all where clean is filtered", "all")
    if arm.excluded == "refill" and arm.filter.name not in ("negative", "positive"):
        rule = "negative or positive where excluded is refill: it asks of each mix alone"
        _refuse(f"{place}.filter", rule, arm.filter.name)
    if arm.filter.name == "top_k" and arm.filter.parameters["k"] > recipe.training.batch_size:
        limit = f"at most training.batch_size ({recipe.training.batch_size})"
        _refuse(f"{place}.filter.k", limit, arm.filter.parameters["k"])
    if arm.filter.name == "confident":
        _check_confident(recipe, place, arm)
    if arm.teacher and recipe.teachers[arm.teacher].folds > 1 and arm.data != "train":
        _refuse(f"{place}.data", "train, because its teachers are out-of-fold", arm.data)
    _check_guidance_end(recipe, place, arm)
    if arm.yoked_to is not None:
        _check_yoke(recipe, place, arm, arm.yoked_to)


def _check_confident(recipe: "Recipe", place: str, arm: "Arm") -> None:
    members = recipe.teachers[arm.teacher].members if arm.teacher else 0
    if members < 2:
        rule = f"at least 2: {place}.filter confident needs a standard error"
        _refuse(f"teachers.{arm.teacher}.members", rule, members)


def _check_guidance_end(recipe: "Recipe", place: str, arm: "Arm") -> None:
    if arm.guide_fade and arm.guide_until is None:
        _refuse(f"{place}.guide_until", "given: guide_fade says how long it fades from there", None)
    if arm.guide_until is not None and not arm.is_guided:
        _refuse(f"{place}.guide_until", "left out: nothing guides this arm", arm.guide_until)
    if arm.guide_until != "overtake":
        _check_moment(f"{place}.guide_until", arm.guide_until, recipe.epochs_of(arm))


def _check_yoke(recipe: "Recipe", place: str, arm: "Arm", other: str) -> None:
    if other not in recipe.arms:
        hint = choose.nearest(other, recipe.arms)
        raise ValueError(f"{place}.filter.of: no arm {other!r}; {hint}")
    guided = recipe.arms[other]
    if not guided.is_guided:
        _refuse(f"{place}.filter.of", "an arm whose filter asks a teacher", other)
    for key in type(arm).model_fields.keys() - NOT_REPLAYED:
        if getattr(arm, key) != getattr(guided, key):
            _refuse(f"{place}.{key}", f"as in arms.{other}, which it replays", getattr(arm, key))


def _refuse(place: str, rule: str, value: object) -> None:
    raise ValueError(f"{place}: must be {rule}, got {value!r}")
