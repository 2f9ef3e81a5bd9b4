"""Damage done on purpose, to see whether it is found: wrong labels, noisy and poisoned inputs.

Random numbers come from the caller's generator; nothing is changed in place. Which samples
are damaged (a class, a share of it) is the caller's choice.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad

from mixval.errors import UserError
from mixval.fisher import log_likelihood, still


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
