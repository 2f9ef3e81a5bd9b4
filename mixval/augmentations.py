"""Batched augmentations, on the device, replayable: (images, uniforms) -> images.

Images are (B, C, H, W), bytes in training. `uniforms` (B, NUM_UNIFORMS) are the random
numbers of each image for this epoch; the same numbers make the same view, whatever the
batch and whichever process makes it.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mixval.bounds import CountOrZero, InnerFraction, Positive
from mixval.seeding import generator

__all__ = ["crop_flip", "none", "resized_crop"]

NUM_UNIFORMS = 5  # vertical place, horizontal place, mirror, size, shape


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
    """Shift by up to `pad` pixels (black comes in), and mirror half of the images."""
    batch, channels, height, width = images.shape
    top, left = (uniforms[:, :2] * (2 * pad + 1)).long().clamp(max=2 * pad).unbind(1)
    padded = F.pad(images, (pad, pad, pad, pad))
    tall, wide = padded.shape[2:]
    # Whole rows first, then columns of them: half the time of any other indexing.
    counted = [torch.arange(n, device=images.device) for n in (batch * channels, height, width)]
    rows = counted[0].view(batch, channels, 1) * tall + top.view(-1, 1, 1) + counted[1]
    cut = padded.view(-1, wide).index_select(0, rows.flatten()).view(batch, -1, wide)
    columns = left[:, None] + counted[2]
    if flip:
        columns = torch.where(_mirrored(uniforms), columns.flip(1), columns)
    return cut.gather(2, columns[:, None].expand(-1, cut.shape[1], -1)).view(images.shape)


def resized_crop(
    images: Tensor,
    uniforms: Tensor,
    *,
    smallest: InnerFraction = 0.35,
    stretch: Positive = 1.33,
    flip: bool = True,
) -> Tensor:
    """Zoom into a box of `smallest` to all of the area, up to `stretch` times as wide as high."""
    area = smallest + (1 - smallest) * uniforms[:, 3]
    shape = torch.exp((2 * uniforms[:, 4] - 1) * math.log(stretch)).sqrt()  # of width to height
    shape = shape.clamp(area.sqrt(), area.rsqrt())  # a box of that area fits the image
    width, height = (area.sqrt() * shape).clamp(max=1), (area.sqrt() / shape).clamp(max=1)
    # Where the box's centre may lie, in grid_sample's coordinates from -1 to 1.
    down, right = (1 - height) * (2 * uniforms[:, 0] - 1), (1 - width) * (2 * uniforms[:, 1] - 1)
    width = torch.where(_mirrored(uniforms).squeeze(1), -width, width) if flip else width
    nothing = torch.zeros_like(area)
    rows = (torch.stack([width, nothing, right]), torch.stack([nothing, height, down]))
    theta = torch.stack(rows).permute(2, 0, 1)  # (B, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    views = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return views.to(images.dtype) if images.is_floating_point() else views.round().to(images.dtype)


def _mirrored(uniforms: Tensor) -> Tensor:
    return uniforms[:, 2:3] < 0.5
