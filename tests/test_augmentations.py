"""Augmentations against a loop over single images in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mixval.augmentations import NUM_UNIFORMS, crop_flip, draw_uniforms, none


def toy_images(batch: int, channels: int, height: int, width: int) -> torch.Tensor:
    count = batch * channels * height * width
    return torch.arange(1.0, count + 1).view(batch, channels, height, width)


def cropped_and_flipped(image: np.ndarray, uniforms: np.ndarray, pad: int, flip: bool):
    """Return one view, pixel by pixel: where did it come from in the unpadded image?"""
    _, height, width = image.shape
    down = min(int(uniforms[0] * (2 * pad + 1)), 2 * pad) - pad
    right = min(int(uniforms[1] * (2 * pad + 1)), 2 * pad) - pad
    view = np.zeros_like(image)
    for row in range(height):
        for column in range(width):
            target = width - 1 - column if flip and uniforms[2] < 0.5 else column
            if 0 <= row + down < height and 0 <= column + right < width:
                view[:, row, target] = image[:, row + down, column + right]
    return view


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 4),
    st.booleans(),
    st.integers(0, 1000),
)
def test_crop_flip_is_the_loop_over_images(batch, channels, height, width, pad, flip, seed):
    # Catches rows and columns exchanged (images are not square here), a flip of the padded
    # instead of the cropped image, channels mixed up by the fancy indexing.
    images = toy_images(batch, channels, height, width)
    uniforms = draw_uniforms(seed, 0, torch.arange(batch))
    got = crop_flip(images, uniforms, pad=pad, flip=flip)
    assert got.shape == images.shape
    for row in range(batch):
        one = images[row].numpy()
        expected = cropped_and_flipped(one, uniforms[row].numpy(), pad, flip)
        np.testing.assert_array_equal(got[row].numpy(), expected)


@pytest.mark.parametrize("largest", [np.nextafter(np.float32(1), np.float32(0)), 1.0])
def test_crop_flip_takes_the_largest_uniform(largest):
    # u * 9 rounds up to 9 in float32, one row past the end.
    images = toy_images(1, 1, 8, 8)
    got = crop_flip(images, torch.full((1, NUM_UNIFORMS), float(largest)), pad=4)
    assert torch.equal(got[0, 0, :4, :4], images[0, 0, 4:, 4:])
    assert got[0, 0, 4:].abs().sum() == 0


def test_crop_flip_reaches_every_shift_equally_and_mirrors_half():
    # Catches 2 * pad instead of 2 * pad + 1 shifts, and a flip that always or never happens.
    pad, size, batch = 1, 5, 9000
    images = torch.zeros(batch, 1, size, size)
    images[:, :, 2, 2], images[:, :, 2, 3] = 1.0, 2.0  # a spot and what lies right of it
    views = crop_flip(images, draw_uniforms(0, 0, torch.arange(batch)), pad=pad)
    spots = (views[:, 0] == 1).nonzero()[:, 1:]
    rights = (views[:, 0] == 2).nonzero()[:, 1:]
    counts = np.bincount(3 * (spots[:, 0] - 1) + (spots[:, 1] - 1), minlength=9)
    assert len(counts) == 9
    assert stats.chisquare(counts).pvalue > 1e-3
    mirrored = int((rights[:, 1] < spots[:, 1]).sum())
    assert stats.binomtest(mirrored, batch).pvalue > 1e-3


def test_crop_flip_without_padding_and_flip_is_the_image():
    images = toy_images(3, 2, 4, 5)
    assert torch.equal(
        crop_flip(images, draw_uniforms(0, 0, torch.arange(3)), pad=0, flip=False), images
    )


@pytest.mark.parametrize("chosen", [[0], [4, 1], [5, 4, 3, 2, 1, 0], [2, 2, 2]])
def test_the_same_uniforms_make_the_same_view_in_any_batch(chosen):
    # Catches random numbers looked up by the place in the batch.
    images, uniforms = toy_images(6, 2, 4, 5), draw_uniforms(1, 2, torch.arange(6))
    whole = crop_flip(images, uniforms)
    assert torch.equal(crop_flip(images[chosen], uniforms[chosen]), whole[chosen])


def test_none_is_the_identity():
    images = toy_images(2, 1, 3, 3)
    assert torch.equal(none(images, draw_uniforms(0, 0, torch.arange(2))), images)


def test_uniforms_are_keyed_by_seed_epoch_and_sample():
    # A sample keeps its numbers whoever is beside it: train alone, train + failures, a fold.
    ids = torch.arange(50)
    uniforms = draw_uniforms(3, 4, ids)
    assert uniforms.shape == (50, NUM_UNIFORMS)
    assert torch.equal(uniforms, draw_uniforms(3, 4, ids))
    for chosen in ([7], [3, 49, 3], list(range(10, 20)), [40, 2, 17]):
        assert torch.equal(uniforms[chosen], draw_uniforms(3, 4, ids[chosen]))
    for seed, epoch in ((4, 4), (3, 5), (4, 3)):
        assert not torch.isin(uniforms, draw_uniforms(seed, epoch, ids)).any()


def test_uniforms_are_uniform():
    values = draw_uniforms(0, 0, torch.arange(5000)).numpy()
    for column in values.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(values.T) - np.eye(NUM_UNIFORMS)).max() < 5 / np.sqrt(5000)
