"""Images that are decoded when asked for train as those in memory do, bit for bit."""

import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixval import filter_policies
from mixval.checkpoints import Checkpoints
from mixval.engine import start_engine
from mixval.errors import Interrupted, UserError
from mixval.feeding import feed
from mixval.fingerprints import array_fingerprint
from mixval.guidance import Guidance
from mixval.mixing import RowMaker, draw_plan
from mixval.pipeline import CellRun
from mixval.recipe import EngineSettings
from mixval.stages.cell import Cell
from mixval.store import Store
from mixval.training import Watch, train
from mixval.types import Part, StreamedImages

AUGMENTATIONS = {"none": "none", "crop_flip": {"name": "crop_flip", "pad": 1}}


class Held:
    """A decoder of images that a test holds, which counts how often each was asked for."""

    def __init__(self, images):
        self.images, self.image_shape = images, tuple(images.shape[1:])
        self.content = array_fingerprint(images)
        self.asked = Counter()

    def __eq__(self, other):  # as a dataclass with a tensor in it
        raise AssertionError("decoders were compared")

    __hash__ = object.__hash__

    def __call__(self, place):
        self.asked[place] += 1
        return self.images[place]


def streamed(part, pieces=2):
    """Return the same part, decoded by several decoders, the last places first in each."""
    parts = []
    for positions in np.array_split(np.arange(len(part)), pieces):
        piece = part.take(positions)
        images = StreamedImages.of(Held(piece.images.flip(0)), len(piece))
        parts.append(replace(piece, images=images.take(np.arange(len(piece))[::-1].copy())))
    return Part.join(parts)


def as_streamed(job, pieces=2):
    return replace(job, part=streamed(job.part, pieces))


def engine_with(loaders):
    return start_engine(EngineSettings(device="cpu", loaders=loaders))


def facts_of(trained):
    record = trained.record
    return {
        "weights": {k: v.numpy().tobytes() for k, v in trained.model.network.state_dict().items()},
        "record": record and [record.mixed.numpy().tobytes(), record.clean.numpy().tobytes()],
        "metrics": trained.metrics,
        "cost": (trained.cost.steps, trained.cost.forwards),
    }


def asked_of(part):
    return sum((decoder.asked for decoder in part.images.decoders), Counter())


@pytest.fixture
def guided(make_job, scorer):
    """Return a maker of the job of a guided student, by dotted changes."""
    guidance = Guidance(filter_policies.negative, scorer=scorer, num_teachers=1)
    return lambda changes=None, **fields: make_job(changes, guidance=guidance, **fields)


# -- batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("augmented", [False, True])
def test_streamed_batches_are_those_from_memory(splits, loaders, alpha, augmented):
    # Catches batches that arrive in another order, parents exchanged, and augmentation that is
    # keyed by the place in the batch.
    from mixval.augmentations import crop_flip, draw_uniforms

    plan = draw_plan(seed=0, epoch=1, alpha=alpha, num_samples=60)
    plans = [plan.keep(slice(at, at + 7)) for at in range(0, 60, 7)]
    uniforms = draw_uniforms(0, 1, splits.train.ids) if augmented else None
    both = []
    for part in (splits.train, streamed(splits.train)):
        maker = RowMaker.of(part, splits, torch.device("cpu"), loaders)
        maker = replace(maker, augment=crop_flip if augmented else None)
        both.append(list(feed(maker, plans, uniforms)))
    assert len(both[0]) == len(both[1]) == len(plans)
    for held, read in zip(*both, strict=True):
        for name in ("clean", "clean_targets", "mixed", "mixed_targets", "lam"):
            one, other = getattr(held, name), getattr(read, name)
            assert (one is other is None) or torch.equal(one, other), name


@pytest.mark.parametrize(("alpha", "images"), [(0.0, 1), (1.0, 2)])
def test_a_row_decodes_as_many_images_as_it_has_parents(splits, alpha, images):
    # Catches partners that are decoded and thrown away, which doubles what ERM reads.
    plan = draw_plan(seed=0, epoch=0, alpha=alpha, num_samples=60)
    part = streamed(splits.train)
    maker = RowMaker.of(part, splits, torch.device("cpu"))
    assert len(list(feed(maker, [plan], None))) == 1
    assert asked_of(part).total() == images * 60
    # Partners are a permutation too: every image is asked for as often as any other.
    every = [count for decoder in part.images.decoders for count in decoder.asked.values()]
    assert every == [images] * 60


