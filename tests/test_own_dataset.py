"""Any torch Dataset becomes a source; what can't is refused with what to change."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

import mixval
from mixval.errors import UserError
from mixval.sources import place_images

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (30, 6, 5, 3), dtype=np.uint8)
LABELS = (np.arange(30) * 7 % 3).tolist()


class Pets(Dataset):
    """Thirty pictures in the kind that a test asks for."""

    def __init__(self, kind="pil", labels=LABELS, pixels=PIXELS):
        self.kind, self.answers, self.pixels = kind, labels, pixels

    def __len__(self):
        return len(self.answers)

    def __getitem__(self, place):
        array = self.pixels[place]
        image = {
            "pil": lambda: Image.fromarray(array),
            "grey": lambda: Image.fromarray(array[..., 0]),
            "rgba": lambda: Image.fromarray(array).convert("RGBA"),
            "tensor": lambda: torch.from_numpy(array).permute(2, 0, 1),
            "array": lambda: array,
            "flat": lambda: array[..., 0],
            "float": lambda: torch.rand(3, 6, 5),
            "random": lambda: np.random.default_rng().integers(0, 256, (6, 5, 3), dtype=np.uint8),
            "sizes": lambda: array[: 6 - place // 29],
            "name": lambda: "pets/1.jpg",
        }[self.kind]()
        return image, self.answers[place]


class KnowsLabels(Pets):
    @property
    def targets(self):
        return self.answers


class Transformed(KnowsLabels):
    """As with a target_transform: the items say something else than .targets."""

    def __getitem__(self, place):
        image, label = super().__getitem__(place)
        return image, 2 - label


@pytest.mark.parametrize("kind", ["pil", "grey", "rgba", "tensor", "array", "flat"])
def test_images_of_every_kind_keep_their_pixels_and_labels(kind):
    source = place_images(mixval.from_dataset(Pets(kind)), "memory")
    wanted = PIXELS[..., :1] if kind in ("grey", "flat") else PIXELS
    assert np.array_equal(source.train.images.permute(0, 2, 3, 1).numpy(), wanted)
    assert source.train.labels.tolist() == LABELS
    assert source.classes == ("0", "1", "2")
    assert source.test is None and source.val is None


@pytest.mark.parametrize("kind", [KnowsLabels, Transformed])
def test_labels_are_those_of_the_items(kind):
    # Catches a target_transform that is overlooked because .targets is quicker to read.
    dataset = kind()
    source = mixval.from_dataset(dataset, classes=["ant", "bee", "cat"])
    assert source.train.labels.tolist() == [dataset[k][1] for k in range(30)]
    assert source.classes == ("ant", "bee", "cat")


def test_splits_and_subsets_have_ids_of_their_own():
    whole = Pets()
    parts = [Subset(whole, range(*ends)) for ends in ((0, 18), (18, 24), (24, 30))]
    source = mixval.from_dataset(parts[0], parts[2], val=parts[1])
    assert [len(p) for p in (source.train, source.val, source.test)] == [18, 6, 6]
    ids = torch.cat([source.train.ids, source.val.ids, source.test.ids])
    assert ids.tolist() == [*range(30)]
    assert np.array_equal(
        source.test.images[torch.tensor([2])][0].permute(1, 2, 0).numpy(), PIXELS[26]
    )


def test_tensor_datasets_are_taken():
    images = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    source = mixval.from_dataset(TensorDataset(images, torch.tensor(LABELS)))
    assert torch.equal(source.train.images[torch.arange(30)], images)


def test_the_fingerprint_sees_length_labels_and_sampled_pixels():
    one = mixval.from_dataset(Pets()).train.fingerprint
    assert mixval.from_dataset(Pets()).train.fingerprint == one
    changed = PIXELS.copy()
    changed[17, 0, 0, 0] ^= 1
    assert mixval.from_dataset(Pets(pixels=changed)).train.fingerprint != one
    turned = [*LABELS[:-1], (LABELS[-1] + 1) % 3]
    assert mixval.from_dataset(Pets(labels=turned)).train.fingerprint != one
    assert mixval.from_dataset(Subset(Pets(), range(29))).train.fingerprint != one


BAD = {
    "float": (lambda: Pets("float"), "float32 Tensor; leave ToTensor and Normalize out"),
    "random": (lambda: Pets("random"), "another image each time; augment by"),
    "name": (lambda: Pets("name"), "got str"),
    "sizes": (lambda: Pets("sizes"), "item 29: is (3, 5, 5), item 0 (3, 6, 5)"),
    "empty": (lambda: Subset(Pets(), []), "has no item"),
    "gap": (lambda: Pets(labels=[0, 2] * 15), "class 1 has no image"),
    "one class": (lambda: Pets(labels=[0] * 30), "one class only"),
    "negative": (lambda: Pets(labels=[-1, 0, 1] * 10), ">= 0, got -1"),
    "words": (lambda: Pets(labels=["cat"] * 30), "item 0: must be (image, whole number), got"),
    "alone": (
        lambda: [torch.zeros(3, 4, 4, dtype=torch.uint8)] * 4,
        "must be (image, whole number), got Tensor",
    ),
    "dictionaries": (lambda: [{"image": 0, "label": 1}] * 4, "got dict"),
    "iterable": (lambda: iter(Pets()), "map-style"),
    "raises": (lambda: Subset(Pets(), [0, 99]), "item 1: IndexError"),
    "colours last": (lambda: [(torch.zeros(6, 5, 3, dtype=torch.uint8), 0)], "permute(2, 0, 1)"),
}


@pytest.mark.parametrize("case", BAD)
def test_datasets_that_can_not_be_used_say_what_to_change(case):
    make, fragment = BAD[case]
    with pytest.raises(UserError) as caught:
        mixval.from_dataset(make())
    assert fragment in str(caught.value) and "\n" not in str(caught.value)


def test_labels_beyond_the_classes_and_other_test_images_are_refused():
    with pytest.raises(UserError, match="among the 2 classes, got 2"):
        mixval.from_dataset(Pets(), classes=["a", "b"])
    with pytest.raises(UserError, match="test images are"):
        mixval.from_dataset(Pets(), Pets("grey"))
    with pytest.raises(UserError, match="class d has no image"):
        mixval.from_dataset(Pets(), classes="abcd")


MODULE = """
import mixval
import numpy as np
from torch.utils.data import Dataset

