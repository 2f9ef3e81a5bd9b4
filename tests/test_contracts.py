"""What every option of every choice module must keep; new options are found by themselves.

An option whose parameters have no default needs an example of them in EXAMPLES.
"""

import ast
import importlib
import inspect
import math
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import miniatures
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure

import mixval
from mixval import choose
from mixval.augmentations import draw_uniforms
from mixval.cli import CHOICE_MODULES
from mixval.types import MixScores, Part, ScoreTable

PACKAGE = Path(mixval.__file__).parent
OPTIONS = [(module, name) for module in CHOICE_MODULES for name in choose.options(module)]
POSITIONAL = {  # what every option of the module is called with
    "alpha_schedules": ["progress"],
    "augmentations": ["images", "uniforms"],
    "class_weights": ["labels", "num_classes"],
    "corruptions": ["part", "num_classes", "rng"],
    "datasets": [],
    "failure_rules": ["log_probs", "labels"],
    "filter_policies": ["scores"],
    "losses": ["logits", "targets", "class_weight"],
    "models": ["shape", "num_classes"],
    "plots": None,  # each plot draws something else
    "posterior_fits": ["known"],
}
EXAMPLES: dict[tuple[str, str], dict[str, Any]] = {
    ("alpha_schedules", "points"): {"at": [0.0, 0.3, 1.0], "alpha": [1.0, 4.0, 0.0]},
    ("class_weights", "given"): {"values": [0.5, 1.0, 2.5]},
    ("filter_policies", "top_k"): {"k": 3},
    ("filter_policies", "yoked"): {"of": "guided"},
    ("models", "timm"): {"architecture": "resnet10t"},
}
BATCH, CLASSES = 12, 3


def names_of(module: str) -> list[str]:
    return list(choose.options(module))


def function_of(module: str, name: str):
    return getattr(importlib.import_module(f"mixval.{module}"), name)


def example_of(module: str, name: str, **more: Any):
    """Return the option with its defaults, and examples for what has none."""
    given = {**EXAMPLES.get((module, name), {}), **more}
    fields = choose.options(module)[name].parameters.model_fields
    missing = [key for key, field in fields.items() if field.is_required() and key not in given]
    assert not missing, f"add an example of {missing} of {module}.{name} to EXAMPLES"
    return choose.pick(module, name, given)


# -- the source and the function --------------------------------------------------------------


