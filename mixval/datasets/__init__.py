"""Name -> labelled images, as they come; `splits.py` divides them for one seed.

The options, one family to a file; what they share is in `checks`, `decoding`, `finding`,
`packs` and `trees`.
"""

from mixval.datasets.arrays import digits, npz
from mixval.datasets.cifar import cifar10, cifar100
from mixval.datasets.fashion import fashion20, fashion_mnist
from mixval.datasets.folders import image_folder, tiny_imagenet
from mixval.datasets.photos import caltech101, dtd, fgvc_aircraft
from mixval.datasets.stl import stl10

__all__ = [
    "caltech101",
    "cifar10",
    "cifar100",
    "digits",
    "dtd",
    "fashion20",
    "fashion_mnist",
    "fgvc_aircraft",
    "image_folder",
    "npz",
    "stl10",
    "tiny_imagenet",
]
