"""The frozen, validated configuration of a run: sections, loading, overriding.

Everything here works without torch, so that a bad recipe fails at once.
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mixval import choose
from mixval.bounds import (
    BelowOne,
    Count,
    CountOrZero,
    InnerFraction,
    NonNegative,
    Positive,
    Seed,
)
from mixval.errors import UserError
from mixval.recipe_errors import one_line

PACKAGED = Path(__file__).parent / "recipes"


class Section(BaseModel):
    """A part of a recipe: frozen, no unknown keys, finite numbers only."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True
    )


class Choice(BaseModel):
    """An option of a choice module and its parameters, defaults filled in."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def _read_choice(module: str, value: Any) -> Any:
    """Turn `easy`, `2.5` (a constant alpha) or `{name: easy, ...}` into a checked Choice."""
    if isinstance(value, Choice):
        value = value.model_dump()
    if module == "alpha_schedules" and isinstance(value, int | float):
        value = {"name": "constant", "value": value}
    if isinstance(value, str):
        value = {"name": value}
    if not (isinstance(value, Mapping) and isinstance(value.get("name"), str)):
        raise ValueError(f"needs the name of an option of {module}, or {{name: ..., ...}}")
    name = value["name"]
    given = {key: item for key, item in value.items() if key != "name"}
    option = choose.option(module, name)
    try:
        checked = option.parameters.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"{name}: {one_line(error, option.parameters)}") from error
    return Choice(name=name, **checked.model_dump())


def option_of(module: str) -> BeforeValidator:
    """Return what checks a Choice against the options of a choice module."""
    return BeforeValidator(partial(_read_choice, module))


Moment = Count | InnerFraction  # an epoch, or a share of the training
Pool = Literal["train", "train+failures", "train+val_f", "train+test"]


class Data(Section):
    """What is learned from, and how it is divided; drawn anew for every seed."""

    source: Annotated[Choice, option_of("datasets")] = Field(
        Choice(name="digits"), description="dataset (mixval list datasets)"
    )
    train: Count | None = Field(None, description="train samples; all that are left if not given")
    val_f: Count = Field(200, description="samples where failures come from")
    val_dev: Count = Field(200, description="samples for curves and tuning; nothing trains on them")
    label_noise: BelowOne = Field(0.0, description="share of train labels flipped to another class")


class Training(Section):
    """How every network of the run is trained."""

    epochs: Count = Field(60, description="passes over the training data")
    batch_size: Count = Field(
        50, description="clean samples per optimiser step, over all processes"
    )
    accumulate: Count = Field(1, description="micro-batches per optimiser step")
    optimizer: str = Field("sgd", description="name in timm.optim")
    lr: Positive = Field(0.1, description="peak learning rate; cosine to 0")
    momentum: BelowOne = Field(0.9, description="momentum, for the optimisers that have it")
    weight_decay: NonNegative = Field(5e-4, description="weight decay")
    warmup_epochs: CountOrZero = Field(0, description="epochs of linear warm-up")
    loss: Annotated[Choice, option_of("losses")] = Field(
        Choice(name="cross_entropy"), description="training loss"
    )
    class_weights: Annotated[Choice, option_of("class_weights")] = Field(
        Choice(name="uniform"), description="class weights"
    )
    augmentation: Annotated[Choice, option_of("augmentations")] = Field(
        Choice(name="none"), description="augmentation"
    )
    evaluate_every: Count = Field(5, description="epochs between evaluations on val_dev")


class Learner(Section):
    """What one network minimises, on what data.

    alpha = 0 is ERM; `clean: none` is mixup; `clean: full` with everything kept is RegMixup.
    """

    alpha: Annotated[Choice, option_of("alpha_schedules")] = Field(
        Choice(name="constant"), description="alpha, or a schedule of it"
    )
    mixup_until: Moment | None = Field(
        None, description="epoch (or share of training) where alpha becomes 0"
    )
    clean: Literal["full", "filtered", "none"] = Field("full", description="the clean term")
    clean_weight: NonNegative = Field(1.0, description="weight of the clean term")
    mixed_weight: NonNegative = Field(1.0, description="weight of the mixed term (eta of RegMixup)")
    normalise: Literal["batch", "kept", "joint"] = Field(
        "batch", description="divide by planned B, by what is kept, or by 2B"
    )
    forward: Literal["joint", "separate"] = Field(
        "joint", description="clean and mixed rows in one forward pass, or in two"
    )
    same_lam: Count = Field(1, description="consecutive mixes that share one lambda")
    derange: bool = Field(False, description="never mix a sample with itself")
    data: Pool = Field("train", description="what the network is trained on")
    model: Annotated[Choice, option_of("models")] | None = Field(
        None, description="another network than the recipe's"
    )
    epochs: Count | None = Field(None, description="another number of epochs than the recipe's")

    @property
    def mixes(self) -> bool:
        """Whether anything is ever mixed: alpha = 0 throughout is ERM."""
        return self.alpha.name != "constant" or self.alpha.parameters["value"] > 0


class Failures(Section):
    """Which samples of the base model count as failures."""

    rule: Annotated[Choice, option_of("failure_rules")] = Field(
        Choice(name="misclassified"), description="failure rule"
    )
    split: Literal["val_f", "test"] = Field("val_f", description="where failures come from")
    holdout: BelowOne = Field(0.0, description="share kept back from teachers, for evaluation")


class Teacher(Learner):
    """A network that stands for p(theta | D, F)."""

    folds: Count = Field(
        1, description="k > 1: k teachers; a mix is scored by one that saw no parent"
    )
    weights: str | None = Field(
        None, description="a finished network of the same dataset, as a file"
    )


class Scores(Section):
    """r_hat of a fixed probe plan, base against teacher, and again while students train."""

    rows: CountOrZero = Field(1000, description="mixes in the probe plan; 0 for none")
    alpha: NonNegative = Field(1.0, description="alpha of the probe plan")
    loss: Annotated[Choice, option_of("losses")] = Field(
        Choice(name="cross_entropy"), description="H in r_hat"
    )
    epochs: list[CountOrZero] = Field([], description="student epochs that score it again")
    chunk: Count = Field(500, description="rows per forward pass")


class Arm(Learner):
    """One student and how it is guided."""

    title: str = Field("", description="what the table calls it")
    control: str | None = Field(None, description="the arm that the table compares it with")
    teacher: str | None = Field(None, description="name of the teacher that guides it")
    filter: Annotated[Choice, option_of("filter_policies")] = Field(
        Choice(name="all"), description="which mixes are kept"
    )
    excluded: Literal["drop", "clean", "refill", "relabel"] = Field(
        "drop", description="what becomes of an excluded mix"
    )
    refill_draws: Count = Field(8, description="draws for a full batch before refill gives up")
    guide_until: Moment | Literal["overtake"] | None = Field(
        None,
        description="epoch or share where guidance stops; overtake: when better on val_dev",
    )
    guide_fade: CountOrZero = Field(0, description="epochs over which guidance then fades")

    @property
    def yoked_to(self) -> str | None:
        return self.filter.parameters["of"] if self.filter.name == "yoked" else None

    @property
    def is_guided(self) -> bool:
        """Whether r_hat decides anything; `all` needs no teacher at all."""
        return self.filter.name not in ("all", "yoked")


class Panel(Section):
    """The same arms on data made harder."""

    title: str = Field("", description="what the table calls it")
    label_noise: BelowOne | None = Field(None, description="replaces data.label_noise")


class Engine(Section):
    """Where and how precisely it is computed. All but `workers` can change the last bits."""

    device: str = Field("auto", description="auto, cpu, cuda, mps")
    threads: Count = Field(1, description="threads per process")
    workers: CountOrZero = Field(0, description="processes for panels and seeds; 0: one per core")
    checkpoint_seconds: Positive = Field(60.0, description="seconds between checkpoints")


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="names the run")
    data: Data = Data()
    model: Annotated[Choice, option_of("models")] = Field(
        Choice(name="mlp"), description="network (mixval list models)"
    )
    training: Training = Training()
    base: Learner = Field(Learner(), description="the network whose failures are looked for")
    failures: Failures = Failures()
    teachers: dict[str, Teacher] = Field({}, description="teachers by name")
    scores: Scores = Scores()
    arms: dict[str, Arm] = Field({}, description="students by name")
    panels: dict[str, Panel] = Field({"main": Panel()}, description="variants of the data")
    seeds: list[Seed] = Field([0], min_length=1, description="seeds; every arm runs with each")
    engine: Engine = Engine()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        from mixval.recipe_rules import check  # the rules between sections have a file of their own

        check(self)
        return self

    def epochs_of(self, learner: Learner) -> int:
        return learner.epochs or self.training.epochs

    def model_of(self, learner: Learner) -> Choice:
        return learner.model or self.model

    def data_of(self, panel: str) -> Data:
        noise = self.panels[panel].label_noise
        return self.data if noise is None else self.data.model_copy(update={"label_noise": noise})

    def leaks_test_labels(self, learner: Learner) -> bool:
        """Whether any test label reached this network, by training or through its teacher."""
        if learner.data == "train+test":
            return True
        if learner.data == "train+failures" and self.failures.split == "test":
            return True
        if isinstance(learner, Arm) and learner.teacher:
            return self.leaks_test_labels(self.teachers[learner.teacher])
        if isinstance(learner, Arm) and learner.yoked_to:
            return self.leaks_test_labels(self.arms[learner.yoked_to])
        return False

    def conflict_with(self, other: "Recipe") -> str | None:
        """Return the first key whose values can't live in one run directory, if there is one.

        Arms, teachers, panels and seeds can be added to a run, and any number of
        processes may share the work; what is there already must stay what it was.
        """
        mine, theirs = (_flat(recipe.model_dump(mode="json")) for recipe in (self, other))
        for key in sorted(mine.keys() | theirs.keys()):
            named = key.split(".")[:2]
            added = named[0] in ("arms", "teachers", "panels") and (
                named[1] not in getattr(self, named[0]) or named[1] not in getattr(other, named[0])
            )
            free = key in ("engine.workers", "engine.checkpoint_seconds", "seeds")
            shown = key.rsplit(".", 1)[-1] in ("title", "control")
            if not (added or free or shown) and mine.get(key) != theirs.get(key):
                return key
        return None


def _flat(described: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in described.items():
        inner = (
            _flat(value, f"{place}{key}.") if isinstance(value, dict) else {f"{place}{key}": value}
        )
        flat.update(inner)
    return flat


def epoch_of(moment: int | float, epochs: int) -> int:
    """Return the epoch of a moment that may be given as a share of the training."""
    return moment if isinstance(moment, int) else round(moment * epochs)


def alpha_at(learner: Learner, epoch: int, epochs: int) -> float:
    """Return alpha of this epoch; epoch e of E stands at progress (e + 1/2) / E."""
    if learner.mixup_until is not None and epoch >= epoch_of(learner.mixup_until, epochs):
        return 0.0
    schedule = choose.pick("alpha_schedules", learner.alpha.name, learner.alpha.parameters)
    alpha = float(schedule((epoch + 0.5) / epochs))
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha must be finite and >= 0, got {alpha} at epoch {epoch}")
    return alpha


def load_recipe(source: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Return the packaged recipe or the file `source`, with dotted `overrides` laid over it."""
    described = _read_file(_find(source))
    _refuse_code(described, source)
    for key, value in (overrides or {}).items():
        _lay_over(described, key, value)
    return make_recipe(described)


