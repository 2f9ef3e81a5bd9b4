"""Batched augmentations, on the device, replayable: (images, uniforms) -> images.

Images are (B, C, H, W) floats. `uniforms` (B, NUM_UNIFORMS) are the random numbers of
each image for this epoch; the same numbers make the same view, whatever the batch.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mixval.bounds import CountOrZero
from mixval.seeding import generator

__all__ = ["crop_flip", "none"]

NUM_UNIFORMS = 3


def draw_uniforms(seed: int, epoch: int, ids: Tensor) -> Tensor:
    """Return the random numbers of samples in one epoch, (N, NUM_UNIFORMS), by their ids."""
    rng = generator(seed, "augmentation", epoch)
    every = rng.random((int(ids.max()) + 1, NUM_UNIFORMS), dtype=np.float32)
    return torch.from_numpy(every)[ids.cpu()]


def none(images: Tensor, uniforms: Tensor) -> Tensor:
    """Return the images as they are."""
    return images


def crop_flip(
    images: Tensor, uniforms: Tensor, *, pad: CountOrZero = 4, flip: bool = True
) -> Tensor:
    """Shift by up to `pad` pixels (zeros come in), and mirror half of the images."""
    batch, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    top, left = (uniforms[:, :2] * (2 * pad + 1)).long().clamp(max=2 * pad).unbind(1)
    rows = top[:, None] + torch.arange(height, device=images.device)
    cols = left[:, None] + torch.arange(width, device=images.device)
    if flip:
        cols = torch.where(uniforms[:, 2:3] < 0.5, cols.flip(1), cols)
    sample = torch.arange(batch, device=images.device)
    picked = padded[sample[:, None, None], :, rows[:, :, None], cols[:, None, :]]
    return picked.permute(0, 3, 1, 2)  # (B, H, W, C) in memory: channels last
