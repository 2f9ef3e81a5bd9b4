"""The configuration of a run: defaults, ranges, rules between sections, and who may name code."""

import textwrap

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mixval import load_recipe, make_recipe
from mixval.errors import UserError
from mixval.moments import alpha_at, epoch_of
from mixval.recipe_loading import packaged_recipes


def message_of(described) -> str:
    with pytest.raises(UserError) as caught:
        make_recipe(described)
    return str(caught.value)


# -- what there is ------------------------------------------------------------------------


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_packaged_recipe_loads(name):
    # Catches a packaged recipe that a changed rule or a renamed option has broken.
    recipe = load_recipe(name)
    assert recipe.name and recipe.arms and recipe.seeds


def test_digits_has_every_control_of_a_filter():
    # Catches a default job that shows a guided arm without what it must be judged against.
    recipe = load_recipe("digits")
    guided = {name for name, arm in recipe.arms.items() if arm.is_guided}
    judged = {name for name in guided if recipe.arms[name].filter.name != "positive"}
    yoked = {
        (arm.yoked_to, arm.filter.parameters["within_lam_deciles"])
        for arm in recipe.arms.values()
        if arm.yoked_to
    }
    assert judged
    assert yoked == {(name, within) for name in judged for within in (False, True)}
    assert guided - judged  # the opposite filter
    assert len(recipe.seeds) >= 10
    assert any(recipe.panels[name].label_noise for name in recipe.panels), (
        "a panel with flipped labels"
    )
    assert not any(recipe.leaks_test_labels(arm) for arm in recipe.arms.values())


def test_defaults_are_filled_in(tiny_recipe):
    # Catches a saved recipe that leaves out what a later version may default differently.
    recipe = tiny_recipe()
    described = recipe.model_dump(mode="json")
    assert described["training"]["momentum"] == 0.9
    assert described["arms"]["all"]["filter"] == {"name": "all"}
    assert described["arms"]["yoked"]["filter"] == {
        "name": "yoked",
        "of": "guided",
        "within_lam_deciles": False,
    }
    assert described["arms"]["all"]["alpha"] == {"name": "constant", "value": 1.0}
    assert described["panels"] == {"main": {"title": "", "label_noise": None, "corruption": None}}


def test_a_described_recipe_reads_back_as_itself(tiny_recipe):
    # Catches a recipe.yaml in a run that differs from the recipe that made the run.
    for recipe in (tiny_recipe(), load_recipe("digits")):
        text = yaml.safe_dump(recipe.model_dump(mode="json"), allow_unicode=True)
        assert make_recipe(yaml.safe_load(text)) == recipe


def test_short_and_long_forms_of_a_choice_are_the_same(tiny_recipe):
    # Catches `alpha: 2`, `alpha: easy` and `{name: ...}` taking different ways.
    short = tiny_recipe({"arms.all.alpha": 2})
    long = tiny_recipe({"arms.all.alpha": {"name": "constant", "value": 2.0}})
    assert short == long
    assert tiny_recipe({"arms.all.alpha": "easy"}) == tiny_recipe(
        {"arms.all.alpha": {"name": "easy", "alpha_max": 10, "alpha_mid": 1, "at": 0.5}}
    )


