"""Augmentations against a loop over single images in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage, stats

from mixval.augmentations import NUM_UNIFORMS, crop_flip, draw_uniforms, none, resized_crop


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


# -- resized_crop -------------------------------------------------------------------------


def zoomed(image: np.ndarray, uniforms: np.ndarray, smallest: float, stretch: float, flip: bool):
    """Return one view: where does the centre of each of its pixels lie in the image?"""
    _, rows, columns = image.shape
    down, right, mirror, size, shape = uniforms.astype(np.float64)
    area, ratio = smallest + (1 - smallest) * size, stretch ** (2 * shape - 1)
    ratio = min(max(ratio, area), 1 / area)  # no side longer than the image, at that area
    height, width = np.sqrt(area / ratio), np.sqrt(area * ratio)
    y = (1 - height) * rows * down + (np.arange(rows) + 0.5) * height - 0.5
    x = (1 - width) * columns * right + (np.arange(columns) + 0.5) * width - 0.5
    places = np.meshgrid(y, x[::-1] if flip and mirror < 0.5 else x, indexing="ij")
    return np.stack([ndimage.map_coordinates(c, places, order=1, mode="nearest") for c in image])


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.tuples(st.integers(2, 9), st.integers(2, 9)),
    st.floats(0.05, 0.95),
    st.floats(1.0, 3.0),
    st.booleans(),
    st.integers(0, 1000),
)
def test_resized_crop_is_the_interpolation_of_single_images(
    batch, channels, size, smallest, stretch, flip, seed
):
    # Catches height and width exchanged (images are not square here), a mirror that also moves
    # the box, corners aligned instead of edges, and black that comes in at the border.
    images = torch.from_numpy(np.random.default_rng(seed).random((batch, channels, *size)))
    uniforms = draw_uniforms(seed, 0, torch.arange(batch))
    got = resized_crop(images.float(), uniforms, smallest=smallest, stretch=stretch, flip=flip)
    for row in range(batch):
        expected = zoomed(images[row].numpy(), uniforms[row].numpy(), smallest, stretch, flip)
        np.testing.assert_allclose(got[row].numpy(), expected, atol=2e-5)


@pytest.mark.parametrize(("top", "left"), [(0, 0), (1, 3), (4, 4), (2, 0)])
def test_resized_crop_is_torchvisions_on_whole_pixels(top, left):
    # Torchvision cuts first: at the edge of the box it does not see the pixels beyond it, so
    # the views agree inside.
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as V

    image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([[top / 4, left / 4, 0.9, 0.0, 0.5]])  # a quarter of the area, square
    got = resized_crop(image, uniforms, smallest=0.25)
    bilinear = InterpolationMode.BILINEAR
    expected = V.resized_crop(image, top, left, 4, 4, [8, 8], bilinear, antialias=False)
    inside = (..., slice(1, -1), slice(1, -1))
    torch.testing.assert_close(got[inside], expected[inside])


@pytest.mark.parametrize(("smallest", "stretch"), [(0.35, 1.33), (0.08, 4 / 3), (0.2, 2.0)])
def test_resized_crop_stays_in_the_image_and_within_its_bounds(smallest, stretch):
    # On an image that holds its own coordinates, two middle pixels of a view say where its box
    # is. Catches boxes that leave the image, and areas or shapes out of bounds.
    rows, columns, batch = 16, 24, 4000
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    images = torch.stack([y, x]).float().expand(batch, 2, rows, columns)
    uniforms = draw_uniforms(0, 0, torch.arange(batch))
    views = resized_crop(images, uniforms, smallest=smallest, stretch=stretch).double()
    spans = []
    for line, count in ((views[:, 0, :, 0], rows), (views[:, 1, 0], columns)):
        middle = count // 2
        step = line[:, middle] - line[:, middle - 1]  # negative where mirrored
        start = line[:, middle] + 0.5 - (middle + 0.5) * step
        low, high = torch.minimum(start, start + count * step), step.abs() * count
        assert low.min() > -1e-4 and (low + high).max() < count + 1e-4
        spans.append(step)
    height, width = spans[0], spans[1].abs()
    area, shape = height * width, width / height
    assert height.min() > 0
    assert smallest - 1e-5 < area.min() < smallest + 0.02 and 0.95 < area.max() < 1 + 1e-5
    assert 1 / stretch - 1e-4 < shape.min() < 0.8 and 1.25 < shape.max() < stretch + 1e-4
    mirrored = spans[1] < 0
    assert torch.equal(mirrored, uniforms[:, 2] < 0.5)
    assert stats.binomtest(int(mirrored.sum()), batch).pvalue > 1e-3
    assert not (resized_crop(images, uniforms, flip=False)[:, 1].diff(dim=2) < -1e-4).any()


def test_resized_crop_rounds_bytes_to_the_nearest():
    # Catches bytes that are cut off (every image half a step darker) or that wrap around.
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 3, 7, 9), dtype=np.uint8)
    images[::2] = rng.choice([0, 255], (25, 3, 7, 9))
    uniforms = draw_uniforms(0, 0, torch.arange(50))
    got = resized_crop(torch.from_numpy(images), uniforms)
    assert got.dtype == torch.uint8
    pairs = zip(images.astype(np.float64), uniforms.numpy(), strict=True)
    expected = np.stack([zoomed(image, one, 0.35, 1.33, True) for image, one in pairs])
    error = got.numpy() - expected
    assert np.abs(error).max() < 0.5 + 1e-3
    assert abs(error.mean()) < 0.01


@pytest.mark.parametrize("chosen", [[0], [4, 1], [5, 4, 3, 2, 1, 0], [2, 2, 2]])
def test_resized_crop_makes_the_same_view_in_any_batch(chosen):
    # As for crop_flip; to the bit, because processes and batch sizes must not change a mix.
    images, uniforms = toy_images(6, 2, 4, 5), draw_uniforms(1, 2, torch.arange(6))
    whole = resized_crop(images, uniforms)
    assert torch.equal(resized_crop(images[chosen], uniforms[chosen]), whole[chosen])


def test_resized_crop_of_the_whole_image_is_the_image():
    images = toy_images(2, 2, 5, 4)
    uniforms = torch.tensor([[0.3, 0.8, 0.9, 1.0, 0.5], [0.3, 0.8, 0.1, 1.0, 0.5]])
    views = resized_crop(images, uniforms)
    torch.testing.assert_close(views[0], images[0])
    torch.testing.assert_close(views[1], images[1].flip(2))


def test_resized_crop_keeps_to_the_smallest_area_where_boxes_must_be_square():
    # 0.9 of the image can't be 1.33 times as wide as high: the shape gives way, not the area.
    uniforms = draw_uniforms(0, 0, torch.arange(2000))
    ramp = torch.arange(32.0)
    sides = []
    for images in (ramp.view(1, -1).expand(32, -1), ramp.view(-1, 1).expand(-1, 32)):
        batch = images.expand(2000, 1, 32, 32).contiguous()
        views = resized_crop(batch, uniforms, smallest=0.9, flip=False)[:, 0]
        steps = views.diff(dim=2 if images.stride(0) == 0 else 1)
        sides.append(steps[:, 8:-8, 8:-8].mean((1, 2)))  # the slope is the side of the box
    area = sides[0] * sides[1]
    assert area.min() > 0.9 - 1e-3 and area.max() < 1 + 1e-3