class Stripes(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        rng = np.random.default_rng(place)
        image = rng.integers(0, 128, (8, 8), dtype=np.uint8)
        image[place % 2 :: 2] += 127
        return image, place % 2

def stripes(*, count: int = 80):
    return mixval.from_dataset(Stripes(count), Stripes(20))
"""


@pytest.mark.parametrize("images", ["auto", "stream"])
def test_a_dataset_from_python_is_run_from_the_command_line(mixval, tmp_path, images):
    # mixval here is the runner of the command.
    (tmp_path / "my_data.py").write_text(MODULE)
    (tmp_path / "small.yaml").write_text(
        "name: small\n"
        "data: {train: 40, val_f: 16, val_dev: 16}\n"
        "model: {name: mlp, hidden: [8]}\n"
        "training: {epochs: 2, batch_size: 10, lr: 0.05}\n"
        "arms: {erm: {alpha: 0}, all: {alpha: 1, control: erm}}\n"
        "seeds: [0, 1]\n"
        "engine: {device: cpu, workers: 1}\n"
    )
    words = ["--data.source", "my_data:stripes", "--data.images", images, "--out", "out"]
    finished = mixval("run", "small.yaml", *words)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "out" / "report.html").is_file()
    refused = mixval("run", "small.yaml", *words[:1], "{name: my_data:stripes, count: x}")
    assert refused.returncode == 2 and "count" in refused.stderr