def test_a_recipe_is_frozen(tiny_recipe):
    # Catches a stage that changes the recipe the next stage and the saved file rely on.
    recipe = tiny_recipe()
    for section, key in (
        (recipe, "name"),
        (recipe.training, "epochs"),
        (recipe.arms["all"], "alpha"),
        (recipe.arms["all"].alpha, "name"),
        (recipe.engine, "threads"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, 1)


# -- what is refused, with what words -----------------------------------------------------

YOKED = "arms.yoked.filter"
BAD = [
    # changes to the tiny recipe, and what the line must say
    ({"trainig": {}}, "trainig: unknown key", "did you mean 'training'?"),
    ({"training.epoch": 3}, "training.epoch: unknown key", "did you mean 'epochs'?"),
    ({"arms.erm.filtr": "all"}, "arms.erm.filtr: unknown key", "did you mean 'filter'?"),
    ({"teachers.failures.fold": 2}, "teachers.failures.fold: unknown key", "'folds'"),
    ({"name": None}, "name: must be given", ""),
    ({"name": "../outside"}, "name: ", "got '../outside'"),
    ({"training.epochs": 0}, "training.epochs: ", "greater than or equal to 1, got 0"),
    ({"training.epochs": 2.5}, "training.epochs: ", "integer"),
    ({"training.epochs": "many"}, "training.epochs: ", "integer"),
    ({"training.lr": 0}, "training.lr: ", "greater than 0, got 0"),
    ({"training.lr": float("nan")}, "training.lr: ", "finite number, got nan"),
    ({"training.lr": float("inf")}, "training.lr: ", "finite number, got inf"),
    ({"training.momentum": 1}, "training.momentum: ", "less than 1, got 1"),
    ({"training.warmup_epochs": 4}, "base.epochs: ", "above training.warmup_epochs (4), got 4"),
    ({"training.batch_size": 61}, "training.batch_size: ", "at most data.train (60), got 61"),
    (
        {"training.accumulate": 21},
        "training.accumulate: ",
        "at most training.batch_size (20), got 21",
    ),
    ({"training.loss": "cross"}, "training.loss: unknown option", "'cross_entropy'"),
    ({"data.label_noise": 1}, "data.label_noise: ", "less than 1, got 1"),
    ({"data.corruption": "rust"}, "data.corruption: ", "unknown option 'rust'"),
    (
        {"data.corruption": {"name": "input_noise", "share": 2}},
        "data.corruption: ",
        "less than 1, got 2",
    ),
    ({"data.label_noise": -0.1}, "data.label_noise: ", "greater than or equal to 0"),
    ({"data.source": "digit"}, "data.source: unknown option", "did you mean 'digits'?"),
    ({"data": "digits"}, "data: ", "got 'digits'"),
    ({"model": "mpl"}, "model: unknown option", "did you mean 'mlp'?"),
    ({"model": {"name": "mlp", "hidden": [0]}}, "model: mlp: hidden.0: ", "equal to 1, got 0"),
    ({"model": {"name": "timm"}}, "model: timm: architecture: ", "must be given"),
    ({"model": {"hidden": [8]}}, "model: ", "needs the name of an option of models"),
    ({"arms.all.alpha": -1}, "arms.all.alpha: constant: value: ", "equal to 0, got -1"),
    ({"arms.all.alpha": float("nan")}, "arms.all.alpha: constant: value: ", "finite"),
    ({"arms.all.alpha": "eazy"}, "arms.all.alpha: unknown option", "did you mean 'easy'?"),
    (
        {"arms.all.alpha": {"name": "easy", "alpha_maximum": 3}},
        "arms.all.alpha: easy: alpha_maximum: unknown key",
        "did you mean 'alpha_max'?",
    ),
    (
        {"arms.all.alpha": {"name": "exponential", "middle": 20}},
        "arms.all.alpha: ",
        "middle must lie strictly between start and end, got 20",
    ),
    (
        {"arms.all.alpha": {"name": "points", "at": [0, 1], "alpha": [1]}},
        "arms.all.alpha: ",
        "same length",
    ),
    (
        {"arms.all.alpha": "easy", "training.epochs": 3},
        "arms.all.epochs: ",
        "at least 4, for the schedule 'easy' to have a shape, got 3",
    ),
    ({"arms.all.mixup_until": 4}, "arms.all.mixup_until: ", "number of epochs (4), got 4"),
    ({"arms.all.mixup_until": 0}, "arms.all.mixup_until", "greater than"),
    ({"arms.all.mixup_until": 0.01}, "arms.all.mixup_until: ", "number of epochs (4), got 0.01"),
    ({"arms.all.mixup_until": 1.5}, "arms.all.mixup_until", "got 1.5"),
    ({"arms.guided.guide_until": 9}, "arms.guided.guide_until: ", "epochs (4), got 9"),
    ({"arms.guided.guide_until": "never"}, "arms.guided.guide_until", "got 'never'"),
    ({"arms.all.clean": "ful"}, "arms.all.clean: ", "'full', 'filtered' or 'none', got 'ful'"),
    ({"base.clean": "filtered"}, "base.clean: ", "full or none"),
    ({"base.data": "train+failures"}, "base.data: ", "must be train"),
    ({"arms.guided.teacher": "failure"}, "arms.guided.teacher: ", "did you mean 'failures'?"),
    ({"arms.guided.teacher": None}, "arms.guided.teacher: ", "arms.guided.filter needs one"),
    ({"arms.all.excluded": "relabel"}, "arms.all.teacher: ", "arms.all.excluded needs one"),
    ({"arms.all.clean": "filtered"}, "arms.all.filter: ", "other than all where clean is filtered"),
    ({"arms.all.guide_until": "overtake"}, "arms.all.teacher: ", "guide_until needs one"),
    ({"arms.all.control": "erms"}, "arms.all.control: ", "did you mean 'erm'?"),
    ({"arms.guided.filter": "top_k"}, "arms.guided.filter: top_k: k: ", "must be given"),
    (
        {"arms.guided.filter": {"name": "top_k", "k": 21}},
        "arms.guided.filter.k: ",
        "at most training.batch_size (20), got 21",
    ),
    (
        {"arms.guided.filter": {"name": "soft", "tau": 0}},
        "arms.guided.filter: soft: tau: ",
        "greater than 0, got 0",
    ),
    ({YOKED: {"name": "yoked", "of": "guide"}}, f"{YOKED}.of: no arm", "'guided'"),
    (
        {YOKED: {"name": "yoked", "of": "yoked"}},
        f"{YOKED}.of: ",
        "an arm whose filter asks a teacher",
    ),
    ({"arms.guided.excluded": "refill"}, "arms.yoked.excluded: ", "other than refill"),
    ({"teachers.failures.clean": "filtered"}, "teachers.failures.clean: ", "full or none"),
    (
        {"teachers.failures.folds": 3, "teachers.failures.data": "train+test"},
        "teachers.failures.folds: ",
        "1 unless data is train or train+failures, got 3",
    ),
    (
        {"teachers.failures.folds": 3, "teachers.failures.weights": "w.safetensors"},
        "teachers.failures.weights: ",
        "left out when folds or members > 1",
    ),
    (
        {"teachers.failures.folds": 3, "teachers.failures.members": 2},
        "teachers.failures.members: ",
        "1 when folds > 1, got 2",
    ),
    (
        {"arms.guided.filter": "confident"},
        "teachers.failures.members: ",
        "at least 2: arms.guided.filter confident needs a standard error, got 1",
    ),
    (
        {"teachers.failures.folds": 3, "arms.guided.data": "train+failures"},
        "arms.guided.data: ",
        "must be train",
    ),
    ({"failures.rule": "missclassified"}, "failures.rule: unknown", "'misclassified'"),
    ({"failures.split": "train"}, "failures.split: ", "'val_f' or 'test', got 'train'"),
    (
        {"arms.refill": {"teacher": "failures", "filter": "soft", "excluded": "refill"}},
        "arms.refill.filter: ",
        "negative or positive",
    ),
    ({"arms.guided.guide_fade": 2}, "arms.guided.guide_until: ", "must be given"),
    ({"arms.all.guide_until": 2}, "arms.all.guide_until: ", "nothing guides this arm"),
    ({"scores.epochs": [9]}, "scores.epochs: ", "at most the epochs of a student (4), got 9"),
    ({"teachers.failures.folds": 31}, "teachers.failures.folds: ", "at most half of data.train"),
    ({"training.optimizer": "sdg"}, "training.optimizer: ", "got 'sdg'"),
    ({"scores.rows": -1}, "scores.rows: ", "greater than or equal to 0, got -1"),
    ({"seeds": []}, "seeds: ", "at least 1"),
    ({"seeds": [-1]}, "seeds.0: ", "greater than or equal to 0, got -1"),
    ({"seeds": 3}, "seeds: ", "list, got 3"),
    ({"arms": ["erm"]}, "arms: ", "dictionary"),
    ({"arms.a/b": {}}, "arms: ", "letters, digits, - and _"),
    ({"panels.a b": {}}, "panels: ", "letters, digits, - and _"),
]


@pytest.mark.parametrize(
    ("changes", "place", "fix"), BAD, ids=[f"{n}-{next(iter(c))}" for n, (c, *_) in enumerate(BAD)]
)
def test_a_bad_recipe_is_refused_in_one_line_with_field_and_fix(
    tiny_description, changes, place, fix
):
    # Catches a mistake that is let through, or a message that leaves the user searching.
    message = message_of(tiny_description(changes))
    assert message.startswith(place)
    assert fix in message
    assert "\n" not in message
    assert "Value error" not in message and "pydantic" not in message


ALIKE = {
    "alpha": 2,
    "mixup_until": 2,
    "clean": "none",
    "clean_weight": 0.5,
    "mixed_weight": 0.5,
    "normalise": "kept",
    "forward": "separate",
    "same_lam": 2,
    "derange": True,
    "data": "train+val_f",
    "model": {"name": "mlp", "hidden": [8]},
    "epochs": 5,
}


@pytest.mark.parametrize("key", ALIKE)
def test_a_yoked_control_must_differ_in_nothing_but_the_choice(tiny_description, key):
    # Catches a control that differs in a second thing, so that it controls nothing.
    message = message_of(tiny_description({f"arms.yoked.{key}": ALIKE[key]}))
    assert message.startswith(f"arms.yoked.{key}: must be as in arms.guided, which it replays")
    both = {f"arms.{arm}.{key}": ALIKE[key] for arm in ("yoked", "guided")}
    make_recipe(tiny_description(both))


@pytest.mark.parametrize("key", ["training.epochs", "training.batch_size", "training.lr"])
def test_yes_is_not_a_number(tiny_description, key):
    # YAML reads `yes`, `on` and `true` as a boolean, which Python counts as the number 1.
    assert message_of(tiny_description({key: True})).startswith(f"{key}: ")


def test_yes_is_not_an_alpha(tiny_description):
    # As above: `alpha: on` must not quietly mean alpha = 1.
    assert message_of(tiny_description({"arms.all.alpha": True})).startswith("arms.all.alpha: ")


@pytest.mark.parametrize("key", ["arms.all.mixup_until", "arms.guided.guide_until"])
def test_a_share_of_one_is_not_the_first_epoch(tiny_description, key):
    # 0.9 is a share of the training; 1.0 must not quietly become epoch 1.
    assert message_of(tiny_description({key: 1.0})).startswith(key)


def test_a_seed_given_twice_is_refused_or_counted_once(tiny_description):
    # Two processes would train in one folder, and the mean would count that seed twice.
    try:
        seeds = make_recipe(tiny_description({"seeds": [0, 1, 0]})).seeds
    except UserError:
        return
    assert sorted(seeds) == [0, 1]


def test_without_a_size_of_train_something_is_left_for_test(tiny_description):
    # `data.train` not given takes all that are left; on data without an official test split
    # nothing would be left to evaluate on.
    from mixval.datasets import digits
    from mixval.splits import load_splits

    try:
        data = make_recipe(tiny_description({"data.train": None})).data
        sizes = {"train": data.train, "val_f": data.val_f, "val_dev": data.val_dev}
        splits = load_splits(digits(), seed=0, label_noise=0.0, **sizes)
    except UserError:
        return
    assert len(splits.test) > 0


@given(st.integers(1, 500), st.floats(0.001, 0.999))
def test_a_share_of_the_training_is_an_epoch_of_it(epochs, share):
    # Catches rounding that leads out of the training.
    assert 0 <= epoch_of(share, epochs) <= epochs
    assert abs(epoch_of(share, epochs) - share * epochs) <= 0.5
    assert epoch_of(epochs, epochs) == epochs  # an integer is an epoch already


def test_alpha_is_zero_from_mixup_until_on(tiny_recipe):
    # Catches an off-by-one at the epoch where mixup stops.
    arm = tiny_recipe({"arms.all.mixup_until": 3}).arms["all"]
    assert [alpha_at(arm, epoch, 4) for epoch in range(4)] == [1, 1, 1, 0]
    half = tiny_recipe({"arms.all.mixup_until": 0.5}).arms["all"]
    assert [alpha_at(half, epoch, 4) for epoch in range(4)] == [1, 1, 0, 0]


# -- files and overrides ------------------------------------------------------------------


def write_yaml(path, described):
    path.write_text(yaml.safe_dump(described), encoding="utf-8")
    return str(path)


def test_overrides_lie_over_the_file(tiny_description, tmp_path):
    # Catches an override that is lost, or that drops the other parameters of a choice.
    described = tiny_description({"arms.all.alpha": {"name": "easy", "alpha_max": 5}})
    path = write_yaml(tmp_path / "r.yaml", described)
    recipe = load_recipe(
        path,
        {
            "training.lr": 0.3,
            "arms.all.alpha.alpha_mid": 0.5,
            "arms.erm.alpha.value": 0.25,
            "arms.guided.filter.name": "soft",
            "model.hidden": [8],
        },
    )
    assert recipe.training.lr == 0.3 and recipe.training.epochs == 4
    assert recipe.arms["all"].alpha.parameters == {"alpha_max": 5, "alpha_mid": 0.5, "at": 0.5}
    assert recipe.arms["erm"].alpha.parameters == {"value": 0.25}
    assert recipe.arms["guided"].filter.name == "soft"
    assert recipe.model.parameters["hidden"] == [8]


def test_an_override_of_an_arm_that_is_not_there_is_refused(tiny_description, tmp_path):
    # Catches a misspelt arm that becomes a new one, beside the one that was meant.
    path = write_yaml(tmp_path / "r.yaml", tiny_description())
    with pytest.raises(UserError, match=r"arms.gided.alpha: .* did you mean 'guided'\?"):
        load_recipe(path, {"arms.gided.alpha": 3})


def test_another_option_does_not_inherit_the_parameters_of_the_first(tiny_description, tmp_path):
    # Catches `--arms.all.alpha.name linear` that keeps alpha_max of `easy`.
    described = tiny_description({"arms.all.alpha": {"name": "easy", "alpha_max": 5}})
    path = write_yaml(tmp_path / "r.yaml", described)
    recipe = load_recipe(path, {"arms.all.alpha.start": 4, "arms.all.alpha.name": "linear"})
    assert recipe.arms["all"].alpha.parameters == {"start": 4, "end": 0}


@pytest.mark.parametrize(("text", "number"), [("1e-3", 1e-3), ("5E2", 500.0), ("1.e1", 10.0)])
def test_a_number_with_an_exponent_is_a_number(tiny_description, tmp_path, text, number):
    # YAML 1.1 reads 1e-3 as a word.
    path = tmp_path / "r.yaml"
    described = yaml.safe_dump(tiny_description({"training.lr": 12345}))
    path.write_text(described.replace("12345", text))
    assert load_recipe(str(path)).training.lr == number


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("name: [", "not readable as YAML"),
        ("- a\n- b\n", "a recipe is a mapping of sections, got list"),
        ("", "a recipe is a mapping of sections, got NoneType"),
        ("name: !!python/object/apply:os.getcwd []", "not readable as YAML"),
        ("name: a\n1: 2", "1"),
        ("a: &a {b: *a}", ""),
    ],
    ids=["malformed", "list", "empty", "python tag", "key is a number", "contains itself"],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(tmp_path, text, fragment):
    # Catches a parser's own exception reaching the user.
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(str(path))
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    # Catches a weights file given as a recipe.
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UserError, match=r"bad.yaml: not readable"):
        load_recipe(str(path))


