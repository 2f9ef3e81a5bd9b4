"""The same scores from public libraries, on the same network: do the numbers agree?

Labels flipped for 10 % of the samples, as in mislabel detection. Each comparison is our
column beside a library's, both turned so that high means suspicious; what is returned is
their rank correlation and both AUROCs. A library that is not installed is left out and named.
None of them is needed by mixval.

    cleanlab        label quality from the base network's probabilities, and out-of-fold ones
    captum, dattri  TracIn at one checkpoint = linear influence with a constant curvature
    dattri, pyDVL   influence by the last layer's Hessian and by EK-FAC, beside our linear
                    influence by the diagonal Fisher
    laplace-torch   draws of the last layer: E[H] under p(W | D), and r_hat
"""

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from mixval import last_layer, posteriors, updates
from mixval.fisher import still, summed_gradient, trainable
from mixval.seeding import generator, torch_stream
from score_protocols.cases import Setting, make_case
from score_protocols.measures import auroc
from score_protocols.networks import log_probs
from score_protocols.scores import (
    LAPLACE_PRIOR,
    Fitted,
    expected_loss,
    fit,
    last_layer_posteriors,
    r_hat,
    sample_columns,
)

NOISE = 0.1
DRAWS = 300  # of both last-layer posteriors: the comparison is of them, not of luck

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]  # what is compared -> our column, the library's


def run(setting: Setting, seed: int) -> dict:
    """Return for each library what agrees how well, or why it was left out."""
    fitted = fit(make_case(setting, seed, NOISE))
    ours = sample_columns(fitted)
    bad = fitted.case.flipped.numpy()
    found: dict[str, dict] = {}
    libraries: dict[str, Callable[[Fitted, dict[str, np.ndarray]], Pairs]] = {
        "cleanlab": cleanlab,
        "captum": captum,
        "dattri": dattri,
        "pyDVL": pydvl,
        "laplace-torch": laplace_torch,
    }
    for name, compare in libraries.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they warn of what they do themselves
                pairs = compare(fitted, ours)
        except ImportError as missing:
            found[name] = {"left out": str(missing)}
            continue
        found[name] = {what: compared(*columns, bad) for what, columns in pairs.items()}
    return found


def compared(ours: np.ndarray, theirs: np.ndarray, bad: np.ndarray) -> dict[str, float]:
    return {
        "rank correlation": float(stats.spearmanr(ours, theirs).statistic),
        "our auroc": auroc(ours, bad),
        "their auroc": auroc(theirs, bad),
    }


def cleanlab(fitted: Fitted, ours: dict[str, np.ndarray]) -> Pairs:
    from cleanlab.rank import get_label_quality_scores

    case = fitted.case
    labels = case.labels.numpy()
    inside = log_probs(fitted.base, case.inputs)[0].exp().numpy()
    outside = fitted.updated["r̂ out-of-fold"](case.inputs, fitted.folds)[0].exp().numpy()

    def quality(probs: np.ndarray, method: str) -> np.ndarray:
        return -get_label_quality_scores(labels, probs, method=method)

    return {
        "loss | self-confidence": (ours["loss"], quality(inside, "self_confidence")),
        "margin | normalised margin": (ours["margin"], quality(inside, "normalized_margin")),
        "out-of-fold loss | self-confidence, out-of-fold": (
            ours["out-of-fold loss"],
            quality(outside, "self_confidence"),
        ),
        "r̂ out-of-fold | confidence-weighted entropy, out-of-fold": (
            ours["r̂ out-of-fold"],
            quality(outside, "confidence_weighted_entropy"),
        ),
    }


def captum(fitted: Fitted, ours: dict[str, np.ndarray]) -> Pairs:
    from captum.influence import TracInCP

    case = fitted.case
    network = copy.deepcopy(fitted.base)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "base.pt")
        torch.save(network.state_dict(), path)
        tracin = TracInCP(
            network,
            TensorDataset(case.inputs, case.labels),
            [path],
            checkpoints_load_func=_load,
            loss_fn=nn.CrossEntropyLoss(reduction="none"),
            batch_size=100,
        )
        influence = tracin.influence(fitted.failures)  # (M, N)
    return {"gradient product | TracInCP": (gradient_product(fitted), -_summed(influence, 0))}


def dattri(fitted: Fitted, ours: dict[str, np.ndarray]) -> Pairs:
    from dattri.algorithm.influence_function import IFAttributorExplicit
    from dattri.algorithm.tracin import TracInAttributor
    from dattri.task import AttributionTask

    case, network = fitted.case, copy.deepcopy(fitted.base)

    def loss(parameters: dict[str, Tensor], row: tuple[Tensor, Tensor]) -> Tensor:
        inputs, label = row  # of one sample, or of a batch
        logits = torch.func.functional_call(network, parameters, inputs.reshape(-1, *case.shape))
        return F.cross_entropy(logits, label.reshape(-1))

    data, failures = _loaders(fitted)
    weights = network.state_dict()
    task = AttributionTask(loss_func=loss, model=network, checkpoints=weights)
    products = TracInAttributor(task, weight_list=torch.ones(1), normalized_grad=False)
    products.projector_kwargs = None  # it has no argument for this; it projects to 512 dimensions
    last = list(dict(network.named_parameters()))[-2:]
    exact = IFAttributorExplicit(
        task, layer_name=last, regularization=fitted.case.setting.weight_decay
    )
    exact.cache(data)
    return {
        "gradient product | Grad-Dot": (
            gradient_product(fitted),
            -_summed(products.attribute(data, failures), 1),
        ),
        "linear influence | Hessian of the last layer": (
            ours["linear influence"],
            -_summed(exact.attribute(data, failures), 1),
        ),
    }


