"""Every fit against what it should do to F, and each one's maths against another derivation."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from mixval import choose, last_layer
from mixval.errors import UserError
from mixval.fitting import Known, states, walk, with_parameters
from mixval.losses import cross_entropy
from mixval.posterior_fits import gaussian, laplace, mc_dropout, snapshot, swag, whole_laplace
from mixval.posteriors import Fitted, dropout
from mixval.rhat import draw_losses, score

CLASSES, WIDTH, SAMPLES, FAILURES, STEPS = 3, 4, 60, 8, 3
SMALL = {  # so that a fit takes no time
    "deep_ensemble": {"members": 3},
    "snapshot": {"cycles": 2, "cycle_epochs": 2},
    "swag": {"epochs": 4, "draws": 6},
    "laplace": {"draws": 6},
    "mc_dropout": {"draws": 6},
}
NAMES = list(choose.options("posterior_fits"))


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around three centres, and which one."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    centres = 2 * np.eye(CLASSES, WIDTH)
    points = centres[labels] + rng.standard_normal((count, WIDTH))
    return torch.from_numpy(points).float(), torch.from_numpy(labels)


def network(hidden: int | None = 8, plain: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if plain:
        return nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    if hidden is None:
        return nn.Sequential(nn.Linear(WIDTH, CLASSES))
    return nn.Sequential(
        nn.Linear(WIDTH, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(hidden, CLASSES),
    )


def trained(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> nn.Module:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    for _ in range(100):
        optimiser.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        optimiser.step()
    optimiser.zero_grad()
    return model.eval()


def known(hidden: int | None = 8, seed: int = 0, plain: bool = False) -> Known:
    data, failing = rows(SAMPLES, 1), rows(FAILURES, 2)
    failing = failing[0], (failing[1] + 1) % CLASSES  # labels that the network did not learn
    pools = {
        "train": data,
        "train+failures": tuple(map(torch.cat, zip(data, failing, strict=True))),
    }

    def shuffled(part, epoch):
        order = np.random.default_rng([seed, epoch]).permutation(len(part[1]))
        pieces = map(torch.from_numpy, np.array_split(order, STEPS))
        return [(part[0][piece], part[1][piece]) for piece in pieces]

    def batches(pool, epoch):
        parts = [data] if pool == "train" else [data, failing]
        for found in zip(*(shuffled(part, epoch) for part in parts), strict=True):
            yield tuple(map(torch.cat, zip(*found, strict=True)))

    def learn(pool, member):
        torch.manual_seed(member)
        fresh = network(hidden)
        for part in fresh.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        return trained(fresh, pools[pool])

    return Known(
        model=trained(network(hidden, plain), data),
        failures=failing,
        num_samples=SAMPLES,
        rows=lambda: zip(data[0].split(25), data[1].split(25), strict=True),
        batches=batches,
        steps=STEPS,
        learn=learn,
        weight_decay=1e-3,
        seed=seed,
    )


def fitted_by(name: str, facts: Known, **more: object) -> Fitted:
    return choose.pick("posterior_fits", name, {**SMALL.get(name, {}), **more})(facts)


def mean_loss(posterior, batch) -> float:
    inputs, labels = batch
    targets = F.one_hot(labels, CLASSES).float()
    return float(draw_losses(posterior(inputs), targets, cross_entropy).mean())


# -- what every fit must keep -------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_fit_makes_the_failures_more_likely(name):
    facts = known()
    before, after = fitted_by(name, facts).posteriors(facts.model, 0)
    assert mean_loss(after, facts.failures) < mean_loss(before, facts.failures)


@pytest.mark.parametrize("name", NAMES)
def test_every_fit_gives_the_draws_it_says_and_leaves_the_network_as_it_was(name):
    facts = known()
    weights = copy.deepcopy(facts.model.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fitted = fitted_by(name, facts)
    for posterior in fitted.posteriors(facts.model, 0):
        log_probs = posterior(facts.failures[0])
        assert log_probs.shape == (fitted.draws, FAILURES, CLASSES)
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(fitted.draws, FAILURES))
    assert not facts.model.training
    for key, tensor in facts.model.state_dict().items():
        assert torch.equal(tensor, weights[key]), key
    if name != "deep_ensemble":  # whose training is the stage's, seeded there
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_fit_is_a_function_of_the_seed_and_survives_saving(name, tmp_path):
    from mixval.checkpoints import load_weights, save_weights
    from mixval.files import weight_facts

    facts, path = known(), tmp_path / "draws.safetensors"
    save_weights(path, *fitted_by(name, facts).to_tensors())
    read = Fitted.from_tensors(load_weights(path), weight_facts(path))
    again = fitted_by(name, known())
    inputs = rows(7, 3)[0]
    for one, other in zip(
        read.posteriors(facts.model, 0), again.posteriors(facts.model, 0), strict=True
    ):
        assert torch.equal(one(inputs), other(inputs))


@pytest.mark.parametrize("name", ["laplace", "mc_dropout", "swag"])
def test_common_random_numbers_make_the_error_of_the_difference_smaller(name):
    facts = known()
    before, after = fitted_by(name, facts, draws=200).posteriors(facts.model, 0)
    inputs, labels = rows(30, 4)
    targets = F.one_hot(labels, CLASSES).float()
    losses = [draw_losses(p(inputs), targets, cross_entropy) for p in (after, before)]
    paired = score(*losses).std_error
    apart = torch.stack([one.var(0) / len(one) for one in losses]).sum(0).sqrt()
    assert float((paired / apart).median()) < 0.9


# -- walks: SWAG and snapshots ------------------------------------------------------------


def brute_walk(facts: Known, pool, rates: list[float], epochs: int) -> list[nn.Module]:
    """Return a copy of the network after each epoch, by a loop of its own."""
    twin = copy.deepcopy(facts.model).train()
    for part in twin.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    velocity = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
    at, rate = [], iter(rates)
    for epoch in range(epochs):
        for inputs, labels in facts.batches(pool, epoch):
            loss = F.cross_entropy(twin(inputs), labels)
            slopes = torch.autograd.grad(loss, list(twin.parameters()))
            lr = next(rate)
            with torch.no_grad():
                for (name, p), slope in zip(twin.named_parameters(), slopes, strict=True):
                    slope = slope + facts.weight_decay * p
                    velocity[name] = 0.9 * velocity[name] + slope
                    p -= lr * (slope + 0.9 * velocity[name])  # Nesterov
        at.append(copy.deepcopy(twin))
    return at


def without_dropout(facts: Known) -> Known:
    for part in facts.model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return facts


def vector(model: nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().double().numpy().ravel() for p in model.parameters()])


@pytest.mark.parametrize("pool", ["train", "train+failures"])
def test_a_walk_is_nesterov_sgd_in_train_mode(pool):
    facts = without_dropout(known())
    rates = [0.03] * 100
    ours = [vector(at) for at in walk(facts, pool, epochs=3, lr=lambda done: 0.03)]
    theirs = [vector(at) for at in brute_walk(facts, pool, rates, 3)]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_snapshots_are_the_ends_of_cosine_cycles():
    facts, cycles, length = without_dropout(known()), 3, 2
    fitted = snapshot(facts, cycles=cycles, cycle_epochs=length, lr=0.1)
    steps = facts.steps
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimiser, length)
    rates = []
    for epoch, step in itertools.product(range(cycles * length), range(steps)):
        restarts.step(epoch + step / steps)
        rates.append(optimiser.param_groups[0]["lr"])
    passed = brute_walk(facts, "train", rates, cycles * length)
    expected = states(passed[length - 1 :: length])
    assert fitted.draws == cycles
    for name, tensor in expected.items():
        torch.testing.assert_close(fitted.base[name], tensor, atol=1e-5, rtol=1e-4)


def test_swag_draws_from_half_the_diagonal_and_half_the_low_rank_covariance():
    facts, epochs, rank = without_dropout(known()), 5, 3
    passed = np.stack(
        [vector(at) for at in walk(facts, "train", epochs=epochs, lr=lambda done: 0.05)]
    )
    running = np.cumsum(passed, axis=0) / np.arange(1, epochs + 1)[:, None]
    deviations = (passed - running)[-rank:]
    covariance = (np.diag(passed.var(axis=0)) + deviations.T @ deviations / (rank - 1)) / 2
    draws = 4000
    fitted = swag(facts, epochs=epochs, lr=0.05, rank=rank, draws=draws)
    names = [name for name, _ in facts.model.named_parameters()]
    drawn = np.concatenate(
        [fitted.base[name].double().numpy().reshape(draws, -1) for name in names], axis=1
    )
    scale = np.sqrt(np.diag(covariance))
    moves = scale > 1e-6
    errors = (drawn.mean(0) - passed.mean(0))[moves] / scale[moves] * math.sqrt(draws)
    assert np.abs(errors).max() < stats.norm.isf(1e-5 / len(errors))
    spread = np.cov(drawn[:, moves].T)
    expected = covariance[np.ix_(moves, moves)]
    bound = 6 * np.outer(scale[moves], scale[moves]) / math.sqrt(draws)
    assert (np.abs(spread - expected) < bound).all()
    assert (np.abs(expected) > bound).mean() > 0.2  # or the bound would accept anything


def test_swag_refreshes_the_statistics_of_each_draw():
    facts = without_dropout(known())
    fitted = swag(facts, epochs=3, lr=0.05, rank=3, draws=2)
    inputs = torch.cat([batch for batch, _ in facts.rows()])
    for draw in range(2):
        weight, bias = (fitted.updated[f"0.{name}"][draw] for name in ("weight", "bias"))
        chunks = [F.linear(batch, weight, bias).mean(0) for batch in inputs.split(25)]
        expected = torch.stack(chunks).mean(0)  # a mean over batches, as update_bn has it
        torch.testing.assert_close(fitted.updated["1.running_mean"][draw], expected)


# -- Laplace ------------------------------------------------------------------------------


def linear_parts(stacked: dict[str, torch.Tensor]) -> np.ndarray:
    """Return the weights (S, K (D + 1)) of a linear network, class by class, the bias last."""
    joined = torch.cat([stacked["0.weight"], stacked["0.bias"][:, :, None]], dim=2)
    return joined.double().numpy().reshape(len(joined), -1)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_all_weights_of_a_linear_network_are_its_last_layer(structure):
    facts, draws = known(hidden=None), 3000
    whole = laplace(facts, weights="all", structure=structure, draws=draws)
    head = last_layer.split_head(facts.model)
    features = (head(inputs)[0] for inputs, _ in facts.rows())
    base = last_layer.fit(features, head.mean, structure, 1.0)
    noise = torch.eye(base.mean.numel(), dtype=torch.float64)
    root = (last_layer.draw(base, noise) - base.mean).flatten(1).numpy()
    covariance = root.T @ root
    drawn = linear_parts(whole.base)
    scale = np.sqrt(np.diag(covariance))
    bound = 6 * np.outer(scale, scale) / math.sqrt(draws)
    assert (np.abs(np.cov(drawn.T) - covariance) < bound).all()
    moved = linear_parts(whole.updated).mean(0) - drawn.mean(0)
    exact = last_layer.updated(base, *facts.failures).mean - base.mean
    # One Gauss-Newton step against the mode itself: the same way, and about as far.
    expected = exact.flatten().numpy()
    cosine = moved @ expected / np.linalg.norm(moved) / np.linalg.norm(expected)
    assert cosine > 0.95
    assert 0.5 < np.linalg.norm(moved) / np.linalg.norm(expected) < 2


def test_a_kronecker_posterior_of_all_weights_takes_its_step_with_its_own_precision():
    facts = known(plain=True)
    whole = laplace(facts, weights="all", structure="kron", draws=400, prior_precision=5.0)
    model = copy.deepcopy(facts.model)
    theirs = whole_laplace._laplace()(model, "classification", "all", "kron", prior_precision=5.0)
    data = [torch.cat(side) for side in zip(*facts.rows(), strict=True)]
    theirs.fit(DataLoader(TensorDataset(*data), batch_size=25))
    theirs.fit(DataLoader(TensorDataset(*facts.failures), batch_size=FAILURES), override=False)
    loss = F.cross_entropy(model(facts.failures[0]), facts.failures[1], reduction="sum")
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    slope = torch.cat([part.flatten() for part in slopes])
    precision = theirs.posterior_precision.to_matrix()
    expected = -torch.linalg.solve(precision, slope)
    names = [name for name, _ in model.named_parameters()]
    sides = [
        torch.cat([side[name].flatten(1) for name in names], dim=1)
        for side in (whole.base, whole.updated)
    ]
    moved = (sides[1] - sides[0]).mean(0)  # both with the same noise: little of it is left
    error = (sides[1] - sides[0]).std(0) / math.sqrt(400)
    assert bool(((moved - expected).abs() < 6 * error + 1e-6).all())


def test_what_laplace_torch_can_not_do_is_one_line():
    with pytest.raises(UserError, match=r"kron can't be had .* give diag"):
        laplace(known(), weights="all", structure="kron")


def test_a_full_posterior_that_is_too_large_is_refused_with_its_size():
    facts = known(hidden=4000)
    with pytest.raises(UserError, match="full of all 40,003 weights needs 6 GB"):
        laplace(facts, weights="all", structure="full")


def test_without_laplace_torch_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "laplace", None)
    with pytest.raises(UserError, match=r"mixval\[laplace\]"):
        laplace(known(), weights="all")
    assert laplace(known(), draws=2).draws == 2


# -- dropout ------------------------------------------------------------------------------


def test_dropout_draws_average_over_all_masks():
    # Two units, four masks: E[H] is a sum.
    model = nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.5), nn.Linear(2, CLASSES)).eval()
    inputs = torch.tensor([[1.5], [-0.5]])
    hidden = model[0](inputs)
    expected = torch.zeros(2, CLASSES)
    for mask in itertools.product([0.0, 2.0], repeat=2):
        expected += F.log_softmax(model[2](hidden * torch.tensor(mask)), dim=-1).detach() / 4
    drawn = dropout(model, 4000, seed=0)(inputs)
    error = drawn.std(0) / math.sqrt(4000)
    assert bool(((drawn.mean(0) - expected).abs() < 6 * error).all())
    assert bool((error > 0).all())


def test_equal_networks_under_equal_masks_differ_in_nothing():
    facts = known()
    one, other = (dropout(facts.model, 5, seed=3) for _ in range(2))
    inputs = rows(9, 6)[0]
    assert torch.equal(one(inputs), other(inputs))
    assert not torch.equal(one(inputs), dropout(facts.model, 5, seed=4)(inputs))


def test_batch_norm_keeps_its_statistics_under_dropout():
    facts = known()
    alone = dropout(facts.model, 3, seed=0)
    inputs = rows(9, 6)[0]
    masked_first = alone(inputs)[:, :4]
    # In train mode the rest of the batch would change BatchNorm; masks go by place.
    torch.testing.assert_close(
        dropout(without_dropout(known()).model, 3, 0)(inputs[:4]),
        dropout(without_dropout(known()).model, 3, 0)(inputs)[:, :4],
    )
    assert masked_first.shape == (3, 4, CLASSES)


@pytest.mark.parametrize("count", [1, 3])
def test_few_failures_are_enough(count):
    facts = known()
    few = replace(facts, failures=(facts.failures[0][:count], facts.failures[1][:count]))
    for name in NAMES:
        if name != "deep_ensemble":  # which asks the stage for its data
            assert fitted_by(name, few).draws >= 1


def test_a_network_without_dropout_is_refused():
    with pytest.raises(UserError, match="needs a network with dropout"):
        mc_dropout(known(hidden=None), draws=4)


# -- states -------------------------------------------------------------------------------


def test_parameters_are_laid_out_as_torch_does_and_frozen_ones_stay():
    model = network()
    model[0].weight.requires_grad_(False)
    moving = [p for p in model.parameters() if p.requires_grad]
    vectors = torch.arange(2 * sum(p.numel() for p in moving)).float().view(2, -1)
    stacked = with_parameters(model, vectors)
    assert torch.equal(stacked["0.weight"][1], model[0].weight)
    twin = copy.deepcopy(model)
    torch.nn.utils.vector_to_parameters(
        vectors[1], [p for p in twin.parameters() if p.requires_grad]
    )
    for name, tensor in twin.state_dict().items():
        assert torch.equal(stacked[name][1], tensor), name


def test_moments_are_those_of_the_weights():
    facts = without_dropout(known())
    mean, spread, deviations = gaussian.moments(facts, "train", epochs=4, lr=0.05, rank=2)
    passed = np.stack([vector(at) for at in walk(facts, "train", epochs=4, lr=lambda done: 0.05)])
    np.testing.assert_allclose(mean, passed.mean(0), atol=1e-12)
    np.testing.assert_allclose(spread, passed.std(0), atol=1e-7)
    np.testing.assert_allclose(deviations[-1], passed[-1] - passed.mean(0), atol=1e-12)
    assert deviations.shape == (2, len(mean))
