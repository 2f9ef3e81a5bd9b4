"""(train samples, number of classes, generator) -> the samples, some of them damaged.

Damage done on purpose, to see whether it is found: wrong labels, noisy and poisoned inputs,
after Tanno et al. (2022). Nothing is changed in place.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn import functional as F

from mixval.bounds import CountOrZero, InnerFraction, NonNegative
from mixval.errors import UserError
from mixval.fisher import log_likelihood, still
from mixval.types import Part

__all__ = ["annotation_noise", "fgsm_poisoning", "input_noise", "none"]

_ATTACKED_BY = 5000  # samples at most that the network behind fgsm_poisoning is fitted to


def none(part: Part, num_classes: int, rng: np.random.Generator) -> Part:
    """Return the samples as they are."""
    return part


def annotation_noise(
    part: Part,
    num_classes: int,
    rng: np.random.Generator,
    *,
    pairs: list[list[NonNegative]] = [[1, 7, 0.4], [6, 9, 0.3]],
) -> Part:
    """Return labels with classes taken for each other: pairs of (class, class, probability)."""
    chances: dict[tuple[int, int], float] = {}
    for pair in pairs:
        if len(pair) != 3 or pair[0] != int(pair[0]) or pair[1] != int(pair[1]):
            raise UserError(f"pairs: must be [class, class, probability] each, got {pair}")
        chances[int(pair[0]), int(pair[1])] = pair[2]
    _check_classes("pairs", [label for pair in chances for label in pair], num_classes)
    return replace(part, labels=confuse_labels(part.labels, chances, rng)[0])


def input_noise(
    part: Part,
    num_classes: int,
    rng: np.random.Generator,
    *,
    kind: Literal["salt_and_pepper", "gaussian"] = "salt_and_pepper",
    share: InnerFraction = 0.3,
    classes: list[CountOrZero] = [],
    amount: InnerFraction = 0.9,
) -> Part:
    """Return noise on that share of the samples of some classes, or of all if none is named.

    `amount` is the share of the pixels that are hit or, gaussian, the standard deviation as
    a share of white.
    """
    hit, images = _drawn(part, num_classes, rng, share, classes)
    if kind == "salt_and_pepper":
        noisy = salt_and_pepper(images[hit], amount, rng)
    else:
        noisy = gaussian_noise(images[hit], 255 * amount, rng)
    return _exchanged(part, images, hit, noisy)


def fgsm_poisoning(
    part: Part,
    num_classes: int,
    rng: np.random.Generator,
    *,
    share: InnerFraction = 0.3,
    classes: list[CountOrZero] = [],
    epsilon: InnerFraction = 0.3,
) -> Part:
    """Return a share of the samples attacked by FGSM, each pixel by epsilon as a share of white.

    The attacked network is a softmax regression on the pixels, fitted to these samples: what
    fools it fools other networks of the same data, too, and the data stay a pure function of
    their settings. The labels stay right.
    """
    hit, images = _drawn(part, num_classes, rng, share, classes)
    network = _softmax_regression(images, part.labels, num_classes)
    moved = fgsm(network, images[hit].float() / 255, part.labels[hit], epsilon)
    noisy = (255 * moved.clamp(0, 1)).round().to(torch.uint8)
    return _exchanged(part, images, hit, noisy)


def confuse_labels(
    labels: Tensor, pairs: Mapping[tuple[int, int], float], rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return the labels (N,) with classes taken for each other, and which were changed (N,).

    `pairs` {(1, 7): 0.4}: each 1 becomes a 7 with probability 0.4, and each 7 a 1. A
    random number is drawn for every sample, so one pair's flips do not depend on another's.
    """
    _check_pairs(pairs)
    chance = torch.zeros(len(labels), dtype=torch.float64)
    other = labels.clone()
    for (one, two), probability in pairs.items():
        is_one, is_two = labels == one, labels == two
        chance[(is_one | is_two).cpu()] = probability
        other[is_one], other[is_two] = two, one
    flipped = (torch.from_numpy(rng.random(len(labels))) < chance).to(labels.device)
    return torch.where(flipped, other, labels), flipped


