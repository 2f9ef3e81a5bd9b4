"""Scores beside r_hat against loops, autograd sample by sample, and their own laws."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mixval.engine import Engine
from mixval.losses import cross_entropy
from mixval.mixing import mixed_targets
from mixval.models import conv_net, mlp
from mixval.rhat import draw_losses, score
from mixval.sample_scores import (
    ROW_SCORES,
    beside,
    el2n,
    entropy,
    forgetting,
    grand,
    grand_bytes,
    grand_chunk,
    grand_last_layer,
    margin,
)

quick = settings(deadline=None, derandomize=True, max_examples=50)
CLASSES = 4
sizes = (st.integers(1, 5), st.integers(1, 6), st.integers(0, 999))  # draws, rows, seed


def toy_draws(draws: int, rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    logits = np.random.default_rng([seed, draws]).standard_normal((draws, rows, CLASSES))
    return torch.from_numpy(scale * logits).log_softmax(-1)


def toy_targets(rows: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng([seed, 3])
    label_i, label_j = torch.from_numpy(rng.integers(0, CLASSES, (2, rows)))
    return mixed_targets(label_i, label_j, torch.from_numpy(rng.random(rows)), CLASSES)


def one_hot(labels) -> torch.Tensor:
    return torch.eye(CLASSES, dtype=torch.float64)[torch.as_tensor(labels)]


def warmed(network: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Return the network in double precision, its BatchNorm statistics off their defaults."""
    network = network.double().train()
    for seed in range(3):
        network(1 + 2 * toy_inputs(8, shape, seed + 50))
    return network


def toy_inputs(rows: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([seed, 7]).standard_normal((rows, *shape)))


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    image, square = (1, 3, 3), (2, 6, 6)
    return {
        "mlp": (warmed(mlp(image, CLASSES, hidden=[7, 5], dropout=0.5), image), image),
        "conv_net": (warmed(conv_net(square, CLASSES, width=3), square), square),
    }


def loop_gradient_norms(network: nn.Module, inputs, targets, parameters) -> torch.Tensor:
    """Return the norm of each sample's gradient with a backward pass for each sample."""
    parameters, norms = list(parameters), []
    for row, target in zip(inputs, targets, strict=True):
        log_probs = network(row[None]).log_softmax(-1)
        gradients = torch.autograd.grad(-(target * log_probs).sum(), parameters)
        norms.append(math.sqrt(sum(float((g**2).sum()) for g in gradients)))
    return torch.tensor(norms, dtype=torch.float64)


# -- EL2N ---------------------------------------------------------------------------------


@quick
@given(*sizes)
def test_el2n_is_the_loop_over_runs_and_rows(runs, rows, seed):
    log_probs, targets = toy_draws(runs, rows, seed), toy_targets(rows, seed)
    expected = np.zeros(rows)
    for run in log_probs.tolist():
        for b, wanted in enumerate(targets.tolist()):
            squares = [(math.exp(lp) - y) ** 2 for lp, y in zip(run[b], wanted, strict=True)]
            expected[b] += math.sqrt(sum(squares)) / runs
    np.testing.assert_allclose(el2n(log_probs, targets).numpy(), expected, rtol=1e-10)


@quick
@given(*sizes, st.floats(0, 500))
def test_el2n_lies_between_zero_and_the_diagonal(runs, rows, seed, scale):
    got = el2n(toy_draws(runs, rows, seed, scale), toy_targets(rows, seed))
    assert (got >= 0).all() and (got <= math.sqrt(2) + 1e-12).all()


@quick
@given(st.integers(1, 6), st.integers(0, 999))
def test_el2n_is_zero_only_where_the_prediction_is_the_target(rows, seed):
    probs = toy_draws(1, rows, seed)
    np.testing.assert_allclose(el2n(probs, probs[0].exp()).numpy(), 0, atol=1e-15)
    other = toy_draws(1, rows, seed + 1000)[0].exp()
    assert (el2n(probs, other) > 1e-6).all()


def test_el2n_takes_probabilities_of_exactly_zero_and_one():
    log_probs = one_hot([0, 1]).log()[None]  # with log 0
    np.testing.assert_allclose(el2n(log_probs, one_hot([0, 2])).numpy(), [0, math.sqrt(2)])


def test_the_expectation_is_of_the_score_and_not_the_score_of_the_mean():
    # Two draws that are sure of different classes: the mean prediction is unsure.
    log_probs = torch.tensor([[[0.98, 0.01, 0.01]], [[0.01, 0.98, 0.01]]]).double().log()
    targets = torch.tensor([[0.5, 0.5, 0.0]]).double()
    mean = log_probs.exp().mean(0, keepdim=True).log()
    assert el2n(log_probs, targets) > 50 * el2n(mean, targets)
    assert entropy(mean) > 5 * entropy(log_probs)
    got = beside(log_probs, mean, targets, *torch.zeros(2, 1), loss=cross_entropy)
    assert got["entropy"] == entropy(log_probs) and got["teacher_entropy"] == entropy(mean)