def make_recipe(described: Mapping[str, Any]) -> Recipe:
    """Return the recipe of nested dictionaries; a mistake is one line that names the field."""
    try:
        return Recipe.model_validate(described)
    except ValidationError as error:
        raise UserError(one_line(error, Recipe)) from error


def packaged_recipes() -> list[str]:
    return sorted(path.stem for path in PACKAGED.glob("*.yaml"))


def _find(source: str) -> Path:
    packaged = PACKAGED / f"{source}.yaml"
    if packaged.parent == PACKAGED and packaged.is_file():
        return packaged
    if Path(source).is_file():
        return Path(source)
    hint = choose.nearest(source, packaged_recipes())
    raise UserError(f"recipe: no packaged recipe and no file {source!r}; {hint}")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        described = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not readable as YAML: {reason}") from error
    if not isinstance(described, dict):
        raise UserError(
            f"{path}: a recipe is a mapping of sections, got {type(described).__name__}"
        )
    return described


def _refuse_code(described: Any, source: str) -> None:
    """Refuse `module:function` in a file: only the user names code, and only by hand."""
    items = described.values() if isinstance(described, dict) else described
    for item in items if isinstance(items, list | type({}.values())) else ():
        _refuse_code(item, source)
    if isinstance(described, dict) and ":" in str(described.get("name", "")):
        raise UserError(
            f"{source}: {described['name']!r} names code; give it on the command line only"
        )


def _lay_over(described: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for key in path:
        inner = described.setdefault(key, {})
        if not isinstance(inner, dict):  # a choice in its short form: `alpha: easy`
            inner = described[key] = _long_form(inner)
        described = inner
    if last == "name" and path:  # another option: the parameters of the old one do not fit it
        described.clear()
    described[last] = value


def _long_form(value: Any) -> dict[str, Any]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"name": "constant", "value": value}
    return {} if value is None else {"name": value}