def salt_and_pepper(images: Tensor, share: float, rng: np.random.Generator) -> Tensor:
    """Return bytes (N, C, H, W) with a share of the pixels white or black, at even odds.

    A pixel is hit in all its channels.
    """
    _check_bytes(images)
    _check_probability("share", share)
    num_images, _, height, width = images.shape
    draw = torch.from_numpy(rng.random((num_images, 1, height, width), dtype=np.float32))
    draw = draw.to(images.device)
    return images.masked_fill(draw < share, 0).masked_fill(draw < share / 2, 255)


def gaussian_noise(images: Tensor, std: float, rng: np.random.Generator) -> Tensor:
    """Return bytes (N, C, H, W) with normal noise of `std` grey levels (of 255), clipped."""
    _check_bytes(images)
    if not (np.isfinite(std) and std >= 0):
        raise UserError(f"std: must be finite and >= 0, got {std}")
    noise = torch.from_numpy(rng.standard_normal(tuple(images.shape), dtype=np.float32))
    return (images + std * noise.to(images.device)).round_().clamp_(0, 255).to(torch.uint8)


def fgsm(model: nn.Module, inputs: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    r"""Return $x + \epsilon\, \mathrm{sign}(-\nabla_x \log p(y|x,\theta))$ (Goodfellow 2015).

    The network is used in eval mode. What a pixel may be depends on how the inputs (B, ...)
    were normalised, so clipping is left to the caller.
    """
    if not (np.isfinite(epsilon) and epsilon >= 0):
        raise UserError(f"epsilon: must be finite and >= 0, got {epsilon}")
    network = still(model)
    device = next(network.parameters()).device

    def loss(inputs: Tensor) -> Tensor:
        return -log_likelihood(network, {}, inputs, labels.to(device)).sum()

    slope: Tensor = grad(loss)(inputs.to(device))
    if not bool(slope.isfinite().all()):
        raise FloatingPointError("the gradient of the inputs is not finite; look for bad pixels")
    return inputs + epsilon * slope.sign().to(inputs.device)


def _drawn(
    part: Part, num_classes: int, rng: np.random.Generator, share: float, classes: list[int]
) -> tuple[Tensor, Tensor]:
    """Return which samples are hit, each of the classes with probability `share`; and all images.

    A random number is drawn for every sample, so one class's do not depend on another's.
    """
    _check_classes("classes", classes, num_classes)
    if not isinstance(part.images, Tensor):
        raise UserError("data.images: must be memory where the images are corrupted, got stream")
    hit = torch.from_numpy(rng.random(len(part)) < share)
    if classes:
        hit &= torch.isin(part.labels, torch.tensor(classes))
    return hit, part.images


def _exchanged(part: Part, images: Tensor, hit: Tensor, noisy: Tensor) -> Part:
    together = images.clone()
    together[hit] = noisy
    return replace(part, images=together)


def _softmax_regression(images: Tensor, labels: Tensor, num_classes: int) -> nn.Module:
    """Return the linear network of pixels in [0, 1] that fits labels (N,), lightly penalised."""
    places = torch.linspace(0, len(images) - 1, min(len(images), _ATTACKED_BY)).long()
    inputs, labels = images[places].float().flatten(1) / 255, labels[places]
    layer: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call] # draws no weights
        nn.Linear, inputs.shape[1], num_classes
    )
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(layer(inputs), labels) + 1e-3 * layer.weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    return nn.Sequential(nn.Flatten(), layer)


def _check_classes(field: str, classes: list[int], num_classes: int) -> None:
    for label in classes:
        if label >= num_classes:
            raise UserError(f"{field}: must name classes from 0 to {num_classes - 1}, got {label}")


def _check_pairs(pairs: Mapping[tuple[int, int], float]) -> None:
    named = [label for pair in pairs for label in pair]
    if len(set(named)) < len(named):
        raise UserError(f"pairs: must name each class once, got {sorted(pairs)}")
    for pair, probability in pairs.items():
        _check_probability(f"pairs[{pair}]", probability)


def _check_probability(field: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{field}: must be from 0 to 1, got {value}")


def _check_bytes(images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise UserError(
            f"images: must be bytes (N, C, H, W), got {images.dtype} of {tuple(images.shape)}"
        )