# -- margin and entropy -------------------------------------------------------------------


@quick
@given(*sizes)
def test_margin_and_entropy_are_loops(draws, rows, seed):
    log_probs, targets = toy_draws(draws, rows, seed), toy_targets(rows, seed)
    margins, entropies = np.zeros(rows), np.zeros(rows)
    for draw in log_probs.numpy():
        for b in range(rows):
            labelled = int(np.argmax(targets[b].numpy()))
            margins[b] += (draw[b, labelled] - np.delete(draw[b], labelled).max()) / draws
            entropies[b] -= sum(math.exp(lp) * lp for lp in draw[b]) / draws
    np.testing.assert_allclose(margin(log_probs, targets).numpy(), margins, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(entropy(log_probs).numpy(), entropies, rtol=1e-9)


@quick
@given(st.integers(1, 20), st.integers(0, 999))
def test_the_sign_of_the_margin_is_correctness(rows, seed):
    log_probs, targets = toy_draws(1, rows, seed), toy_targets(rows, seed)
    correct = log_probs[0].argmax(-1) == targets.argmax(-1)
    assert torch.equal(margin(log_probs, targets) > 0, correct)


def test_of_equal_shares_the_margin_is_that_of_the_lower_class_in_either_order():
    log_probs = torch.tensor([[[0.1, 0.6, 0.1, 0.2]]]).double().log()
    half, one, three = torch.tensor([0.5]).double(), torch.tensor([1]), torch.tensor([3])
    for pair in ((one, three), (three, one)):
        got = margin(log_probs, mixed_targets(*pair, half, CLASSES))
        assert got.item() == pytest.approx(math.log(0.6 / 0.2))


@quick
@given(*sizes, st.floats(0, 500))
def test_entropy_lies_between_zero_and_that_of_the_uniform(draws, rows, seed, scale):
    got = entropy(toy_draws(draws, rows, seed, scale))
    assert (got >= 0).all() and (got <= math.log(CLASSES) + 1e-12).all()


def test_entropy_at_its_ends():
    assert entropy(one_hot([2]).log()[None]).item() == 0  # with log 0
    uniform = torch.full((1, 1, CLASSES), -math.log(CLASSES), dtype=torch.float64)
    assert entropy(uniform).item() == pytest.approx(math.log(CLASSES))


# -- beside r_hat -------------------------------------------------------------------------


@quick
@given(st.integers(1, 4), *sizes)
def test_rho_is_minus_r_hat_and_the_loss_is_its_base_term(teachers, draws, rows, seed):
    student, teacher = toy_draws(draws, rows, seed), toy_draws(teachers, rows, seed + 1000)
    targets, parents = toy_targets(rows, seed), torch.rand(2, rows, generator=generator(seed))
    got = beside(student, teacher, targets, *parents, loss=cross_entropy)
    scored = score(*(draw_losses(d, targets, cross_entropy) for d in (teacher, student)))
    assert torch.equal(got["rho"], -scored.r_hat)
    # And with the formula, number by number.
    losses = [[-(targets * d).sum(-1) for d in posterior] for posterior in (student, teacher)]
    own, known = (torch.stack(of_draws).mean(0) for of_draws in losses)
    torch.testing.assert_close(got["loss"], own)
    torch.testing.assert_close(got["rho"], own - known)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_row_has_all_scores_by_name():
    student, teacher, targets = toy_draws(2, 3), toy_draws(1, 3, 9), toy_targets(3)
    first, second = torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0.7, 0.2, 0.5])
    got = beside(student, teacher, targets, first, second, loss=cross_entropy)
    assert tuple(got) == ROW_SCORES == tuple(dict.fromkeys(ROW_SCORES))
    assert all(column.shape == (3,) for column in got.values())
    assert torch.equal(got["el2n_higher"], torch.tensor([0.7, 0.9, 0.5]))
    assert torch.equal(got["el2n_lower"], torch.tensor([0.1, 0.2, 0.5]))
    assert torch.equal(got["el2n"], el2n(student, targets))
    assert torch.equal(got["margin"], margin(student, targets))
    assert torch.equal(got["entropy"], entropy(student))
    assert torch.equal(got["teacher_entropy"], entropy(teacher))


def test_rows_are_scored_with_the_loss_that_is_given():
    student, teacher, targets = toy_draws(2, 3), toy_draws(1, 3, 9), toy_targets(3)

    def doubled(logits, targets):
        return 2 * cross_entropy(logits, targets)

    once, twice = (
        beside(student, teacher, targets, *torch.zeros(2, 3), loss=loss)
        for loss in (cross_entropy, doubled)
    )
    torch.testing.assert_close(twice["rho"], 2 * once["rho"])
    torch.testing.assert_close(twice["loss"], 2 * once["loss"])