# -- trainings ----------------------------------------------------------------------------


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_training_from_a_stream_is_training_from_memory(guided, engine, augmentation, loaders):
    # Catches any difference in losses, weights, record or cost: whoever moves a dataset to
    # disk would get other results.
    changes = {"training.augmentation": AUGMENTATIONS[augmentation], "training.epochs": 2}
    job = guided(changes, epochs=2)
    held = facts_of(train(job, engine, None, Watch()))
    assert facts_of(train(as_streamed(job), engine_with(loaders), None, Watch())) == held


@pytest.mark.parametrize(
    "changes",
    [
        {"training.accumulate": 2},
        {"arms.all.mixup_until": 2},
        {"arms.all.same_lam": 20, "arms.all.forward": "separate"},
        {"model": {"name": "mlp", "hidden": [16], "dropout": 0.3}},
    ],
    ids=str,
)
def test_other_trainings_from_a_stream_are_the_same_too(guided, engine, changes):
    # Catches a loader that draws random numbers in the middle of a step, or that reads
    # micro-batches as if they were batches.
    job = guided(changes)
    held = facts_of(train(job, engine, None, Watch()))
    assert facts_of(train(as_streamed(job, pieces=3), engine_with(0), None, Watch())) == held


def test_refilled_mixes_are_read_from_the_stream_as_they_are_drawn(guided, scorer, engine):
    # Catches refill that trains on the planned partners because those were read ahead.
    guidance = Guidance(filter_policies.negative, scorer=scorer, num_teachers=1, refill_draws=3)
    job = replace(guided(), guidance=guidance, excluded="refill")
    held = facts_of(train(job, engine, None, Watch()))
    assert facts_of(train(as_streamed(job), engine_with(0), None, Watch())) == held


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_stream_stopped_in_mid_epoch_goes_on_to_the_same_weights(
    guided, engine, tmp_path, loaders
):
    # Catches a loader whose place in the epoch is lost, or that starts the epoch again.
    changes = {"training.augmentation": AUGMENTATIONS["crop_flip"]}
    job = guided(changes, epochs=2)
    held = facts_of(train(job, engine, None, Watch()))
    for poll in (1, 2, 4, 5):  # of 2 epochs of 3 steps
        asked = iter(range(1, 100))
        watch = Watch(should_stop=lambda asked=asked, poll=poll: next(asked) >= poll)
        checkpoints = Checkpoints(tmp_path / f"{poll}", "made from this")
        reading = replace(as_streamed(job), folder=tmp_path / f"record {poll}")
        with pytest.raises(Interrupted):
            train(reading, engine_with(loaders), checkpoints, watch)
        resumed = train(reading, engine_with(loaders), checkpoints, Watch())
        assert facts_of(resumed) == held, f"after step {poll}"


@pytest.mark.parametrize(("changes", "images"), [({"arms.all.alpha": 0}, 1), ({}, 2)])
def test_a_training_decodes_no_more_than_it_trains_on(make_job, changes, images):
    # Catches images that are decoded for every micro-batch or for the scores again.
    changes = {**changes, "training.accumulate": 2, "training.evaluate_every": 4}
    job = as_streamed(make_job(changes))
    train(job, engine_with(0), None, Watch())
    # 4 epochs of 60 rows, and once more for the accuracy on train at the end.
    assert asked_of(job.part).total() == 60 * (4 * images + 1)


def test_a_bank_of_streamed_images_is_that_of_images_in_memory(tiny_recipe, engine, tmp_path):
    # Catches parents that a stream hands to the teacher in another order than the plan's.
    changes = {"scores.bank": True, "training.augmentation": AUGMENTATIONS["crop_flip"]}
    banks, recipe = [], tiny_recipe(changes)
    for name in ("held", "read"):
        cell = Cell(recipe, "main", 0, replace(engine, loaders=2))
        if name == "read":
            parts = {part: streamed(getattr(cell.splits, part)) for part in ("train", "val_f")}
            cell.__dict__["splits"] = replace(cell.splits, **parts)
        CellRun(cell, Store(tmp_path / name)).student("guided")
        (path,) = (tmp_path / name).rglob("bank.npy")
        banks.append(path.read_bytes())
    assert banks[0] == banks[1]


# -- parts --------------------------------------------------------------------------------

IMAGES = torch.arange(12 * 6, dtype=torch.uint8).view(12, 1, 2, 3)
LABELS, IDS = torch.arange(12) % 3, torch.arange(100, 112)
positions = st.lists(st.integers(0, 11), min_size=1, max_size=8)


