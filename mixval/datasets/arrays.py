"""Arrays: scikit-learn's digits, and one's own in an .npz file."""

from pathlib import Path

import numpy as np
import torch

from mixval.datasets.checks import COLOURS, checked, count_classes
from mixval.errors import UserError
from mixval.types import Part, Source


def digits() -> Source:
    """Return scikit-learn's 1797 handwritten digits of 8 x 8 pixels; they come with the package."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images * 15).to(torch.uint8)[:, None]  # 0..16 -> 0..240
    labels = torch.from_numpy(bunch.target).long()
    return Source(Part(images, labels, torch.arange(len(labels))), None, tuple("0123456789"))


def npz(*, path: str) -> Source:
    """Return your own arrays: images (N, H, W[, C]) uint8 and labels (N,), also *_test if given."""
    arrays = _read_npz(Path(path))
    train = _part(arrays["images"], arrays["labels"], 0, path)
    test = None
    if "images_test" in arrays:
        test = _part(arrays["images_test"], arrays["labels_test"], len(train), path)
    count = count_classes(train.labels, path)
    return checked(Source(train, test, tuple(str(k) for k in range(count))), path)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise UserError(
            f"data.source.path: no file {str(path)!r}; give an .npz with images and labels"
        )
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # numpy, zipfile and zlib each raise their own
        raise UserError(f"{path}: not a readable .npz file of plain arrays ({error})") from error
    needed = {"images", "labels"} | ({"labels_test"} if "images_test" in arrays else set())
    if missing := needed - arrays.keys():
        raise UserError(f"{path}: has no array {sorted(missing)[0]!r}; it has {sorted(arrays)}")
    return arrays


def _part(images: np.ndarray, labels: np.ndarray, first_id: int, path: str) -> Part:
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise UserError(
            f"{path}: images must be uint8 (N, H, W[, C]), got {images.dtype} {images.shape}"
        )
    if images.ndim == 4 and images.shape[3] not in COLOURS and images.shape[1] in COLOURS:
        raise UserError(
            f"{path}: images must be (N, H, W[, C]), got {images.shape}, which looks like "
            "(N, C, H, W); save images.transpose(0, 2, 3, 1)"
        )
    if not len(images):
        raise UserError(f"{path}: must hold at least 1 image, got none")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise UserError(
            f"{path}: labels must be integers ({len(images)},), got {labels.dtype} {labels.shape}"
        )
    pixels = torch.from_numpy(images if images.ndim == 4 else images[..., None])
    ids = torch.arange(first_id, first_id + len(labels))
    return Part(pixels.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long(), ids)