def pydvl(fitted: Fitted, ours: dict[str, np.ndarray]) -> Pairs:
    from pydvl.influence.torch import EkfacInfluence

    case = fitted.case
    model = EkfacInfluence(
        copy.deepcopy(fitted.base), hessian_regularization=case.setting.weight_decay, progress=False
    ).fit(_loaders(fitted)[0])
    values = model.influences(*fitted.failures, case.inputs, case.labels)  # (M, N)
    return {"linear influence | EK-FAC": (ours["linear influence"], -_summed(values, 0))}


def laplace_torch(fitted: Fitted, ours: dict[str, np.ndarray]) -> Pairs:
    """Compare draws of p(W | D) as they are, and r_hat with laplace-torch's covariances.

    laplace-torch has no way to move the mean to F's labels, so the mean of p(W | D, F) is
    ours, and its covariance is the curvature of D and F there.
    """
    from laplace import Laplace

    case, base = fitted.case, fitted.base
    both = last_layer_posteriors(case, base, fitted.failures)
    targets = case.targets(case.labels)
    mine, again = (_our_draws(fitted, both, place) for place in (0, 1))
    theirs = []
    for posterior, more in zip(both, ((), fitted.failures), strict=True):
        network = _with_head(base, posterior.mean)
        fitted_there = Laplace(
            network,
            "classification",
            subset_of_weights="last_layer",
            hessian_structure="full",
            prior_precision=LAPLACE_PRIOR * case.setting.precision,
        )
        fitted_there.fit(_loader(fitted, more))
        theirs.append(_drawn_logits(fitted_there, network, case.inputs, case.seed))
    return {
        "E[H] under p(W|D) | the same": (
            expected_loss(mine[0], targets).numpy(),
            expected_loss(theirs[0], targets).numpy(),
        ),
        "r̂ Laplace | r̂ of its draws": (
            r_hat(mine[1], mine[0], targets).numpy(),
            r_hat(theirs[1], theirs[0], targets).numpy(),
        ),
        # What of the disagreement is the luck of 300 draws.
        "r̂ Laplace | ours, other draws": (
            r_hat(mine[1], mine[0], targets).numpy(),
            r_hat(again[1], again[0], targets).numpy(),
        ),
    }


def _our_draws(fitted: Fitted, both: tuple[last_layer.LastLayer, ...], place: int) -> list[Tensor]:
    """Return log-probabilities (S, B, K) under p(W | D) and p(W | D, F), from the same noise."""
    rng = generator(fitted.case.seed, "libraries", place)
    noise = torch.from_numpy(rng.standard_normal((DRAWS, both[0].mean.numel())))
    draws = (last_layer.draw(posterior, noise) for posterior in both)
    return [posteriors.last_layer(fitted.base, each)(fitted.case.inputs) for each in draws]


def gradient_product(fitted: Fitted) -> np.ndarray:
    """Return linear influence with a constant curvature: the product of two gradients."""
    network = still(fitted.base)
    direction = summed_gradient(network, trainable(network), *fitted.failures, chunk=256)
    mixes = fitted.case.inputs, fitted.case.targets(fitted.case.labels)
    return updates.loss_slopes(fitted.base, direction, mixes).numpy()


def _load(network: nn.Module, path: str) -> float:
    network.load_state_dict(torch.load(path, weights_only=True))
    return 1.0


def _summed(influence: Tensor, failures_along: int) -> np.ndarray:
    return influence.detach().sum(failures_along).numpy()


def _loaders(fitted: Fitted) -> tuple[DataLoader, DataLoader]:
    return _loader(fitted, ()), DataLoader(TensorDataset(*fitted.failures), batch_size=100)


def _loader(fitted: Fitted, more: tuple[Tensor, ...]) -> DataLoader:
    rows = [fitted.case.inputs, fitted.case.labels]
    if more:
        rows = [torch.cat(pair) for pair in zip(rows, more, strict=True)]
    return DataLoader(TensorDataset(*rows), batch_size=100)


def _with_head(base: nn.Module, mean: Tensor) -> nn.Module:
    """Return a copy of the network whose last layer has these weights, (K, D + 1)."""
    network = copy.deepcopy(base)
    layer = [part for part in network.modules() if isinstance(part, nn.Linear)][-1]
    with torch.no_grad():
        layer.weight.copy_(mean[:, :-1])
        layer.bias.copy_(mean[:, -1])
    return network


def _drawn_logits(fitted_there, network: nn.Module, inputs: Tensor, seed: int) -> Tensor:
    """Return the log-probabilities (S, B, K) of draws of the last layer."""
    with torch_stream(seed, "laplace-torch"):
        draws = fitted_there.sample(DRAWS).float()  # weights (K D), then biases (K)
    features, _ = last_layer.split_head(network)(inputs)
    num_classes = len(last_layer.split_head(network).mean)
    weight = draws[:, :-num_classes].view(DRAWS, num_classes, -1)
    logits = torch.einsum("bd,skd->sbk", features, weight) + draws[:, None, -num_classes:]
    return logits.log_softmax(-1)