def test_an_unknown_recipe_suggests_the_nearest():
    with pytest.raises(UserError, match=r"no packaged recipe and no file 'digit'.*'digits'"):
        load_recipe("digit")


# -- who may name code --------------------------------------------------------------------


@pytest.fixture
def own_schedule(tmp_path, monkeypatch):
    """Write a module with a schedule that leaves a mark when it is imported; return the mark."""
    source = """
        from pathlib import Path

        Path(__file__).with_name("imported").touch()

        def steps(progress: float, *, height: float = 2.0) -> float:
            return height if progress < 0.5 else height / 2

        def negative(progress: float) -> float:
            return -1.0
    """
    (tmp_path / "my_own_schedule.py").write_text(textwrap.dedent(source))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_own_schedule", raising=False)
    return tmp_path / "imported"


def test_own_code_is_accepted_by_hand_and_used(tiny_description, tmp_path, own_schedule):
    # Catches an own schedule that is accepted but not the one that is used.
    path = write_yaml(tmp_path / "r.yaml", tiny_description())
    recipe = load_recipe(
        path,
        {"arms.all.alpha": {"name": "my_own_schedule:steps", "height": 6}},
    )
    assert [alpha_at(recipe.arms["all"], epoch, 4) for epoch in range(4)] == [6, 6, 3, 3]
    short = load_recipe(path, {"arms.all.alpha": "my_own_schedule:steps"})
    assert alpha_at(short.arms["all"], 0, 4) == 2


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ("my_own_schedule:stepz", "did you mean 'steps'?"),
        ({"name": "my_own_schedule:steps", "hight": 6}, "did you mean 'height'?"),
        ({"name": "my_own_schedule:steps", "height": "tall"}, "number"),
        ("my_own_schedule:negative", "alpha must be finite and >= 0, got -1.0"),
        ("no_such_module_at_all:steps", "no module 'no_such_module_at_all'"),
        ("math:sin", "math"),
        ("sys:exit", "sys"),
    ],
)
def test_own_code_is_checked_like_an_option(tiny_description, own_schedule, given, fragment):
    # Catches a misspelt function, parameter or module that fails deep inside the training.
    message = message_of(tiny_description({"arms.all.alpha": given}))
    assert message.startswith("arms.all.alpha: ")
    assert fragment in message