def both_parts():
    return Part(IMAGES, LABELS, IDS), streamed(Part(IMAGES, LABELS, IDS), pieces=3)


@settings(deadline=None)
@given(st.lists(positions, min_size=1, max_size=3), positions, st.sets(st.integers(95, 115)))
def test_streamed_parts_take_and_join_as_tensors_do(taken, again, wanted):
    # Catches places that point into another decoder after a join of parts that share some.
    held, read = both_parts()
    joins = [Part.join([part.take(np.array(one)) for one in taken]) for part in (held, read)]
    chosen = np.array([place % len(joins[0]) for place in again])
    held, read = (Part.join([joined, joined.take(chosen)]) for joined in joins)
    ids = torch.tensor(sorted(wanted), dtype=torch.int64)
    for one, other in ((held, read), (held.with_ids(ids), read.with_ids(ids))):
        assert tuple(other.images.shape) == tuple(one.images.shape)
        assert torch.equal(one.labels, other.labels) and torch.equal(one.ids, other.ids)
        if len(one):
            every = torch.arange(len(one))
            assert torch.equal(other.images[every], one.images)
            assert torch.equal(other.images[every.numpy()], one.images)
    assert len(read.images.decoders) <= 3  # each once, however often parts are joined


def test_the_fingerprint_of_a_stream_sees_content_places_labels_and_ids():
    # Catches artifacts that are used again for other images, because a stream was named by
    # its size only.
    part = both_parts()[1]
    brighter = Part(IMAGES + 1, LABELS, IDS)
    images = part.images
    others = {
        "content": streamed(brighter, pieces=3),
        "places": replace(part, images=images.take(np.arange(12)[::-1].copy())),
        "decoders": replace(part, images=replace(images, decoders=images.decoders[::-1])),
        "labels": replace(part, labels=(LABELS + 1) % 3),
        "ids": replace(part, ids=IDS + 1),
        "fewer": part.take(np.arange(11)),
    }
    assert both_parts()[1].fingerprint == part.fingerprint
    found = {name: other.fingerprint for name, other in others.items()}
    assert len({part.fingerprint, *found.values()}) == 1 + len(others), found


def test_parts_in_memory_and_on_disk_do_not_join():
    # Catches a pool that silently leaves out the samples of one kind.
    with pytest.raises(AssertionError, match="do not join"):
        Part.join(both_parts())


def test_decoders_are_told_apart_without_comparing_them(splits):
    parts = [streamed(splits.train), streamed(splits.val_f)]
    joined = Part.join([*parts, parts[0]])
    assert len(joined.images.decoders) == 4  # two of each part, the first part's once
    every = torch.cat([splits.train.images, splits.val_f.images, splits.train.images])
    assert torch.equal(joined.images[torch.arange(len(joined))], every)


def test_no_positions_are_no_images(splits):
    nothing = streamed(splits.train).images[torch.arange(0)]
    assert nothing.shape == (0, *splits.train.images.shape[1:]) and nothing.dtype == torch.uint8


class Broken(Held):
    """A decoder with a file that can't be read."""

    def __call__(self, place):
        if place == 7:
            raise UserError("pets/cat/7.jpg: damaged or incomplete; delete it and get it again")
        return super().__call__(place)


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_damaged_file_is_one_line_from_a_loader_too(splits, loaders):
    # torch wraps what a worker raises into its traceback.
    images = StreamedImages.of(Broken(splits.train.images), 60)
    part = Part(images, splits.train.labels, splits.train.ids)
    maker = RowMaker.of(part, splits, torch.device("cpu"), loaders)
    plan = draw_plan(seed=0, epoch=0, alpha=1.0, num_samples=60)
    plans = [plan.keep(slice(at, at + 20)) for at in (0, 20, 40)]
    with pytest.raises(UserError, match=r"^pets/cat/7.jpg: damaged[^\n]*again$"):
        list(feed(maker, plans, None))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch spawns loaders in any case")
def test_loaders_are_forked_also_where_processes_are_spawned(monkeypatch):
    # Spawned, each loads all libraries anew, at every epoch; a run's workers are spawned.
    from mixval import feeding

    monkeypatch.setattr("torch.multiprocessing.get_start_method", lambda *_: "spawn")
    maker = SimpleNamespace(loaders=2, mean=torch.zeros(1))
    reader = feeding._reader(maker, None, [np.arange(3)])
    assert reader.multiprocessing_context.get_start_method() == "fork"
    assert reader.num_workers == 1
    assert feeding._reader(SimpleNamespace(loaders=0, mean=torch.zeros(1)), None, []) is not None
