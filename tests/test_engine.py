"""Precision, layout, compilation: float32 comes out, plain weights are saved, bits are pinned."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import yaml

from mixval import filter_policies
from mixval.checkpoints import Checkpoints
from mixval.engine import Engine, start_engine
from mixval.errors import Interrupted
from mixval.guidance import Guidance
from mixval.models import conv_net, mlp
from mixval.recipe import EngineSettings
from mixval.store import Store
from mixval.training import Watch, train

SHAPE, CLASSES = (3, 8, 8), 10
FAST = {"precision": "bf16", "channels_last": True}


def engine_with(**settings):
    return start_engine(EngineSettings(device="cpu", **settings))


def network():
    torch.manual_seed(0)
    return conv_net(SHAPE, CLASSES, width=4)


def inputs(rows=6):
    return torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(1))


def outputs_of(model):
    with torch.no_grad():
        return model.eval()(inputs())


# -- Prepared -----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, FAST, {"precision": "bf16"}, {"channels_last": True}])
def test_float32_comes_out_and_into_the_gradients(settings):
    # Catches log-probabilities in bfloat16, in which r_hat of near posteriors has no sign.
    model = engine_with(**settings).prepare(network())
    logits = model(inputs())
    assert logits.dtype == torch.float32
    logits.sum().backward()
    parameters = list(model.network.parameters())
    assert {p.dtype for p in parameters} == {p.grad.dtype for p in parameters} == {torch.float32}


@pytest.mark.parametrize("settings", [{}, FAST])
def test_the_weights_have_the_names_of_the_plain_network(settings):
    # Catches weights that nobody else can load because of how they were trained.
    torch.manual_seed(3)
    model = engine_with(**settings).prepare(conv_net(SHAPE, CLASSES, width=4))
    plain = network()
    assert list(model.network.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.network.state_dict())
    torch.testing.assert_close(outputs_of(plain), outputs_of(model), rtol=0.05, atol=0.01)


@pytest.mark.parametrize("settings", [{}, FAST])
def test_training_a_copy_leaves_the_original_alone(settings):
    # Catches a frozen teacher that runs the weights of the network it was copied from.
    model = engine_with(**settings).prepare(network()).eval()
    before = outputs_of(model)
    twin = copy.deepcopy(model)
    assert not twin.training and torch.equal(outputs_of(twin), before)
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.5)
    twin.train()(inputs()).square().sum().backward()
    optimiser.step()
    assert torch.equal(outputs_of(model), before)
    assert not torch.equal(outputs_of(twin), before)
    assert all(p.grad is None for p in model.parameters())
    assert copy.deepcopy(twin.train()).training
    theirs = {p.data_ptr() for p in twin.network.parameters()}
    assert theirs.isdisjoint(p.data_ptr() for p in model.network.parameters())


def test_bf16_differs_from_fp32_by_little_and_not_by_nothing():
    # Catches a precision that is accepted and not used, or that also rounds the weights.
    exact, rounded = (
        outputs_of(engine_with(precision=name).prepare(network())) for name in ("fp32", "bf16")
    )
    error = (exact - rounded).abs().max() / exact.abs().max()
    assert 1e-5 < error < 0.05
    assert torch.equal(exact, outputs_of(network()))


def test_channels_last_is_a_layout_and_changes_no_result():
    # Catches inputs that are permuted instead of laid out anew, and weights left as they were.
    model = engine_with(channels_last=True).prepare(network())
    torch.testing.assert_close(outputs_of(model), outputs_of(network()), rtol=1e-4, atol=1e-5)
    kernel = model.network[3].weight  # of 8 channels by 4; one by one a layout has no meaning
    assert kernel.is_contiguous(memory_format=torch.channels_last) and not kernel.is_contiguous()
    seen = []
    model.network.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    outputs_of(model)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    twin = copy.deepcopy(model).network[3].weight
    assert twin.is_contiguous(memory_format=torch.channels_last)


def test_what_is_no_image_needs_no_layout():
    # Catches a network on features that can't be laid out by channels.
    model = engine_with(channels_last=True).prepare(torch.nn.Linear(4, 2))
    assert model(torch.ones(3, 4)).shape == (3, 2)


@pytest.mark.slow
def test_a_compiled_network_computes_the_same_and_its_weights_are_one_set():
    # Catches a compiled network that is registered as a second one, keeps the weights it was
    # compiled with, or is copied together with its original.
    torch.manual_seed(0)
    plain = mlp((1, 2, 2), 3, hidden=[4])
    model = engine_with(compile=True).prepare(copy.deepcopy(plain))
    rows = torch.randn(5, 1, 2, 2)
    assert list(model.network.state_dict()) == list(plain.state_dict())
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    twin = copy.deepcopy(model)
    for _ in range(2):
        for m, optimiser in zip((plain, model), optimisers, strict=True):
            optimiser.zero_grad()
            m(rows).square().sum().backward()
            optimiser.step()
        torch.testing.assert_close(model(rows), plain(rows))
    assert not torch.allclose(twin(rows), plain(rows))


# -- whole trainings ----------------------------------------------------------------------


def facts_of(trained):
    return {
        "weights": {k: v.numpy().tobytes() for k, v in trained.model.network.state_dict().items()},
        "record": trained.record.mixed.numpy().tobytes(),
        "metrics": trained.metrics,
    }


def test_a_fast_training_resumes_bit_for_bit(make_job, scorer, tmp_path):
    # Catches a checkpoint that rounds weights to bfloat16 or loses their layout.
    guidance = Guidance(filter_policies.negative, scorer=scorer, num_teachers=1)
    job = make_job({"model": {"name": "conv_net", "width": 4}}, guidance=guidance, epochs=2)
    engine = engine_with(**FAST)
    whole = facts_of(train(job, engine, None, Watch()))
    exact = facts_of(train(job, engine_with(), None, Watch()))
    assert whole["weights"] != exact["weights"]
    assert whole["metrics"][-1]["loss"] == pytest.approx(exact["metrics"][-1]["loss"], rel=0.05)
    for poll in range(1, 6):
        asked = iter(range(1, 100))
        watch = Watch(should_stop=lambda asked=asked, poll=poll: next(asked) >= poll)
        checkpoints = Checkpoints(tmp_path / f"{poll}", "made from this")
        stored = replace(job, folder=tmp_path / f"record {poll}")
        with pytest.raises(Interrupted):
            train(stored, engine, checkpoints, watch)
        assert facts_of(train(stored, engine, checkpoints, Watch())) == whole, f"step {poll}"


# -- what is recorded ---------------------------------------------------------------------


def test_all_that_changes_bits_is_described_and_what_does_not_is_not():
    # Catches results of two precisions in one mean, and a run that can't go on with more loaders.
    plain = engine_with().described
    changed = {
        "precision": engine_with(precision="bf16"),
        "channels_last": engine_with(channels_last=True),
        "compile": engine_with(compile=True),
        "threads": engine_with(threads=2),
    }
    for name, engine in changed.items():
        found = engine.described
        assert found != plain
        assert {key for key in plain if found[key] != plain[key]} == {name}
    assert engine_with(loaders=7).described == plain
    assert json.loads(json.dumps(plain)) == plain
    assert Engine(torch.device("cpu"), 1).described == plain


def test_a_run_directory_refuses_another_precision_in_a_line(
    mixval, tiny_description, tiny_recipe, tmp_path
):
    # Catches networks of two precisions side by side in one table.
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_description()))
    store = Store(tmp_path / "run")
    store.bind(tiny_recipe({"engine.precision": "bf16"}))
    done = mixval("run", "tiny.yaml", "--out", "run")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "run" in line and "engine.precision" in line and "another --out" in line
    store.check(tiny_recipe({"engine.precision": "bf16", "engine.loaders": 7}))