def test_own_code_may_hold_other_functions_of_any_kind(tiny_recipe, tmp_path, own_schedule):
    # Catches a reader that stumbles over a function nobody asked for.
    source = """
        START = 4.0

        def helper(progress, *, start=START, **rest): ...

        def steps(progress, *, height: float = 3.0): return height
    """
    (tmp_path / "my_own_toolbox.py").write_text(textwrap.dedent(source))
    recipe = tiny_recipe({"arms.all.alpha": "my_own_toolbox:steps"})
    assert alpha_at(recipe.arms["all"], 0, 4) == 3


@pytest.mark.parametrize(
    "given",
    [{"name": "my_own_schedule:steps"}, "my_own_schedule:steps"],
    ids=["long form", "short form"],
)
@pytest.mark.parametrize("key", ["arms.all.alpha", "base.alpha", "teachers.failures.alpha"])
def test_a_file_may_not_name_code_and_runs_none(
    tiny_description, tmp_path, own_schedule, key, given
):
    # A recipe that came with a dataset could otherwise run anything that lies beside it.
    path = write_yaml(tmp_path / "r.yaml", tiny_description({key: given}))
    with pytest.raises(UserError, match="names code; give it on the command line"):
        load_recipe(path)
    assert not own_schedule.exists()


@pytest.mark.parametrize("key", ["model", "data.source", "training.loss", "failures.rule"])
def test_a_file_may_not_name_code_for_any_choice(tiny_description, tmp_path, own_schedule, key):
    # As above, for what is imported only later.
    path = write_yaml(tmp_path / "r.yaml", tiny_description({key: "my_own_schedule:steps"}))
    with pytest.raises(UserError, match="names code"):
        load_recipe(path)