def test_every_choice_module_is_known():
    # Catches a new choice module that `mixval list` and these contracts would not see.
    files = {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    files |= {path.parent.name: path for path in PACKAGE.glob("*/__init__.py")}
    with_options = {name for name, path in files.items() if "\n__all__ = [" in path.read_text()}
    assert with_options == set(CHOICE_MODULES) == set(POSITIONAL)


@pytest.mark.parametrize("module", CHOICE_MODULES)
def test_the_options_are_what_the_module_exports(module):
    assert names_of(module) == list(importlib.import_module(f"mixval.{module}").__all__)


@pytest.mark.parametrize(("module", "name"), OPTIONS)
def test_the_signature_read_from_source_is_that_of_the_function(module, name):
    # Recipes are checked against the source, training calls the function: both must agree.
    function = function_of(module, name)
    assert function.__module__.removeprefix("mixval.").split(".")[0] == module
    parameters = inspect.signature(function).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    read = choose.options(module)[name].parameters.model_fields
    assert list(read) == list(own)
    for key, default in own.items():
        if default is inspect.Parameter.empty:
            assert read[key].is_required(), key
        else:
            assert read[key].default == default, key
            assert type(read[key].default) is type(default), key


@pytest.mark.parametrize(("module", "name"), OPTIONS)
def test_every_parameter_has_a_type_that_a_recipe_is_checked_against(module, name):
    # A name that bounds.py does not know is read as Any, and nothing would be refused.
    for key, field in choose.options(module)[name].parameters.model_fields.items():
        assert field.annotation is not Any, key


@pytest.mark.parametrize(("module", "name"), OPTIONS)
def test_every_option_takes_the_arguments_of_its_module(module, name):
    parameters = inspect.signature(function_of(module, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if POSITIONAL[module] is not None:
        assert positional == POSITIONAL[module]


@pytest.mark.parametrize(("module", "name"), OPTIONS)
def test_every_option_says_what_it_does(module, name):
    summary = choose.options(module)[name].summary
    assert summary.endswith((".", ":")) or "." in summary, summary
    assert len(summary) > 10


@pytest.mark.parametrize("module", CHOICE_MODULES)
def test_options_are_sorted_and_unique(module):
    assert names_of(module) == sorted(set(names_of(module)))


# -- the maths of each module -------------------------------------------------------------------


@pytest.mark.parametrize("name", names_of("alpha_schedules"))
def test_every_schedule_is_finite_and_not_negative(name):
    # Also at 0 and 1, and at the mid-epoch progress of long trainings.
    schedule = example_of("alpha_schedules", name)
    for progress in [*np.linspace(0, 1, 101).tolist(), 0.5 / 10_000, 1 - 0.5 / 10_000]:
        alpha = schedule(progress)
        assert isinstance(alpha, float)
        assert math.isfinite(alpha)
        assert alpha >= 0


@pytest.mark.parametrize("name", names_of("alpha_schedules"))
def test_every_schedule_is_a_pure_function(name):
    schedule = example_of("alpha_schedules", name)
    there, back = [0.1, 0.5, 0.9], [0.9, 0.5, 0.1]
    assert [schedule(t) for t in there] == [schedule(t) for t in back][::-1]


def toy_scores(seed: int, kind: str) -> MixScores:
    rng = np.random.default_rng(seed)
    scale = {"plain": 1.0, "tied": 0.0, "huge": 1e30}[kind]
    updated, base, lam = torch.from_numpy(rng.random((3, BATCH)).astype(np.float32))
    return MixScores(
        r_hat=scale * (updated - base),
        updated=updated,
        base=base,
        lam=lam,
        rng=np.random.default_rng(seed),
        replayed=torch.from_numpy(rng.random(BATCH).astype(np.float32)),
        std_error=torch.from_numpy(rng.random(BATCH).astype(np.float32)),
        draws=5,
    )


@pytest.mark.parametrize("kind", ["plain", "tied", "huge"])
@pytest.mark.parametrize("name", names_of("filter_policies"))
def test_every_filter_gives_a_weight_to_every_mix(name, kind):
    weights = example_of("filter_policies", name)(toy_scores(0, kind))
    assert weights.shape == (BATCH,)
    assert weights.dtype == torch.float32
    assert ((weights >= 0) & (weights <= 1)).all()


@pytest.mark.parametrize("name", names_of("filter_policies"))
def test_every_filter_repeats_with_the_same_generator(name):
    # A filter that draws from anywhere else can't be resumed.
    policy = example_of("filter_policies", name)
    torch.manual_seed(0)
    one = policy(toy_scores(1, "plain"))
    torch.manual_seed(1)
    np.random.seed(2)
    assert torch.equal(one, policy(toy_scores(1, "plain")))


@pytest.mark.parametrize("name", names_of("filter_policies"))
def test_every_filter_leaves_its_scores_alone(name):
    scores, before = toy_scores(2, "plain"), toy_scores(2, "plain")
    example_of("filter_policies", name)(scores)
    for field in ("r_hat", "updated", "base", "lam", "replayed"):
        assert torch.equal(getattr(scores, field), getattr(before, field)), field


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("name", names_of("losses"))
def test_every_loss_is_finite_for_extreme_logits(name, size, weighted):
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((BATCH, CLASSES)).astype(np.float32)).sign()
    targets = torch.from_numpy(rng.dirichlet(np.ones(CLASSES), BATCH).astype(np.float32))
    targets[0] = torch.tensor([1.0, 0.0, 0.0])
    class_weight = torch.tensor([0.5, 1.0, 2.0]) if weighted else None
    logits = (size * logits).requires_grad_()
    loss = example_of("losses", name)(logits, targets, class_weight)
    assert loss.shape == (BATCH,)
    assert loss.isfinite().all()
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", names_of("losses"))
def test_every_loss_prefers_the_label(name):
    # The sign: confident in the label costs less than confident in another class.
    loss = example_of("losses", name)
    logits = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    right, wrong = loss(logits, torch.tensor([[1.0, 0.0, 0.0]] * 2))
    assert right < wrong


@pytest.mark.parametrize("name", names_of("losses"))
def test_every_loss_of_a_row_depends_on_that_row_only(name):
    # Rows are weighted by the filter one by one; a batch statistic would leak excluded rows.
    loss = example_of("losses", name)
    logits = torch.randn(BATCH, CLASSES, generator=torch.Generator().manual_seed(0))
    targets = torch.eye(CLASSES)[torch.arange(BATCH) % CLASSES]
    alone = torch.cat([loss(logits[n : n + 1], targets[n : n + 1]) for n in range(BATCH)])
    torch.testing.assert_close(loss(logits, targets), alone)


@pytest.mark.parametrize("name", names_of("failure_rules"))
def test_every_failure_rule_gives_a_mask(name):
    rng = np.random.default_rng(0)
    log_probs = torch.from_numpy(rng.standard_normal((50, CLASSES))).log_softmax(1)
    labels = torch.from_numpy(rng.integers(0, CLASSES, 50))
    failing = example_of("failure_rules", name)(log_probs, labels)
    assert failing.shape == (50,)
    assert failing.dtype == torch.bool
    assert 0 < int(failing.sum()) < 50


@pytest.mark.parametrize("name", names_of("failure_rules"))
def test_every_failure_rule_follows_the_samples(name):
    # Another order of the samples, the same samples fail.
    rng = np.random.default_rng(1)
    log_probs = torch.from_numpy(rng.standard_normal((50, CLASSES))).log_softmax(1)
    labels = torch.from_numpy(rng.integers(0, CLASSES, 50))
    order = torch.from_numpy(rng.permutation(50))
    rule = example_of("failure_rules", name)
    assert torch.equal(rule(log_probs, labels)[order], rule(log_probs[order], labels[order]))


@pytest.mark.parametrize("name", names_of("class_weights"))
def test_every_class_weight_is_one_on_average(name):
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    weights = example_of("class_weights", name)(labels, CLASSES)
    assert weights.shape == (CLASSES,)
    assert weights.dtype == torch.float32
    assert (weights.isfinite() & (weights >= 0)).all()
    assert float(weights[labels].mean()) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("name", names_of("corruptions"))
def test_every_corruption_keeps_the_samples_and_repeats(name):
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (40, 3, 5, 4), dtype=np.uint8))
    part = Part(images, torch.arange(40) % 10, torch.arange(40) + 7)
    before = part.fingerprint
    one, other = (
        example_of("corruptions", name)(part, 10, np.random.default_rng(1)) for _ in range(2)
    )
    assert one.fingerprint == other.fingerprint and torch.equal(one.ids, part.ids)
    assert one.images.shape == images.shape and one.images.dtype == torch.uint8
    assert one.labels.dtype == torch.int64 and bool(((one.labels >= 0) & (one.labels < 10)).all())
    assert replace(part).fingerprint == before  # a new Part, which has nothing cached


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 7)])
@pytest.mark.parametrize("name", names_of("augmentations"))
def test_every_augmentation_keeps_the_shape_and_can_be_replayed(name, shape):
    # Replayed in another batch, order and size: the same view of the same sample.
    augment = example_of("augmentations", name)
    images = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0))
    before, uniforms = images.clone(), draw_uniforms(0, 0, torch.arange(BATCH))
    views = augment(images, uniforms)
    assert views.shape == images.shape
    assert views.dtype == images.dtype
    assert torch.equal(images, before), "the images were changed in place"
    torch.manual_seed(3)
    chosen = torch.tensor([7, 2, 2, 11])
    assert torch.equal(augment(images[chosen], uniforms[chosen]), views[chosen])


