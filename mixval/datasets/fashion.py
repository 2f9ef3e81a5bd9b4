"""Fashion-MNIST, of 28 x 28 grey pixels, and a fifth of it."""

import gzip
from pathlib import Path

import numpy as np
import torch

from mixval.dataset_facts import FACTS
from mixval.datasets.checks import whole
from mixval.datasets.finding import damaged, locate
from mixval.fingerprints import array_fingerprint
from mixval.seeding import generator
from mixval.types import Part, Source

_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def fashion20(*, root: str | None = None, download: bool = False) -> Source:
    """Return a fifth of Fashion-MNIST: 1,200 train images a class, the same in every run."""
    source = fashion_mnist(root=root, download=download)
    labels = source.train.labels.numpy()
    each = FACTS["fashion20"].train // len(_CLASSES)
    # Not the seed of the run: `fashion20` is one dataset, and runs differ in how they divide it.
    shuffled = generator(0, "fashion20").permutation(len(labels))
    chosen = [shuffled[labels[shuffled] == k][:each] for k in range(len(_CLASSES))]
    train = source.train.take(np.sort(np.concatenate(chosen)))
    return whole(Source(train, source.test, _CLASSES), "fashion20", FACTS["fashion20"], "")


def fashion_mnist(*, root: str | None = None, download: bool = False) -> Source:
    """Return Fashion-MNIST: 60,000 train and 10,000 test pictures of clothes, 28 x 28 grey."""
    from torchvision.datasets import FashionMNIST

    path = locate(
        "fashion_mnist", root, download, lambda folder: FashionMNIST(folder, download=True)
    )
    train = _part(path, "train", 0)
    test = _part(path, "t10k", len(train))
    digest = array_fingerprint(train.images, train.labels, test.images, test.labels)
    return whole(Source(train, test, _CLASSES), path, FACTS["fashion_mnist"], digest)


def _part(path: Path, split: str, first_id: int) -> Part:
    images = read_idx(path, f"{split}-images-idx3-ubyte")
    labels = read_idx(path, f"{split}-labels-idx1-ubyte")
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise damaged(path, f"{labels.shape} labels of {images.shape} images")
    ids = torch.arange(first_id, first_id + len(labels))
    pixels = torch.from_numpy(images.copy())[:, None]
    return Part(pixels, torch.from_numpy(labels.astype(np.int64)), ids)


def read_idx(folder: Path, name: str) -> np.ndarray:
    """Return the array of an idx file of bytes, compressed (as Debian has it) or not.

    Four bytes: 0, 0, the type (8: uint8), the number of axes; then each length, 32-bit
    big-endian; then the bytes.
    """
    path = folder / name if (folder / name).exists() else folder / f"{name}.gz"
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        axes = content[3]
        shape = np.frombuffer(content, ">i4", axes, offset=4).tolist()
        if content[:3] != b"\0\0\x08":
            raise ValueError("it is no idx file of bytes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except Exception as error:  # gzip, zlib and numpy each raise their own
        raise damaged(path, error) from error
