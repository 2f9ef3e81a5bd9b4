r"""How far is r_hat(C) from r(C) as the set C grows, and when is r itself beyond Monte Carlo?

Command: python experiments/exact_and_first_order.py [--seeds 5] [--sets 8] [--draws 2000]
Time: 40 s on one core.
Bayesian linear regression (r in closed form) and the last-layer Laplace posterior of a small
network on digits, F its mistakes on 400 held-out samples; random sets C, 8 of each size and
seed. r of digits is a closed form up to 5 rows, and by particles beyond (mixval.closed_form).

Result, seeds 0-4, medians over 40 sets (figures/exact_and_first_order.png, docs/exact_r.md):
                        size 1          5               10              20
                        |r|   |r̂ − r|  |r|   |r̂ − r|  |r|   |r̂ − r|  |r|    |r̂ − r|
  regression, mixes     0.162 0.011     0.434 0.052     0.653 0.104     1.236  0.294
  digits mixes, δ = 1   0.084 0.022     0.399 0.121     4.110 3.864     25.97  26.96
  digits mixes, δ = 10  0.076 0.004     0.176 0.015     0.299 0.029     0.612  0.198
r_hat stands for r while the standard deviation of H(C) stays below 1: up to 2 to 5 rows at
delta = 1, up to 10 at delta = 10. Beyond, log-mean-exp over draws does not find r either.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from mixval import MixPlan, draw_plan, exact_r, load_recipe, score
from mixval.closed_form import (
    LinearRegression,
    Logits,
    log_mean_exp,
    sequential_log_mean_exp,
)
from mixval.datasets import digits
from mixval.engine import start_engine
from mixval.failure_rules import misclassified
from mixval.last_layer import LastLayer, draw, fit, split_head, updated
from mixval.losses import cross_entropy
from mixval.metrics import predict
from mixval.mixing import RowMaker
from mixval.recipe import Choice, EngineSettings
from mixval.rhat import draw_losses
from mixval.seeding import generator
from mixval.splits import load_splits
from mixval.training import train
from mixval.training_job import Job, Watch
from mixval.types import Floats, Splits

FILE = Path(__file__).parent.parent / "figures" / "exact_and_first_order.png"
SIZES = (1, 2, 5, 10, 20, 50)
LINEAR_SIZES = (*SIZES, 100)
PRIORS = (1.0, 10.0)  # precision delta of the last layer's prior
ENUMERATED = 5  # rows whose K^n Gaussians are added up one by one


@dataclass(frozen=True)
class Found:
    """What was found of one set: r by the best means there are, and its estimates."""

    r: float  # closed form or sequential; not finite where r is not
    monte_carlo: float  # `exact_r` of the draws
    r_hat: float
    second: float  # r_hat + 1/2 (Var[H] under p(W | D, F) - Var[H] under p(W | D))
    spread: float  # standard deviation of H under p(W | D)
    effective: float  # share of the draws that the mean of exp H rests on
    bend: float  # largest eigenvalue of P_D^-1 G_C
    again: float = np.nan  # r by other particles, where it is not in closed form


Sets = dict[int, list[Found]]  # by size
LinearPair = tuple[LinearRegression, LinearRegression]  # p(theta | D, F) and p(theta | D)


def estimates(updated_losses: Tensor, base_losses: Tensor) -> dict[str, float]:
    """Return what S draws of H(C) say, (S,) under each posterior."""
    r_hat = float(score(updated_losses[:, None], base_losses[:, None]).r_hat)
    weights = base_losses.softmax(0)
    return {
        "monte_carlo": float(exact_r(updated_losses, base_losses)),
        "r_hat": r_hat,
        "second": r_hat + float(updated_losses.var() - base_losses.var()) / 2,
        "spread": float(base_losses.std()),
        "effective": float(1 / weights.square().sum()) / len(weights),
    }


# -- linear regression: everything in closed form -------------------------------------------------


def linear_sets(seed: int, sets: int, draws: int) -> Sets:
    """Return sets of mixes of a regression's data; F are the worst of its held-out samples."""
    rng, width = generator(seed, "exact/linear"), 10
    inputs, truth = rng.standard_normal((260, width)), rng.standard_normal(width)
    outputs = inputs @ truth + rng.standard_normal(260)
    base = LinearRegression.given(inputs[:60], outputs[:60])
    worst = 60 + np.argsort(-np.abs(outputs[60:] - inputs[60:] @ base.mean))[:10]
    known = np.append(np.arange(60), worst)
    both = LinearRegression.given(inputs[known], outputs[known]), base
    noise = rng.standard_normal((draws, width))
    found: Sets = {size: [] for size in LINEAR_SIZES}
    for number in range(sets):
        plan = MixPlan.join(
            [
                draw_plan(seed=seed, epoch=number, alpha=1.0, num_samples=60, draw=again)
                for again in range(-(-max(LINEAR_SIZES) // 60))
            ]
        )
        lam = plan.lam[:, None]
        x = lam * inputs[plan.first] + (1 - lam) * inputs[plan.second]
        y = plan.lam * outputs[plan.first] + (1 - plan.lam) * outputs[plan.second]
        for size in LINEAR_SIZES:
            found[size].append(linear_set(both, x[:size], y[:size], noise))
    return found


def linear_set(both: LinearPair, x: Floats, y: Floats, noise: Floats) -> Found:
    """Return r in closed form and by draws of one set, (n, D) and (n,)."""
    terms = [posterior.log_mean_exp(x, y) for posterior in both]
    losses = [torch.from_numpy(posterior.losses(x, y, noise)) for posterior in both]
    r = terms[0] - terms[1] if np.isfinite(terms).all() else np.nan
    return Found(r=r, bend=both[1].bend(x), **estimates(*losses))


# -- digits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """What sets are made of."""

    features: Tensor  # (N, D), of the last layer
    targets: Tensor  # (N, K)


@dataclass(frozen=True)
class Trained:
    """The features of a base network: of its data, its failures, samples and mixes of samples."""

    mean: Tensor  # (K, D + 1) of the last layer
    data: Tensor  # (N, D)
    failures: Tensor  # (M, D)
    labels: Tensor  # (M,)
    rows: dict[str, Rows]

    def posteriors(self, prior_precision: float) -> tuple[LastLayer, LastLayer]:
        """Return p(W | D, F) and p(W | D)."""
        base = fit([self.data], self.mean, "full", prior_precision)
        return updated(base, self.failures, self.labels), base


def trained(seed: int, epochs: int | None = None) -> Trained:
    """Return the base network of the digits recipe (mixup), narrower; F are val_f's mistakes."""
    recipe = load_recipe("digits")
    splits = load_splits(digits(), seed=seed, train=300, val_f=400, val_dev=50, label_noise=0.0)
    job = Job(
        learner=recipe.base,
        training=recipe.training.model_copy(update={"evaluate_every": 10**9}),
        model=Choice(name="mlp", hidden=[64, 32]),
        epochs=epochs or recipe.training.epochs,
        part=splits.train,
        splits=splits,
        seed=seed,
        stream="exact",
    )
    engine = start_engine(EngineSettings(device="cpu", threads=1))
    return features_of(train(job, engine, None, Watch()).model, splits, seed)


def features_of(model: nn.Module, splits: Splits, seed: int) -> Trained:
    head = split_head(model)
    samples, held = (
        RowMaker.of(part, splits, torch.device("cpu")) for part in (splits.train, splits.val_f)
    )
    wrong = misclassified(predict(model, held), splits.val_f.labels).nonzero().squeeze(1)
    plan = draw_plan(seed=seed, epoch=0, alpha=1.0, num_samples=len(splits.train), derange=True)
    batch = samples.batch(plan)
    assert batch.mixed is not None and batch.mixed_targets is not None
    alone = Rows(head(batch.clean)[0], batch.clean_targets.double())
    mixes = Rows(head(batch.mixed)[0], batch.mixed_targets.double())
    failures, labels = head(held.inputs(wrong))[0], splits.val_f.labels[wrong]
    return Trained(head.mean, alone.features, failures, labels, {"samples": alone, "mixes": mixes})


def digit_sets(
    network: Trained, kind: str, prior_precision: float, seed: int, sets: int, draws: int
) -> Sets:
    """Return random sets of samples or mixes, each larger one holding the smaller ones."""
    both, rows = network.posteriors(prior_precision), network.rows[kind]
    rng = generator(seed, f"exact/{kind}")
    noise = torch.from_numpy(rng.standard_normal((draws, network.mean.numel())))
    # The same noise for both posteriors: common random numbers.
    losses = [losses_of(draw(posterior, noise), rows) for posterior in both]
    found: Sets = {size: [] for size in SIZES}
    for _ in range(sets):
        chosen = torch.from_numpy(rng.permutation(len(rows.targets))[: max(SIZES)])
        features, targets = rows.features[chosen], rows.targets[chosen]
        logits = Logits.of(both[0], features), Logits.of(both[1], features)
        values = r_of_sizes(logits, targets, rng)
        for size in SIZES:
            sums = [each[:, chosen[:size]].sum(1) for each in losses]
            r, again = values[size]
            bend = logits[1].first(size).bend()
            found[size].append(Found(r=r, again=again, bend=bend, **estimates(*sums)))
    return found


def r_of_sizes(
    logits: tuple[Logits, Logits], targets: Tensor, rng: np.random.Generator
) -> dict[int, tuple[float, float]]:
    """Return r of the first rows, by size; and again by other particles where they are needed."""
    means = [[sequential_log_mean_exp(each, targets, rng) for each in logits] for _ in range(2)]
    found = {}
    for size in SIZES:
        if size <= ENUMERATED:
            terms = [log_mean_exp(each.first(size), targets[:size]) for each in logits]
            found[size] = terms[0] - terms[1], np.nan
        else:
            one, other = (float(upper[size - 1] - lower[size - 1]) for upper, lower in means)
            found[size] = one, other
    return found


def losses_of(weights: Tensor, rows: Rows) -> Tensor:
    """Return H of each draw (S, K, D + 1) and row, (S, N)."""
    features = F.pad(rows.features.double(), (0, 1), value=1.0)
    parts = [
        draw_losses((features @ some.mT).log_softmax(-1), rows.targets, cross_entropy)
        for some in weights.split(100)
    ]
    return torch.cat(parts)


# -- what came out --------------------------------------------------------------------------------


def middle(found: Iterable[Found], of: Callable[[Found], float]) -> tuple[float, float, float]:
    """Return the median and the quartiles over the sets."""
    values = [of(each) for each in found]
    return tuple(np.quantile(values, (0.5, 0.25, 0.75)).tolist())  # type: ignore[return-value]


GAPS: dict[str, Callable[[Found], float]] = {
    "|r|, to compare": lambda f: abs(f.r),
    "r̂: |r̂ − r|": lambda f: abs(f.r_hat - f.r),
    "r̂ + ½ΔVar[H]: gap to r": lambda f: abs(f.second - f.r),
    "log-mean-exp over draws: gap to r": lambda f: abs(f.monte_carlo - f.r),
}


def same_sign(found: list[Found]) -> float:
    return float(np.mean([(f.r > 0) == (f.r_hat > 0) for f in found]))


HEADER = (
    "  size     |r|   |r̂−r|  quartiles          rank  sign  +½ΔVar   draws     sd H    used"
    "   bend   again"
)


def say(title: str, sets: Sets) -> None:
    """Print medians: see `docs/exact_r.md` for the columns."""
    print(f"\n{title}\n{HEADER}")
    for size, every in sets.items():
        found = [f for f in every if np.isfinite(f.r)]
        if len(found) < len(every):
            infinite, bend = len(every) - len(found), middle(every, attrgetter("bend"))[0]
            print(f"{size:6}  r is infinite for {infinite} of {len(every)} sets, bend {bend:.2f}")
            continue
        size_of, gap, second, draws = (middle(found, of) for of in GAPS.values())
        names = ("spread", "effective", "bend")
        spread, used, bend = (middle(found, attrgetter(name))[0] for name in names)
        again = middle(found, lambda f: abs(f.again - f.r))[0]
        quartiles = f"[{gap[1]:.3f}, {gap[2]:.3f}]"
        rank = stats.spearmanr([f.r for f in found], [f.r_hat for f in found]).statistic
        print(
            f"{size:6} {size_of[0]:7.3f} {gap[0]:7.3f}  {quartiles:<17} {rank:5.2f}"
            f" {100 * same_sign(found):4.0f}% {second[0]:7.3f} {draws[0]:7.3f} {spread:8.2f}"
            f" {100 * used:6.1f}% {bend:6.2f} {again:7.2f}"
        )


def draw_figure(linear: Sets, of_digits: dict[tuple[str, float], Sets]) -> Figure:
    figure = Figure(figsize=(10, 7.6), layout="constrained")
    axes = figure.subplots(2, 2)
    panel(axes[0, 0], linear, "Linear regression, sets of mixes: r in closed form")
    for axis, kind in zip((axes[0, 1], axes[1, 0]), ("samples", "mixes"), strict=True):
        title = f"Digits, last-layer Laplace (δ = {PRIORS[0]:g}): sets of {kind}"
        panel(axis, of_digits[kind, PRIORS[0]], title)
    against_spread(axes[1, 1], linear, of_digits)
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


INFINITE = "r is infinite\nfor some\nor all sets"
STYLES = (("--", "#888888"), ("-", "#c8553d"), ("-", "#4a8f5c"), (":", "#3b6fb6"))


def panel(axes: Axes, sets: Sets, title: str) -> None:
    """Draw the gaps to r against the size of the set, and where r is infinite."""
    finite = [size for size, found in sets.items() if np.isfinite([f.r for f in found]).all()]
    for (name, of), (line, colour) in zip(GAPS.items(), STYLES, strict=True):
        curve = np.array([middle(sets[size], of) for size in finite])
        axes.loglog(finite, curve[:, 0], line, marker="o", markersize=4, color=colour, label=name)
        if line == "-":
            axes.fill_between(finite, curve[:, 1], curve[:, 2], color=colour, alpha=0.15, lw=0)
    beyond = [size for size in sets if size not in finite]
    if beyond:
        start, height = np.sqrt(max(finite) * min(beyond)), axes.get_xaxis_transform()
        axes.axvspan(start, max(beyond), color="#dddddd", lw=0)
        middle_of = np.sqrt(start * max(beyond))
        axes.text(middle_of, 0.5, INFINITE, transform=height, ha="center", fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="size of the set C", ylabel="nats, median over sets")
    axes.set_xticks(list(sets), [str(size) for size in sets])
    axes.minorticks_off()
    axes.grid(alpha=0.25)


def against_spread(axes: Axes, linear: Sets, of_digits: dict[tuple[str, float], Sets]) -> None:
    """Draw the gap against the standard deviation of H(C): sizes and priors fall together."""
    every = {"linear regression, mixes": linear}
    every |= {f"digits, {kind}, δ = {delta:g}": s for (kind, delta), s in of_digits.items()}
    looks = ("D#4d4d4d", "o#3b6fb6", "s#8ab0e0", "v#c8553d", "^#e8a090")
    for (name, sets), (marker, *colour) in zip(every.items(), looks, strict=True):
        finite = [found for found in sets.values() if np.isfinite([f.r for f in found]).all()]
        spread = [middle(found, lambda f: f.spread)[0] for found in finite]
        gap = [middle(found, GAPS["r̂: |r̂ − r|"])[0] for found in finite]
        axes.loglog(spread, gap, marker=marker, color="".join(colour), lw=0.8, label=name)
    axes.axvline(1, color="#888888", lw=0.8, ls="--")
    axes.set_title("The gap goes with the spread of H(C), not with the size", fontsize=10)
    axes.set(xlabel="standard deviation of H(C) under p(W | D), median", ylabel="|r̂ − r|, median")
    axes.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    axes.grid(alpha=0.25)


def save(figure: Figure, path: Path) -> None:
    """Write the figure in few colours: a third of the bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, dpi=110)
    Image.open(buffer).convert("RGB").quantize(96).save(path, optimize=True)


def joined(parts: Iterable[Sets]) -> Sets:
    parts = list(parts)
    return {size: [f for part in parts for f in part[size]] for size in parts[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sets", type=int, default=8, help="of each size, kind and seed")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=FILE, help="the figure's file")
    asked = parser.parse_args()
    seeds = range(asked.seeds)
    linear = joined(linear_sets(seed, asked.sets, asked.draws) for seed in seeds)
    say("linear regression, mixes; r in closed form", linear)
    networks = [trained(seed) for seed in seeds]
    print("\nfailures F of the digits networks:", *(len(network.labels) for network in networks))
    of_digits = {}
    for kind in ("samples", "mixes"):
        for delta in PRIORS:
            of_digits[kind, delta] = joined(
                digit_sets(network, kind, delta, seed, asked.sets, asked.draws)
                for seed, network in zip(seeds, networks, strict=True)
            )
            how = f"r in closed form up to {ENUMERATED} rows, then by particles"
            say(f"digits, {kind}, delta = {delta:g}; {how}", of_digits[kind, delta])
    save(draw_figure(linear, of_digits), asked.out)


if __name__ == "__main__":
    main()