def test_the_recipe_of_a_run_that_came_from_elsewhere_runs_no_code(
    tiny_description, tmp_path, own_schedule
):
    # `mixval report` reads recipe.yaml of a folder that someone else may have packed.
    from mixval.job import write_report

    run = tmp_path / "run"
    run.mkdir()
    write_yaml(run / "recipe.yaml", tiny_description({"arms.all.alpha": "my_own_schedule:steps"}))
    with pytest.raises(UserError):
        write_report(run)  # refused, or it has no results: either way nothing was imported
    assert not own_schedule.exists()


# -- who saw test labels ------------------------------------------------------------------

LEAKS = [
    # changes, and which arms leak
    ({}, set()),
    ({"teachers.failures.data": "train"}, set()),
    ({"teachers.failures.data": "train+val_f"}, set()),
    ({"teachers.failures.data": "train+test"}, {"guided", "yoked"}),
    ({"failures.split": "test"}, {"guided", "yoked"}),
    ({"failures.split": "test", "teachers.failures.data": "train"}, set()),
    ({"arms.erm.data": "train+test"}, {"erm"}),
    ({"arms.erm.data": "train+failures", "failures.split": "test"}, {"erm", "guided", "yoked"}),
    ({"arms.erm.data": "train+failures"}, set()),
    (
        # A control that asks an honest teacher for labels still replays a leaking arm's choice.
        {
            "teachers.failures.data": "train+test",
            "teachers.honest": {"data": "train"},
            "arms.yoked.teacher": "honest",
        },
        {"guided", "yoked"},
    ),
]


