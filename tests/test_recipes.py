"""The packaged recipes: each trains its own networks on images of its shape; extending works."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mixval import load_recipe
from mixval.dataset_facts import FACTS
from mixval.engine import start_engine
from mixval.errors import UserError
from mixval.recipe import EngineSettings
from mixval.recipe_loading import PACKAGED, packaged_recipes, read_yaml
from mixval.training import Loop
from mixval.training_job import Job, Watch
from mixval.types import Part, Splits

SEED_TABLES = (
    "cifar10",
    "cifar100",
    "stl10",
    "caltech101",
    "dtd",
    "fgvc_aircraft",
    "tiny_imagenet",
)
ROWS = 4


def image_shape(source) -> tuple[int, int, int]:
    """Return what the dataset's images are: by its facts, or the size that the recipe asks for."""
    pixels = FACTS[source.name].pixels
    size = source.parameters.get("size") or int(pixels.split(" x ")[0])
    return (1 if "grey" in pixels else 3, size, size)


def synthetic(recipe) -> Splits:
    shape, classes = image_shape(recipe.data.source), FACTS[recipe.data.source.name].classes
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (ROWS, *shape), dtype=np.uint8))
    part = Part(images, torch.from_numpy(rng.integers(0, classes, ROWS)), torch.arange(ROWS))
    half = torch.full((shape[0], 1, 1), 0.5)
    names = tuple(map(str, range(classes)))
    return Splits(part, part, part, part, names, torch.zeros(0, dtype=torch.int64), half, half)


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_recipe_trains_each_of_its_networks_on_images_of_its_shape(name):
    # Catches an architecture that timm does not have, that is too deep for the images, or
    # whose head has the wrong number of classes.
    recipe = load_recipe(name)
    splits = synthetic(recipe)
    engine = start_engine(EngineSettings(device="cpu", channels_last=True))
    training = recipe.training.model_copy(update={"batch_size": ROWS})
    learners = [recipe.base, *recipe.teachers.values(), *recipe.arms.values()]
    models = {str(recipe.model_of(learner)): learner for learner in learners}
    for learner in models.values():
        job = Job(
            learner=recipe.arms["all"],
            training=training,
            model=recipe.model_of(learner),
            epochs=recipe.training.epochs,
            part=splits.train,
            splits=splits,
            seed=0,
            stream="student",
        )
        loop = Loop(job, engine, None, Watch())
        next(loop.steps())
        gradients = [p.grad for p in loop.model.parameters()]
        assert all(grad is not None and grad.isfinite().all() for grad in gradients)
        assert any(bool(grad.abs().sum() > 0) for grad in gradients)


def test_every_dataset_of_the_tables_has_its_three_recipes():
    missing = {f"{name}{kind}" for name in SEED_TABLES for kind in ("", "_short", "_cpu")} - {
        *packaged_recipes()
    }
    assert not missing


@pytest.mark.parametrize("name", SEED_TABLES)
def test_the_tables_have_the_epochs_and_the_wider_student_of_the_seed(name):
    recipe = load_recipe(name)
    assert recipe.training.epochs == 600
    assert recipe.arms["regmixup"].epochs == 400
    assert recipe.arms["mixup_twice"].epochs == 1200
    alpha = recipe.arms["regmixup"].alpha.parameters["value"]
    assert alpha == (10 if name == "cifar100" else 20)
    wide = recipe.arms["guided_wide"].model
    assert wide is not None and wide.parameters["architecture"] == "tf_efficientnetv2_s"
    assert recipe.arms["yoked_wide"].control == "all_wide"


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_guided_arm_has_its_yoked_control_beside_it(name):
    # A guided accuracy alone says nothing.
    recipe = load_recipe(name)
    yoked = {arm.yoked_to for arm in recipe.arms.values()}
    guided = {name for name, arm in recipe.arms.items() if arm.filter.name == "negative"}
    assert guided and guided <= yoked


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_file_is_named_as_its_recipe(path):
    assert read_yaml(path)["name"] == path.stem.removeprefix("_")


# -- extends ------------------------------------------------------------------------------


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_recipe_is_laid_over_the_one_it_extends(tmp_path):
    path = write(
        tmp_path,
        "mine.yaml",
        """
        extends: digits
        name: mine
        model: {name: conv_net, width: 8}
        training: {epochs: 7}
        arms:
          easy_stop: null
          all: {alpha: 3}
          more: {alpha: 0.5}
        seeds: [4]
        """,
    )
    mine, digits = load_recipe(path), load_recipe("digits")
    assert mine.model.parameters == {"width": 8}, "parameters of the mlp stayed"
    assert mine.training == digits.training.model_copy(update={"epochs": 7})
    assert set(mine.arms) == {*digits.arms, "more"} - {"easy_stop"}
    assert mine.arms["all"].title == digits.arms["all"].title
    assert mine.arms["all"].alpha.parameters["value"] == 3
    assert mine.data == digits.data and mine.seeds == [4]


def test_a_file_beside_goes_before_a_packaged_recipe_of_the_name(tmp_path):
    write(tmp_path, "digits", "extends: digits\nname: beside\ntraining: {epochs: 3}\n")
    path = write(tmp_path, "mine.yaml", "extends: digits\nname: mine\n")
    with pytest.raises(UserError, match="circle"):  # the file beside extends itself
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("extends: nowhere\nname: x\n", "no packaged recipe and no file 'nowhere'"),
        ("extends: [digits]\nname: x\n", "must be a packaged recipe or a file"),
        ("extends: mine.yaml\nname: x\n", "goes round in a circle"),
    ],
)
def test_a_recipe_that_extends_nothing_there_is_refused(tmp_path, text, said):
    with pytest.raises(UserError, match=said):
        load_recipe(write(tmp_path, "mine.yaml", text))


def test_the_default_job_is_what_it_was():
    # The table in the README is of these settings.
    recipe = load_recipe("digits")
    assert list(recipe.arms)[:4] == ["erm", "mixup", "regmixup", "all"] and len(recipe.arms) == 14
    assert recipe.training.epochs == 40 and recipe.seeds == list(range(10))
