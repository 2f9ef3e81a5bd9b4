"""Protocol 4, steps to accuracy: choose a fifth of every batch, with 10 % of the labels wrong.

As RHO-LOSS does it: candidates are drawn, the network is trained on the best of them by a
score of the moment, and all methods make the same number of optimiser steps on as many rows,
from the same initial weights and candidates. For samples, and for mixes of the candidates.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mixval import Guide, mix, posteriors, sample_scores
from mixval.fisher import diagonal_fisher
from mixval.losses import cross_entropy
from mixval.mixing import draw_lam
from mixval.seeding import generator
from mixval.types import Posterior
from score_protocols.cases import Case, Setting, make_case
from score_protocols.networks import (
    accuracy,
    batches,
    descend,
    hits,
    log_probs,
    new_network,
    optimiser_of,
    train,
)
from score_protocols.scores import ewc, joined

NOISE = 0.1
CANDIDATES = 5  # for each row that is trained on
EVERY = 20  # steps between evaluations
TEST_ROWS = 2000

# (logits (B, K), inputs (B, ...), targets (B, K)) -> what to train on first, (B,)
Wish = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(setting: Setting, seed: int) -> dict:
    """Return for samples and mixes, by method, the accuracy curve and the wrong labels seen."""
    case = make_case(setting, seed, NOISE)
    wishes = make_wishes(case)
    kinds = {"samples": 0.0, "mixes": 1.0}
    return {
        kind: {name: selected(case, wish, alpha) for name, wish in wishes.items()}
        for kind, alpha in kinds.items()
    }


def make_wishes(case: Case) -> dict[str, Wish]:
    data = case.inputs, case.labels
    base = train(case, data, stream="base")
    wrong = torch.from_numpy(~hits(base, case.pool))
    failures = case.pool[0][wrong], case.pool[1][wrong]
    with_failures = train(case, joined(data, failures), stream="teacher")
    with_pool = train(case, joined(data, case.pool), stream="teacher")
    updated = ewc(case, base, diagonal_fisher(base, [data]), failures)
    hold_out = train(case, case.pool, stream="hold-out")
    return {
        "random": lambda logits, inputs, targets: torch.zeros(len(logits)),
        "loss": lambda logits, inputs, targets: cross_entropy(logits, targets),
        "margin": lambda logits, inputs, targets: -sample_scores.margin(_logs(logits), targets),
        "entropy": lambda logits, inputs, targets: sample_scores.entropy(_logs(logits)),
        "EL2N": lambda logits, inputs, targets: sample_scores.el2n(_logs(logits), targets),
        "teacher entropy": partial(_teacher_entropy, with_failures),
        "RHO-LOSS": partial(_lowest_r_hat, Guide(hold_out)),
        "r̂ teacher D+F, lowest": partial(_lowest_r_hat, Guide(with_failures)),
        "r̂ teacher D+F ≤ 0": partial(_kept, Guide(with_failures)),
        "r̂ teacher D+V, lowest": partial(_lowest_r_hat, Guide(with_pool)),
        "r̂ teacher D+V ≤ 0": partial(_kept, Guide(with_pool)),
        "r̂ EWC ≤ 0": partial(_offline, Guide(updated), posteriors.point([base])),
    }


def selected(case: Case, wish: Wish, alpha: float) -> dict:
    """Train on the most wished for of each step's candidates; ties are broken at random."""
    network = new_network(case, "student")
    optimiser = optimiser_of(case, network)  # at a constant rate: no step is the last
    test = case.test[0][:TEST_ROWS], case.test[1][:TEST_ROWS]
    targets, wrong = case.targets(case.labels), case.flipped.float()
    count = case.setting.batch
    order = batches(case, len(targets), "student", CANDIDATES * count)
    curve, seen_wrong = [(0, accuracy(network, test))], 0.0
    for step in range(1, case.setting.steps + 1):
        rows = next(order)
        inputs, wanted, share = _candidates(case, rows, alpha, step, targets, wrong)
        with torch.no_grad():
            value = wish(network(inputs), inputs, wanted)
        chosen = _highest(value, count, case.seed, step)
        descend(optimiser, cross_entropy(network(inputs[chosen]), wanted[chosen]).mean())
        seen_wrong += float(share[chosen].mean())
        if step % EVERY == 0:
            curve.append((step, accuracy(network, test)))
    return {"curve": curve, "wrong": seen_wrong / case.setting.steps}


def _candidates(
    case: Case, rows: Tensor, alpha: float, step: int, targets: Tensor, wrong: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets and the share of wrong labels of each candidate."""
    rng = generator(case.seed, "candidates", step)
    lam = torch.from_numpy(draw_lam(rng, alpha, len(rows))).float()
    others = rows.roll(1)
    inputs, labels, share = (
        mix(every[rows], every[others], lam) for every in (case.inputs, targets, wrong)
    )
    return inputs, labels, share


def _highest(value: Tensor, count: int, seed: int, step: int) -> Tensor:
    shuffled = torch.from_numpy(generator(seed, "ties", step).permutation(len(value)))
    return shuffled[value[shuffled].argsort(descending=True, stable=True)[:count]]


def _logs(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[None]


def _lowest_r_hat(guide: Guide, logits: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return -guide.score(logits, inputs, targets=targets).r_hat


def _kept(guide: Guide, logits: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return guide.weights(logits, inputs, targets=targets)


def _teacher_entropy(teacher: nn.Module, logits: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return sample_scores.entropy(log_probs(teacher, inputs))


def _offline(
    guide: Guide, base: Posterior, logits: Tensor, inputs: Tensor, targets: Tensor
) -> Tensor:
    """Return what is kept by an r_hat that the student has no part in."""
    return _kept(guide, base(inputs)[0], inputs, targets)