@pytest.mark.parametrize(("changes", "leaking"), LEAKS)
def test_whatever_saw_a_test_label_is_known(tiny_recipe, changes, leaking):
    # Catches a number that looks honest and is not, and an honest one that is marked.
    recipe = tiny_recipe(changes)
    assert {name for name, arm in recipe.arms.items() if recipe.leaks_test_labels(arm)} == leaking


# -- what may share a run directory -------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"arms.new": {"alpha": 3}},
        {"teachers.new": {"data": "train"}},
        {"panels.new": {"label_noise": 0.1}},
        {"seeds": [0, 1, 2]},
        {"engine.workers": 2},
        {"engine.checkpoint_seconds": 1.0},
        {"arms.all.title": "another title"},
        {"arms.all.control": "guided"},
    ],
)
def test_what_can_be_added_is_no_conflict(tiny_recipe, changes):
    # Catches a run that can't be extended by an arm or a seed.
    assert tiny_recipe().conflict_with(tiny_recipe(changes)) is None
    assert tiny_recipe(changes).conflict_with(tiny_recipe()) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"training.lr": 0.1}, "training.lr"),
        ({"arms.all.alpha": 2}, "arms.all.alpha.value"),
        ({"teachers.failures.data": "train"}, "teachers.failures.data"),
        ({"data.train": 61}, "data.train"),
        ({"name": "other"}, "name"),
        ({"engine.threads": 2}, "engine.threads"),
        ({"scores.rows": 51}, "scores.rows"),
        ({"panels.main": {"label_noise": 0.1}}, "panels.main.label_noise"),
        ({"model": {"name": "mlp", "hidden": [16], "dropout": 0.5}}, "model.dropout"),
    ],
)
def test_what_was_made_differently_is_a_conflict(tiny_recipe, changes, key):
    # Catches results of two recipes in one table.
    assert tiny_recipe().conflict_with(tiny_recipe(changes)) == key
    assert tiny_recipe(changes).conflict_with(tiny_recipe()) == key


def test_a_control_is_like_the_arm_it_replays_where_it_says_nothing(tiny_recipe):
    # Catches a change of the guided arm that has to be repeated for each of its controls.
    recipe = tiny_recipe({"arms.guided.alpha": 5.0, "arms.guided.derange": True})
    assert recipe.arms["yoked"].alpha == recipe.arms["guided"].alpha
    assert recipe.arms["yoked"].derange
    assert recipe.arms["yoked"].teacher is None
