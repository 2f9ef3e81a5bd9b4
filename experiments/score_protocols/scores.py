"""Everything that scores a row, fitted once for a case: r_hat in its variants, and its rivals.

All scores are turned so that high means suspicious: train without it. V is the pool of
samples with right labels, F those of V that the base network fails.

    r_hat = E[H] under p(theta | D, F) - E[H] under p(theta | D)

What a score may look at, which is why some can be better than others:
    D alone        loss, margin, entropy, EL2N, GraNd, forgetting, out-of-fold loss,
                   r_hat out-of-fold
    D and F        r_hat (fine-tuned, EWC, natural gradient, Laplace, teacher D+F), linear
                   influence, teacher entropy; knowing F means having labels of all of V
    D and all of V RHO-LOSS, hold-out loss, r_hat (teacher D+V)
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from mixval import last_layer, posteriors, rhat, sample_scores, updates
from mixval.fisher import Parameters, diagonal_fisher, precision
from mixval.losses import cross_entropy
from mixval.mixing import assign_folds
from mixval.seeding import generator
from mixval.types import Posterior
from score_protocols.cases import Case
from score_protocols.networks import hits, log_probs, train

R_HATS = (
    "r̂ fine-tuned",
    "r̂ EWC",
    "r̂ natural gradient",
    "r̂ Laplace",
    "r̂ teacher D+F",
    "r̂ teacher D+V",
    "r̂ out-of-fold",
)
# Times N x weight decay, of 0.1 to 1000: what did best on seeds 100 and 101, which are in no table.
LAPLACE_PRIOR, NATURAL_GRADIENT_RIDGE = 10, 1000
GRADIENT_BYTES = 64 * 2**20  # of per-sample gradients held at once


@dataclass(frozen=True)
class Fitted:
    """The networks of a case. Each is a Posterior: inputs -> log-probabilities (S, B, K)."""

    case: Case
    base: nn.Module
    failures: tuple[Tensor, Tensor]  # inputs (M, ...), labels (M,)
    fisher: Parameters
    updated: dict[str, Posterior]  # p(theta | D, F) of each r_hat, by name
    laplace: Posterior  # p(theta | D) that goes with r_hat Laplace
    hold_out: nn.Module  # trained on V alone
    early: list[nn.Module]
    folds: Tensor  # (N,)
    correct: Tensor  # (E, N) whether the base network had each sample right, at each epoch's end


def fit(case: Case, failures: tuple[Tensor, Tensor] | None = None) -> Fitted:
    """Train what the scores need; F is what the base network gets wrong in the pool."""
    data = case.inputs, case.labels
    base, correct = _base(case)
    if failures is None:
        wrong = torch.from_numpy(~hits(base, case.pool))
        failures = case.pool[0][wrong], case.pool[1][wrong]
    fisher = diagonal_fisher(base, [data])
    laplace, laplace_updated = _laplace(case, base, failures)
    folds = torch.from_numpy(assign_folds(case.seed, len(case.labels), case.setting.folds))
    updated = {
        "r̂ fine-tuned": posteriors.point([fine_tuned(case, base, failures)]),
        "r̂ EWC": posteriors.point([ewc(case, base, fisher, failures)]),
        "r̂ natural gradient": posteriors.point([_natural(case, base, fisher, failures)]),
        "r̂ Laplace": laplace_updated,
        "r̂ teacher D+F": posteriors.point([train(case, joined(data, failures), stream="teacher")]),
        "r̂ teacher D+V": posteriors.point([train(case, joined(data, case.pool), stream="teacher")]),
        "r̂ out-of-fold": posteriors.out_of_fold(_without_each_fold(case, folds)),
    }
    runs = range(case.setting.runs)
    early = [train(case, data, stream=f"early/{run}", steps=case.setting.early) for run in runs]
    hold_out = train(case, case.pool, stream="hold-out")
    return Fitted(case, base, failures, fisher, updated, laplace, hold_out, early, folds, correct)


def joined(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]])


def fine_tuned(case: Case, base: nn.Module, data: tuple[Tensor, Tensor]) -> nn.Module:
    """Return the base network after 10 epochs on the data at a fifth of the learning rate."""

    def batches_of_epoch(epoch: int) -> list[tuple[Tensor, Tensor]]:
        count = -(-len(data[1]) // case.setting.batch)
        order = generator(case.seed, "fine-tuning", epoch).permutation(len(data[1]))
        return [(data[0][rows], data[1][rows]) for rows in np.array_split(order, count)]

    return updates.fine_tune(base, batches_of_epoch, lr=case.setting.lr / 5, epochs=10)


def row_scores(
    fitted: Fitted, inputs: Tensor, targets: Tensor, fold: Tensor
) -> dict[str, np.ndarray]:
    """Return the scores of rows (B, ...) with soft targets (B, K): samples or mixes.

    `fold` (B,) says which out-of-fold network has not seen the row.
    """
    base = log_probs(fitted.base, inputs)
    hold_out = log_probs(fitted.hold_out, inputs)
    early = torch.cat([log_probs(network, inputs) for network in fitted.early])
    unseen = fitted.updated["r̂ out-of-fold"](inputs, fold)
    columns = r_hats(fitted, inputs, targets, fold)
    columns |= {
        "RHO-LOSS": r_hat(hold_out, base, targets),  # -(reducible loss), with V's network
        "linear influence": _linear_influence(fitted, inputs, targets),
        "loss": expected_loss(base, targets),
        "out-of-fold loss": expected_loss(unseen, targets),
        "hold-out loss": expected_loss(hold_out, targets),
        "margin": -sample_scores.margin(base, targets),
        "entropy": sample_scores.entropy(base),
        "teacher entropy": sample_scores.entropy(fitted.updated["r̂ teacher D+F"](inputs)),
        "EL2N": sample_scores.el2n(early, targets),
        "GraNd": _grand(fitted.early, inputs, targets),
    }
    return {name: column.numpy() for name, column in columns.items()}


def r_hats(fitted: Fitted, inputs: Tensor, targets: Tensor, fold: Tensor) -> dict[str, Tensor]:
    base = log_probs(fitted.base, inputs)
    found = {}
    for name, posterior in fitted.updated.items():
        start = fitted.laplace(inputs) if name == "r̂ Laplace" else base
        found[name] = r_hat(posterior(inputs, fold), start, targets)
    return found


def sample_columns(fitted: Fitted) -> dict[str, np.ndarray]:
    """Return all scores of the N training samples."""
    case = fitted.case
    columns = row_scores(fitted, case.inputs, case.targets(case.labels), fitted.folds)
    columns["forgetting"] = sample_scores.forgetting(fitted.correct).numpy()
    columns["random"] = generator(case.seed, "random score").random(len(case.labels))
    return columns


def r_hat(updated: Tensor, base: Tensor, targets: Tensor) -> Tensor:
    draws = (rhat.draw_losses(each, targets, cross_entropy) for each in (updated, base))
    return rhat.score(*draws).r_hat


def expected_loss(each: Tensor, targets: Tensor) -> Tensor:
    return rhat.draw_losses(each, targets, cross_entropy).mean(0)


def _grand(networks: list[nn.Module], inputs: Tensor, targets: Tensor) -> Tensor:
    chunk = sample_scores.grand_chunk(networks[0], GRADIENT_BYTES)
    norms = [
        sample_scores.grand(network, inputs, targets, loss=cross_entropy, chunk=chunk)
        for network in networks
    ]
    return torch.stack(norms).mean(0)


def _linear_influence(fitted: Fitted, inputs: Tensor, targets: Tensor) -> Tensor:
    setting = fitted.case.setting
    held = precision(fitted.base, fitted.fisher, num_samples=setting.train, ridge=setting.precision)
    return updates.linear_influence(fitted.base, held, (inputs, targets), *fitted.failures)


def _base(case: Case) -> tuple[nn.Module, Tensor]:
    seen: list[np.ndarray] = []
    epoch = len(case.labels) // case.setting.batch

    def watch(step: int, network: nn.Module) -> None:
        if step % epoch == 0:
            seen.append(hits(network, (case.inputs, case.labels)))

    base = train(case, (case.inputs, case.labels), stream="base", watch=watch)
    return base, torch.from_numpy(np.stack(seen))


def ewc(
    case: Case, base: nn.Module, fisher: Parameters, failures: tuple[Tensor, Tensor]
) -> nn.Module:
    setting = case.setting
    held = precision(base, fisher, num_samples=setting.train, ridge=setting.precision)
    return updates.ewc(base, held, *failures)


def _natural(
    case: Case, base: nn.Module, fisher: Parameters, failures: tuple[Tensor, Tensor]
) -> nn.Module:
    ridge = NATURAL_GRADIENT_RIDGE * case.setting.precision
    held = precision(base, fisher, num_samples=case.setting.train, ridge=ridge)
    return updates.natural_gradient(base, held, *failures)


def _without_each_fold(case: Case, folds: Tensor) -> list[nn.Module]:
    return [
        train(case, (case.inputs[folds != k], case.labels[folds != k]), stream=f"fold/{k}")
        for k in range(case.setting.folds)
    ]


def _laplace(
    case: Case, base: nn.Module, failures: tuple[Tensor, Tensor]
) -> tuple[Posterior, Posterior]:
    """Return S draws of p(W | D) and p(W | D, F) of the last layer, from the same noise."""
    before, after = last_layer_posteriors(case, base, failures)
    rng = generator(case.seed, "laplace")
    noise = torch.from_numpy(rng.standard_normal((case.setting.draws, before.mean.numel())))
    return tuple(
        posteriors.last_layer(base, last_layer.draw(posterior, noise))
        for posterior in (before, after)
    )


def last_layer_posteriors(
    case: Case, base: nn.Module, failures: tuple[Tensor, Tensor]
) -> tuple[last_layer.LastLayer, last_layer.LastLayer]:
    head = last_layer.split_head(base)
    features, _ = head(case.inputs)
    before = last_layer.fit([features], head.mean, "full", LAPLACE_PRIOR * case.setting.precision)
    return before, last_layer.updated(before, head(failures[0])[0], failures[1])
