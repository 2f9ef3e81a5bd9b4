"""The frozen, validated configuration of a run, section by section.

Everything here works without torch, so that a bad recipe fails at once.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)

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
from mixval.recipe_errors import one_line

NAMED = ("arms", "teachers", "posteriors", "panels")  # sections whose keys are names of the user's
# What may differ between two commands on one run directory: it changes no number.
FREE = (
    "engine.workers",
    "engine.loaders",
    "engine.checkpoint_seconds",
    "scores.bank",
    "seeds",
    "repair.selectors",
)
UNREAD = ("*",)  # as allowed code: keep names of code as text, look nothing up


class Section(BaseModel):
    """A part of a recipe: frozen, no unknown keys, finite numbers only."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, strict=True
    )


class Choice(BaseModel):
    """An option of a choice module and its parameters, defaults filled in."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def _read_choice(module: str, value: Any, info: ValidationInfo) -> Any:
    """Turn `easy`, `2.5` (a constant alpha) or `{name: easy, ...}` into a checked Choice."""
    if isinstance(value, Choice):
        value = value.model_dump()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if module == "alpha_schedules" and number:
        value = {"name": "constant", "value": value}
    if isinstance(value, str):
        value = {"name": value}
    if not (isinstance(value, Mapping) and isinstance(value.get("name"), str)):
        raise ValueError(f"needs the name of an option of {module}, or {{name: ..., ...}}")
    name = value["name"]
    given = {key: item for key, item in value.items() if key != "name"}
    allowed = (info.context or {}).get("code")
    if ":" in name and allowed == UNREAD:
        return Choice(name=name, **given)
    if ":" in name and allowed is not None and name not in allowed:
        raise ValueError(f"{name!r} names code; give it on the command line, never in a file")
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
    images: Literal["auto", "memory", "stream"] = Field(
        "auto",
        description="image files all in memory or decoded when needed (auto: memory up to 4 GB); "
        "arrays always are in memory",
    )
    train: Count | None = Field(None, description="train samples; all that are left if not given")
    val_f: Count = Field(200, description="samples where failures come from")
    val_dev: Count = Field(200, description="samples for curves and tuning; nothing trains on them")
    label_noise: BelowOne = Field(0.0, description="share of train labels flipped to another class")
    corruption: Annotated[Choice, option_of("corruptions")] = Field(
        Choice(name="none"), description="other damage to train (mixval list corruptions)"
    )


class Training(Section):
    """How every network of the run is trained."""

    epochs: Count = Field(60, description="passes over the training data")
    batch_size: Count = Field(
        50, description="clean samples per optimiser step, over all processes"
    )
    accumulate: Count = Field(1, description="micro-batches per optimiser step")
    optimizer: Literal[
        "sgd", "momentum", "adam", "adamw", "nadamw", "radam", "lamb", "lion", "rmsprop"
    ] = Field("sgd", description="of timm.optim; sgd has Nesterov momentum, momentum has not")
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
    members: Count = Field(
        1, description="k > 1: k teachers from different initial weights; H is their mean"
    )
    weights: str | None = Field(
        None, description="a finished network of the same dataset, as a file"
    )

    @property
    def places(self) -> list[tuple[str, ...]]:
        """Where its networks are stored, below its own name."""
        kind, count = ("fold", self.folds) if self.folds > 1 else ("member", self.members)
        return [(f"{kind}-{number}",) for number in range(count)] if count > 1 else [()]


class ScoreSettings(Section):
    """r_hat of a fixed probe plan under teachers and posteriors, and as students train."""

    rows: CountOrZero = Field(1000, description="mixes in the probe plan; 0 for none")
    alpha: NonNegative = Field(1.0, description="alpha of the probe plan")
    loss: Annotated[Choice, option_of("losses")] = Field(
        Choice(name="cross_entropy"), description="H in r_hat"
    )
    epochs: list[Count] = Field([], description="after how many epochs students score it again")
    bank: bool = Field(
        False, description="score the teacher's H of every planned mix once, for all students"
    )
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


class Repair(Section):
    """`mixval repair`: find the train samples behind the failures, and take them out."""

    selectors: list[Literal["ewc", "linear", "loss", "natural_gradient", "random"]] = Field(
        ["ewc", "linear", "loss", "random"],
        min_length=1,
        description="what scores the train samples: r_hat by a way to update, or a control",
    )
    causes: Count | InnerFraction = Field(
        0.1, description="train samples to remove at most, or their share"
    )
    removals: list[Literal["fine_tune", "newton", "ewc_deletion", "retrain"]] = Field(
        ["fine_tune", "newton", "ewc_deletion", "retrain"], description="how they are removed"
    )
    ridge: Positive = Field(30.0, description="added to the curvature when causes are looked for")
    deletion_ridge: Positive = Field(
        3000.0, description="the same for newton and ewc_deletion, which may diverge below 3000"
    )
    lr: Positive = Field(0.01, description="learning rate of fine_tune, constant")
    epochs: Count = Field(10, description="epochs of fine_tune")


class Panel(Section):
    """The same arms on data made harder."""

    title: str = Field("", description="what the table calls it")
    label_noise: BelowOne | None = Field(None, description="replaces data.label_noise")
    corruption: Annotated[Choice, option_of("corruptions")] | None = Field(
        None, description="replaces data.corruption"
    )


class EngineSettings(Section):
    """Where and how precisely it is computed. `auto` is measured once and written down."""

    device: str = Field(
        "auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto, cpu, cuda, cuda:1, mps"
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "fp32", description="of forward and backward passes; weights and losses stay fp32"
    )
    channels_last: bool | Literal["auto"] = Field(
        False, description="colours innermost in memory: faster convolutions on most hardware"
    )
    compile: bool | Literal["auto"] = Field(False, description="torch.compile each network")
    threads: Count = Field(1, description="threads per process")
    workers: CountOrZero = Field(
        0, description="processes for panels and seeds; 0: one per core, one with a GPU"
    )
    loaders: CountOrZero = Field(
        2, description="processes per training that decode images which are not in memory"
    )
    checkpoint_seconds: Positive = Field(60.0, description="seconds between checkpoints")

    @property
    def to_measure(self) -> list[str]:
        """The settings that are `auto` and change numbers: resolved once, and then pinned."""
        tuned = ("precision", "channels_last", "compile")
        return [key for key in tuned if getattr(self, key) == "auto"]


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
    posteriors: dict[str, Annotated[Choice, option_of("posterior_fits")]] = Field(
        {}, description="pairs p(theta | D), p(theta | D, F) around the base network, by name"
    )
    scores: ScoreSettings = ScoreSettings()
    arms: dict[str, Arm] = Field({}, description="students by name")
    repair: Repair = Repair()
    panels: dict[str, Panel] = Field({"main": Panel()}, description="variants of the data")
    seeds: list[Seed] = Field([0], min_length=1, description="seeds; every arm runs with each")
    engine: EngineSettings = EngineSettings()

    def epochs_of(self, learner: Learner) -> int:
        return learner.epochs or self.training.epochs

    def model_of(self, learner: Learner) -> Choice:
        return learner.model or self.model

    def data_of(self, panel: str) -> Data:
        own = {key: getattr(self.panels[panel], key) for key in ("label_noise", "corruption")}
        return self.data.model_copy(update={k: v for k, v in own.items() if v is not None})

    def with_engine(self, settings: Mapping[str, Any]) -> "Recipe":
        return self.model_copy(update={"engine": self.engine.model_copy(update=settings)})

    def leaks_test_labels(self, learner: Learner) -> bool:
        """Whether any test label reached this network: by training, its teacher, or a replay."""
        behind: list[Learner] = []
        if isinstance(learner, Arm) and learner.teacher:
            behind.append(self.teachers[learner.teacher])
        if isinstance(learner, Arm) and learner.yoked_to:
            behind.append(self.arms[learner.yoked_to])
        from_failures = learner.data == "train+failures" and self.failures.split == "test"
        own = learner.data == "train+test" or from_failures
        return own or any(map(self.leaks_test_labels, behind))

    def knows_only_train(self, arm: Arm) -> bool:
        """Whether neither the arm nor what guides it has seen a label outside `train`."""
        guides = [self.teachers[arm.teacher]] if arm.teacher else []
        replayed = [self.arms[arm.yoked_to]] if arm.yoked_to else []
        alone = arm.data == "train" and all(teacher.data == "train" for teacher in guides)
        return alone and all(map(self.knows_only_train, replayed))

    def conflict_with(self, other: "Recipe") -> str | None:
        """Return the first key whose values can't live in one run directory, if there is one.

        Arms, teachers, panels and seeds can be added to a run, and any number of
        processes may share the work; what is there already must stay what it was.
        """
        mine, theirs = (_flat(recipe.model_dump(mode="json")) for recipe in (self, other))
        for key in sorted(mine.keys() | theirs.keys()):
            named = key.split(".")[:2]
            added = named[0] in NAMED and (
                named[1] not in getattr(self, named[0]) or named[1] not in getattr(other, named[0])
            )
            free = key in FREE
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