# -- GraNd --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("chunk", [1, 3, 5, 8])
def test_grand_is_a_backward_pass_for_each_sample(name, chunk):
    network, shape = networks()[name]
    inputs, targets = toy_inputs(5, shape), toy_targets(5)
    got = grand(network, inputs, targets, loss=cross_entropy, chunk=chunk)
    network.eval()  # not before: grand is in eval mode whatever the caller's mode
    expected = loop_gradient_norms(network, inputs, targets, network.parameters())
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", networks())
def test_grand_leaves_the_callers_network_as_it_was(name):
    network, shape = networks()[name]
    network[0].eval()  # modes need not agree
    modes = [module.training for module in network.modules()]
    before = {key: value.clone() for key, value in network.state_dict().items()}
    got = grand(network, toy_inputs(4, shape), toy_targets(4), loss=cross_entropy, chunk=2)
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in network.parameters())
    assert not got.requires_grad


def test_grand_counts_trainable_parameters_only():
    network, shape = networks()["mlp"]
    for layer in network[:-1]:
        layer.requires_grad_(False)
    inputs, targets = toy_inputs(5, shape), toy_targets(5)
    got = grand(network, inputs, targets, loss=cross_entropy, chunk=2)
    network.eval()
    expected = loop_gradient_norms(network, inputs, targets, network[-1].parameters())
    torch.testing.assert_close(got, expected)
    assert grand_bytes(network, 3) == 3 * 8 * (5 * CLASSES + CLASSES)
    with pytest.raises(ValueError, match="trainable"):
        grand(network.requires_grad_(False), inputs, targets, loss=cross_entropy, chunk=2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_grand_sees_the_network_that_an_engine_prepared(precision):
    network, shape = networks()["conv_net"]
    network.float()
    rows = toy_inputs(4, shape).float(), toy_targets(4).float()
    plain = grand(network, *rows, loss=cross_entropy, chunk=4)
    engine = Engine(torch.device("cpu"), threads=1, precision=precision, channels_last=True)
    prepared = engine.prepare(network)
    torch.testing.assert_close(grand(prepared, *rows, loss=cross_entropy, chunk=4), plain)
    assert grand_bytes(prepared, 4) == grand_bytes(network, 4)


def test_the_last_layers_part_is_its_own_gradient_and_bounds_grand():
    for network, shape in networks().values():
        network.eval()
        inputs, targets = toy_inputs(6, shape), toy_targets(6)
        features = network[:-1](inputs).detach()
        log_probs = network[-1](features).log_softmax(-1).detach()
        got = grand_last_layer(features, log_probs, targets)
        expected = loop_gradient_norms(network, inputs, targets, network[-1].parameters())
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
        whole = grand(network, inputs, targets, loss=cross_entropy, chunk=6)
        assert (got < whole).all()


def test_a_linear_network_is_its_last_layer():
    network = nn.Sequential(nn.Flatten(), nn.Linear(9, CLASSES)).double()
    inputs, targets = toy_inputs(6, (1, 3, 3)), toy_targets(6)
    log_probs = network(inputs).log_softmax(-1).detach()
    got = grand_last_layer(inputs.flatten(1), log_probs, targets)
    whole = grand(network, inputs, targets, loss=cross_entropy, chunk=6)
    torch.testing.assert_close(got, whole, rtol=1e-9, atol=1e-12)


# -- GraNd: its memory --------------------------------------------------------------------


def peak_bytes(work) -> int:
    """Return the most bytes that torch held at once of what it allocated during `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = work()
    held = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert kept is not None
    return peak


def test_the_measurement_of_memory_can_fail():
    # The control of the next test: two blocks at once, then one after the other.
    million = 1 << 20

    def together():
        return torch.empty(million), torch.empty(million)

    def in_turns():
        torch.empty(million)
        return torch.empty(million)

    assert peak_bytes(together) == pytest.approx(8 * million, rel=0.01)
    assert peak_bytes(in_turns) == pytest.approx(4 * million, rel=0.01)


@pytest.mark.parametrize("chunk", [2, 8])
def test_the_gradients_of_a_chunk_are_all_that_is_held(chunk):
    # Wide and flat: its weights are large and its activations are nothing.
    torch.manual_seed(0)
    network = mlp((1, 16, 16), CLASSES, hidden=[256, 256])
    weights = sum(weight.numel() for weight in network.parameters())
    bound = grand_bytes(network, chunk)
    assert bound == 4 * weights * chunk
    rows = toy_inputs(24, (1, 16, 16)).float(), toy_targets(24).float()
    peak = peak_bytes(lambda: grand(network, *rows, loss=cross_entropy, chunk=chunk))
    copied = 4 * weights
    assert bound <= peak <= bound + copied + 0.05 * bound


@quick
@given(st.integers(1, 50), st.integers(0, 10**6))
def test_the_chunk_is_the_largest_that_fits(chunk, spare):
    network = mlp((1, 3, 3), CLASSES, hidden=[7])
    row = grand_bytes(network, 1)
    limit = grand_bytes(network, chunk) + spare % row
    assert grand_chunk(network, limit) == chunk


def test_a_limit_below_one_gradient_is_refused():
    network = mlp((1, 3, 3), CLASSES, hidden=[7])
    row = grand_bytes(network, 1)
    with pytest.raises(ValueError, match=rf"limit_bytes .* {row} bytes, got {row - 1}"):
        grand_chunk(network, row - 1)


# -- forgetting ---------------------------------------------------------------------------

histories = st.integers(1, 9).flatmap(
    lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=12)
)


@quick
@given(histories)
def test_forgetting_is_the_loop_over_presentations(history):
    correct = np.array(history)  # (E, N)
    expected = np.zeros(correct.shape[1])
    for sample, seen in enumerate(correct.T):
        for before, after in itertools.pairwise(seen):
            expected[sample] += before and not after
        if not seen.any():
            expected[sample] = np.inf
    got = forgetting(torch.from_numpy(correct))
    np.testing.assert_array_equal(got.numpy(), expected)
    finite = got[got.isfinite()]
    assert (finite <= len(correct) // 2).all()


def test_forgetting_of_known_histories():
    marks = ["1111", "0000", "0001", "1010", "1100", "0110", "1000"]
    correct = torch.tensor([[mark == "1" for mark in history] for history in marks]).T
    assert forgetting(correct).tolist() == [0, math.inf, 0, 2, 1, 1, 1]


# -- what is refused ----------------------------------------------------------------------


def broken(log_probs: torch.Tensor) -> torch.Tensor:
    log_probs[-1, -1, 0] = torch.nan
    return log_probs


@pytest.mark.parametrize(
    ("name", "scored"),
    [
        ("EL2N", lambda bad, good, y: el2n(bad, y)),
        ("margin", lambda bad, good, y: margin(bad, y)),
        ("entropy", lambda bad, good, y: entropy(bad)),
        ("r_hat", lambda bad, good, y: beside(bad, good, y, *torch.ones(2, 3), loss=cross_entropy)),
        ("r_hat", lambda bad, good, y: beside(good, bad, y, *torch.ones(2, 3), loss=cross_entropy)),
        ("EL2N", lambda bad, good, y: grand_last_layer(torch.ones(3, 2), bad[-1], y)),
        ("last layer", lambda bad, good, y: grand_last_layer(bad[-1], good[-1], y)),
        (
            "of a parent",
            lambda bad, good, y: beside(
                good, good, y, torch.ones(3), bad[-1, :, 0], loss=cross_entropy
            ),
        ),
    ],
)
def test_a_nan_is_named_and_refused(name, scored):
    with pytest.raises(FloatingPointError, match=rf"{name}.* not finite"):
        scored(broken(toy_draws(2, 3)), toy_draws(2, 3), toy_targets(3))


def test_grand_refuses_a_network_that_gives_nan():
    network, shape = networks()["mlp"]
    nn.init.constant_(network[-1].bias, torch.nan)
    with pytest.raises(FloatingPointError, match="GraNd is not finite"):
        grand(network, toy_inputs(2, shape), toy_targets(2), loss=cross_entropy, chunk=2)


@pytest.mark.parametrize("scored", [el2n, margin])
def test_shapes_that_would_broadcast_are_refused(scored):
    log_probs, targets = toy_draws(1, 3), toy_targets(3)
    for wrong in (
        (log_probs[0], targets),
        (log_probs[0], targets[0]),
        (log_probs, targets[:1]),
        (log_probs, targets[:, 0]),
    ):
        with pytest.raises(ValueError, match=r"\(draws, rows, classes\)"):
            scored(*wrong)


def test_networks_that_saw_other_rows_are_refused():
    draws, targets, parents = toy_draws(1, 3), toy_targets(3), torch.ones(2, 3)
    for student, teacher in ((draws[:, :1], draws), (draws, draws[:, :1]), (draws, draws[0])):
        with pytest.raises(ValueError, match=r"\(draws, rows, classes\)"):
            beside(student, teacher, targets, *parents, loss=cross_entropy)


def test_parents_of_other_rows_are_refused():
    draws, targets = toy_draws(1, 3), toy_targets(3)
    for first, second in ((1, 3), (3, 1)):
        with pytest.raises(ValueError, match=r"parents must be \(3,\)"):
            beside(draws, draws, targets, torch.ones(first), torch.ones(second), loss=cross_entropy)
