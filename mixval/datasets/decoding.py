"""Image files as squares of one size, decoded when they are asked for."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mixval.datasets.finding import damaged
from mixval.datasets.trees import Tree
from mixval.errors import UserError
from mixval.fingerprints import fingerprint
from mixval.types import Part, StreamedImages

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# More than 8 bits a channel would be cut off, not scaled, so it is refused.
_EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
# What a whole file has near its end; one that lacks it, or is of another kind, is decoded.
_END, _TAIL = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}, 64


class ImageFiles:
    """The decoder of image files: shorter side resized, centre cut out, (C, size, size) uint8."""

    def __init__(
        self, tree: Tree, names: Sequence[str], size: int, *, mode: str = "RGB", banner: int = 0
    ) -> None:
        self.tree, self.names, self.mode = tree, list(names), mode
        self.banner = banner  # rows at the bottom that are not part of the picture
        self.image_shape = (len(mode), size, size)
        try:
            lengths = [tree.num_bytes(name) for name in self.names]
        except (OSError, KeyError) as error:
            raise damaged(tree.path, f"there is no {error}") from error
        self.content = fingerprint([self.names, lengths, size, mode, banner])

    def __call__(self, place: int) -> Tensor:
        return self._opened(place, pixels=True)

    def check(self) -> None:
        """Refuse a file that is not an image or has no end; pixels are decoded only in doubt."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda place: self._opened(place, pixels=False), range(len(self.names))))

    def _opened(self, place: int, *, pixels: bool) -> Tensor:
        name = self.names[place]
        try:
            data = self.tree.read(name)
            with Image.open(io.BytesIO(data)) as image:
                if image.mode not in _EIGHT_BITS:
                    raise UserError(f"mode {image.mode}: save it with 8 bits a channel")
                if not pixels:
                    end = _END.get(image.format or "")
                    if end is None or end not in data[-_TAIL:]:
                        image.load()
                    return torch.empty(0)
                picture = image.convert(self.mode)
                if self.banner:
                    picture = picture.crop((0, 0, picture.width, picture.height - self.banner))
                return to_tensor(square(picture, self.image_shape[1]))
        except UnidentifiedImageError as error:
            raise UserError(f"{self.tree.path}: {name} is not an image") from error
        except Exception as error:  # decoders raise what they like at a damaged file
            reason = " ".join(str(error).split())
            raise UserError(f"{self.tree.path}: {name} can't be read ({reason})") from error


def square(image: Image.Image, size: int) -> Image.Image:
    """Return the centre of the image whose shorter side is `size`, as torchvision cuts it."""
    width, height = image.size
    short = min(width, height)
    if short != size:
        width, height = (int(size * side / short) for side in (width, height))
        image = image.resize((width, height), Image.Resampling.BILINEAR)  # antialiased
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def to_tensor(image: Image.Image) -> Tensor:
    """Return a grey or RGB image as (C, H, W) uint8."""
    pixels = np.array(image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def file_part(
    files: ImageFiles, labels: Sequence[int], *, first_id: int = 0, ids: Sequence[int] | None = None
) -> Part:
    """Return the files with their labels; ids count from `first_id` unless they are given."""
    assert len(files.names) == len(labels)
    numbered = torch.arange(first_id, first_id + len(labels)) if ids is None else torch.tensor(ids)
    images = StreamedImages.of(files, len(labels))
    return Part(images, torch.tensor(labels, dtype=torch.int64), numbered.long())