@pytest.mark.parametrize("classes", [2, 7])
@pytest.mark.parametrize("name", names_of("models"))
def test_every_model_maps_images_to_logits(name, classes):
    build = example_of("models", name)
    torch.manual_seed(0)
    network = build((1, 8, 8), classes)
    inputs = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    logits = network(inputs)
    assert logits.shape == (2, classes)
    assert logits.isfinite().all()
    # Catches a softmax at the end: losses take logits and would apply a second one.
    assert not torch.allclose(logits.sum(1), torch.ones(2), atol=1e-4)


@pytest.mark.parametrize("name", names_of("models"))
def test_every_model_draws_its_weights_from_torchs_generator(name):
    # Students of one stream must start from the same weights, and of another seed from others.
    build = example_of("models", name)
    networks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        networks.append(build((1, 8, 8), CLASSES))
    one, again, other = (torch.cat([p.flatten() for p in n.parameters()]) for n in networks)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def example_of_dataset(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Return the option with a small copy of its data, in memory or on disk as it comes."""
    more = {}
    if name == "npz":
        more["path"] = str(folder / "data.npz")
        images = np.random.default_rng(0).integers(0, 256, (10, 4, 4), dtype=np.uint8)
        labels = np.arange(10) % 3
        np.savez(more["path"], images=images, labels=labels, images_test=images, labels_test=labels)
    elif name == "image_folder":
        more["path"] = str(folder)
        for place in ("train/a", "train/b", "val/a", "test/b"):
            miniatures.save_image(folder / place / "1.png")
    elif name in miniatures.SIZES:
        more["root"] = str(miniatures.lay_out(name, folder, monkeypatch))
    return example_of("datasets", name, **more)


@pytest.mark.parametrize("name", names_of("datasets"))
def test_every_dataset_is_labelled_bytes_with_ids_of_their_own(name, tmp_path, monkeypatch):
    # What needs files gets small ones. Catches ids that a train and a test sample share.
    load = example_of_dataset(name, tmp_path, monkeypatch)
    source = load()
    parts = [part for part in (source.train, source.val, source.test) if part is not None]
    for part in parts:
        assert isinstance(part, Part)
        assert len(part.images.shape) == 4
        first = part.images[torch.tensor([0])]
        assert first.dtype == torch.uint8 and first.shape[1:] == part.images.shape[1:]
        assert part.labels.dtype == part.ids.dtype == torch.int64
        assert part.images.shape[0] == len(part.labels) == len(part.ids) > 0
        assert int(part.labels.min()) >= 0
        assert int(part.labels.max()) < len(source.classes)
    ids = torch.cat([part.ids for part in parts])
    assert len(ids.unique()) == len(ids)
    again = load()
    assert again.train.fingerprint == source.train.fingerprint
    assert again.classes == source.classes


@pytest.mark.parametrize("name", names_of("datasets"))
def test_every_dataset_reaches_worker_processes(name, tmp_path, monkeypatch):
    # Catches a decoder that can't be pickled, or that comes back with other images.
    source = example_of_dataset(name, tmp_path, monkeypatch)()
    moved = pickle.loads(pickle.dumps(source))
    assert moved.train.fingerprint == source.train.fingerprint
    last = torch.tensor([len(source.train) - 1])
    assert torch.equal(moved.train.images[last], source.train.images[last])


def toy_table() -> ScoreTable:
    rng = np.random.default_rng(0)
    whole = {name: np.arange(40) for name in ("epoch", "row", "i", "j", "label_i", "label_j")}
    parts = {name: rng.random(40) for name in ScoreTable.columns() if name not in whole}
    parts["r_hat"] = parts["updated"] - parts["base"]
    return ScoreTable(**whole, **parts)


PLOTTED = {  # by the name of the argument
    "names": ["ERM", " guided"],
    "means": [94.0, 95.0],
    "half_widths": [0.5, math.nan],
    "highlighted": [False, True],
    "curves": {name: ([0.0, 0.5, 1.0], [10.0, 1.0, 0.0]) for name in "abcdefg"},
    "label": "NLL",
    "table": toy_table(),
}


@pytest.mark.parametrize("name", names_of("plots"))
def test_every_plot_draws_a_figure_that_pyplot_does_not_keep(name, tmp_path):
    # pyplot keeps its figures for ever; a report of a long run would eat the memory.
    function = function_of("plots", name)
    wanted = inspect.signature(function).parameters.values()
    missing = {p.name for p in wanted if p.default is p.empty} - PLOTTED.keys()
    assert not missing, f"add an example of {missing} of plots.{name} to PLOTTED"
    arguments = {p.name: PLOTTED[p.name] for p in wanted if p.default is p.empty}
    before = pyplot.get_fignums()
    figure = function(**arguments)
    assert isinstance(figure, Figure)
    assert pyplot.get_fignums() == before
    assert any(axes.lines or axes.collections or axes.patches for axes in figure.axes)
    figure.savefig(tmp_path / "figure.svg")  # layout and labels are worked out only now


def test_options_are_bound_and_not_called():
    # pick() binds parameters; a schedule that ran at once would be a number.
    schedule = choose.pick("alpha_schedules", "constant", {"value": 2.0})
    assert isinstance(schedule, partial)
    assert schedule(0.1) == 2.0


# -- the public surface -----------------------------------------------------------------------


def promised_names() -> dict[str, tuple[str, str]]:
    """Return the names that the type checker sees in mixval: module and name of each."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_the_public_names_are_those_the_type_checker_sees():
    # Three lists of one thing: they must not drift apart.
    assert sorted(promised_names()) == sorted(mixval.__all__) == sorted(dir(mixval))


@pytest.mark.parametrize("name", mixval.__all__)
def test_every_public_name_is_the_object_it_says(name):
    home, original = promised_names()[name]
    assert getattr(mixval, name) is getattr(importlib.import_module(home), original)


def test_an_unknown_public_name_is_an_attribute_error():
    # Anything else breaks hasattr, copy and pickle of the module's users.
    assert not hasattr(mixval, "no_such_name")
