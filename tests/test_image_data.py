"""Named datasets in small, folders of images, decoding, and what is refused before training."""

import gzip
import shutil
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import miniatures
import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image
from torchvision.transforms import v2

from mixval import dataset_facts, datasets
from mixval.datasets.decoding import ImageFiles, square, to_tensor
from mixval.datasets.fashion import read_idx
from mixval.datasets.trees import Folder
from mixval.errors import UserError
from mixval.sources import place_images
from mixval.types import Part

NAMES = sorted(miniatures.SIZES)


@pytest.fixture
def lay_out(tmp_path, monkeypatch):
    """Return a function that writes a miniature below tmp_path and returns that root."""
    monkeypatch.delenv("MIXVAL_DATA", raising=False)
    return lambda name: str(miniatures.lay_out(name, tmp_path, monkeypatch))


def held(source):
    return place_images(source, "memory")


def samples(part):
    """Return labels and pixels in an order of their own, to compare parts that differ in theirs."""
    pairs = zip(part.labels.tolist(), part.images, strict=True)
    return sorted((label, image.numpy().tobytes()) for label, image in pairs)


def refusal(call, *args, **parameters) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **parameters)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- decoding -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 16, 20, 33])
@pytest.mark.parametrize("shape", [(16, 16), (21, 16), (16, 37), (64, 48), (17, 100)])
def test_squares_are_cut_as_torchvision_cuts_them(shape, size):
    # Catches a squeezed image, another filter, and a crop that is off by one.
    image = Image.fromarray(miniatures.pixels(shape[1], shape[0], 3))
    wanted = v2.CenterCrop(size)(v2.Resize(size, antialias=True)(image))
    assert np.array_equal(np.asarray(square(image, size)), np.asarray(wanted))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_decoded_files_are_channels_first_bytes(tmp_path, mode):
    # Catches rows read as channels.
    miniatures.save_image(tmp_path / "a.png", (16, 16))
    files = ImageFiles(Folder(tmp_path), ["a.png"], 16, mode=mode)
    wanted = np.asarray(Image.open(tmp_path / "a.png").convert(mode)).reshape(16, 16, -1)
    assert files.image_shape == (len(mode), 16, 16)
    assert np.array_equal(files(0).numpy(), wanted.transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK"])
def test_every_eight_bit_mode_becomes_rgb(tmp_path, mode):
    # Catches a photo collection that fails at its one grey or transparent image.
    name = "a.tif" if mode == "CMYK" else "a.png"
    Image.fromarray(miniatures.pixels(9, 9, 3)).convert(mode).save(tmp_path / name)
    assert ImageFiles(Folder(tmp_path), [name], 9)(0).shape == (3, 9, 9)


def test_sixteen_bits_a_channel_are_refused_by_name(tmp_path):
    # Catches pictures that become white: PIL cuts values off at 255.
    deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    Image.fromarray(deep).save(tmp_path / "deep.png")
    files = ImageFiles(Folder(tmp_path), ["deep.png"], 8)
    for call in (files.check, lambda: files(0)):
        assert "deep.png" in (message := refusal(call)) and "8 bits" in message


def test_the_fingerprint_of_files_sees_names_sizes_and_how_they_are_decoded(tmp_path):
    # Catches artifacts that are reused for other images.
    for name in ("a.png", "b.png"):
        miniatures.save_image(tmp_path / name)

    def make(names=("a.png", "b.png"), size=8, **more):
        return ImageFiles(Folder(tmp_path), names, size, **more).content

    first = make()
    others = {make(("b.png", "a.png")), make(("a.png",)), make(size=9), make(mode="L")}
    others |= {make(banner=2)}
    with (tmp_path / "b.png").open("ab") as file:
        file.write(b"more")
    others.add(make())
    assert len(others | {first}) == 7


# -- named datasets, in small -------------------------------------------------------------


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_what_torchvision_reads(name, lay_out):
    root = lay_out(name)
    source = getattr(datasets, name)(root=root)
    dataset = getattr(torchvision.datasets, name.upper())
    for part, train in ((source.train, True), (source.test, False)):
        oracle = dataset(root, train=train)
        assert np.array_equal(part.images.permute(0, 2, 3, 1).numpy(), oracle.data)
        assert part.labels.tolist() == oracle.targets
    assert source.classes == ("x", "y", "z")


@pytest.mark.parametrize("fold", [None, 0, 9])
def test_stl_is_what_torchvision_reads_and_the_other_folds_are_validation(fold, lay_out):
    # Catches columns read as rows, labels from 1, and a fold that is validated on itself.
    root = lay_out("stl10")
    source = datasets.stl10(fold=fold, root=root)
    oracle = torchvision.datasets.STL10(root, "train", folds=fold)
    order = source.train.ids.argsort()
    mine = source.train.images[order].numpy()
    if fold is None:
        assert np.array_equal(mine, oracle.data)
        assert source.train.labels.tolist() == oracle.labels.tolist()
        assert source.val is None
    else:
        chosen = np.loadtxt(Path(root) / "stl10_binary/fold_indices.txt", dtype=int)[fold]
        assert source.train.ids.tolist() == sorted(chosen.tolist())
        assert np.array_equal(mine, oracle.data[np.argsort(chosen)])
        assert len(source.val) == 12
        assert not torch.isin(source.val.ids, source.train.ids).any()
    test = torchvision.datasets.STL10(root, "test")
    assert np.array_equal(source.test.images.numpy(), test.data)
    assert source.test.labels.tolist() == test.labels.tolist()


def test_stl_is_made_smaller_by_the_mean_of_blocks(lay_out):
    root = lay_out("stl10")
    whole, half = datasets.stl10(root=root), datasets.stl10(root=root, size=48)
    blocks = whole.train.images.double().reshape(-1, 3, 48, 2, 48, 2).mean((3, 5))
    assert (half.train.images - blocks).abs().max() <= 0.5
    assert torch.equal(half.train.labels, whole.train.labels)
    assert "at most 96" in refusal(datasets.stl10, root=root, size=97)


def test_fashion_is_what_torchvision_reads(lay_out):
    root = lay_out("fashion_mnist")
    source = datasets.fashion_mnist(root=root)
    for part, train in ((source.train, True), (source.test, False)):
        oracle = torchvision.datasets.FashionMNIST(root, train=train)
        assert torch.equal(part.images.squeeze(1), oracle.data)
        assert torch.equal(part.labels, oracle.targets)
    assert source.classes == tuple(torchvision.datasets.FashionMNIST.classes)


def test_fashion20_is_balanced_the_same_each_time_and_tests_on_all(lay_out):
    root = lay_out("fashion20")
    whole = datasets.fashion_mnist(root=root)
    one, again = datasets.fashion20(root=root), datasets.fashion20(root=root)
    assert torch.bincount(one.train.labels).tolist() == [1] * 10
    assert torch.equal(one.train.ids, again.train.ids)
    assert torch.equal(one.train.images, whole.train.images[one.train.ids])
    assert torch.equal(one.test.images, whole.test.images)


def test_packed_idx_files_are_read_too(lay_out, tmp_path):
    # As Debian installs them.
    folder = Path(lay_out("fashion_mnist")) / "FashionMNIST/raw"
    plain = {path.name: read_idx(folder, path.name) for path in folder.iterdir()}
    for path in list(folder.iterdir()):
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    for name, array in plain.items():
        assert np.array_equal(read_idx(folder, name), array)


@pytest.mark.parametrize("partition", [1, 4, 10])
def test_dtd_has_its_official_partitions_and_ids_of_its_images(partition, lay_out):
    root = lay_out("dtd")
    source = held(datasets.dtd(partition=partition, size=16, root=root))
    cut = v2.Compose([v2.Resize(16, antialias=True), v2.CenterCrop(16)])
    by_id = {}
    for name in ("train", "val", "test"):
        part = getattr(source, name)
        oracle = torchvision.datasets.DTD(root, split=name, partition=partition, transform=cut)
        wanted = torch.stack([to_tensor(image) for image, _ in oracle])
        assert torch.equal(part.images, wanted)
        assert part.labels.tolist() == [label for _, label in oracle]
        by_id |= dict(zip(part.ids.tolist(), part.images, strict=True))
    first = held(datasets.dtd(partition=1, size=16, root=root))
    assert all(
        torch.equal(by_id[i], image)
        for i, image in zip(first.train.ids.tolist(), first.train.images, strict=True)
    )


def test_caltech_is_what_torchvision_reads_without_the_background(lay_out):
    root = lay_out("caltech101")
    source = held(datasets.caltech101(size=16, root=root))
    oracle = torchvision.datasets.Caltech101(root)
    wanted = [to_tensor(square(image.convert("RGB"), 16)) for image, _ in oracle]
    assert torch.equal(source.train.images, torch.stack(wanted))
    assert source.train.labels.tolist() == oracle.y
    assert source.classes == tuple(oracle.categories) == ("ant", "bee", "cat")
    assert source.test is None and source.val is None


def test_aircraft_loses_its_banner_and_joins_train_and_val(lay_out):
    root = lay_out("fgvc_aircraft")
    source = held(datasets.fgvc_aircraft(size=30, root=root))
    for name in ("train", "val", "test"):
        part = getattr(source, name)
        oracle = torchvision.datasets.FGVCAircraft(root, split=name)
        wanted = [to_tensor(square(image.crop((0, 0, 60, 40)), 30)) for image, _ in oracle]
        assert torch.equal(part.images, torch.stack(wanted))
        assert part.labels.tolist() == [label for _, label in oracle]
    joined = held(datasets.fgvc_aircraft(size=30, root=root, trainval=True))
    assert joined.val is None
    assert torch.equal(joined.train.ids, torch.cat([source.train.ids, source.val.ids]))
    assert torch.equal(joined.train.images, torch.cat([source.train.images, source.val.images]))


def sort_into_class_folders(folder: Path) -> None:
    """Turn the distributed layout of Tiny-ImageNet into torchvision's ImageFolder."""
    for line in (folder / "val/val_annotations.txt").read_text().splitlines():
        name, wnid, *_ = line.split("\t")
        (folder / "val" / wnid).mkdir(exist_ok=True)
        shutil.move(folder / "val/images" / name, folder / "val" / wnid / name)
    (folder / "val/images").rmdir()
    for images in folder.glob("train/*/images"):
        for path in images.iterdir():
            shutil.move(path, images.parent / path.name)
        images.rmdir()


def test_tiny_imagenet_is_read_as_distributed_and_as_an_image_folder(lay_out):
    # Catches labels in the order of wnids.txt on one side and of folders on the other.
    root = lay_out("tiny_imagenet")
    folder = Path(root) / "tiny-imagenet-200"
    distributed = held(datasets.tiny_imagenet(root=root))
    sort_into_class_folders(folder)
    sorted_ = held(datasets.tiny_imagenet(root=root))
    for name, split in (("train", "train"), ("test", "val")):
        oracle = torchvision.datasets.ImageFolder(folder / split)
        part = getattr(sorted_, name)
        assert torch.equal(part.images, torch.stack([to_tensor(image) for image, _ in oracle]))
        assert part.labels.tolist() == oracle.targets
        assert samples(part) == samples(getattr(distributed, name))


# -- what is not there, or not whole ------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_dataset_is_one_line_with_what_to_put_where(name, tmp_path, monkeypatch):
    monkeypatch.delenv("MIXVAL_DATA", raising=False)
    monkeypatch.setitem(dataset_facts.FACTS, name, replace(dataset_facts.FACTS[name], system=""))
    if name == "fashion20":
        monkeypatch.setitem(
            dataset_facts.FACTS,
            "fashion_mnist",
            replace(dataset_facts.FACTS["fashion_mnist"], system=""),
        )
    option = getattr(datasets, name)
    message = refusal(option, root=str(tmp_path / "none"))
    assert str(tmp_path / "none") in message and dataset_facts.FACTS[name].plain in message
    assert "MIXVAL_DATA" in message
    assert dataset_facts.FACTS[name].plain in refusal(option)
    assert ("download: true" in message) == (name != "tiny_imagenet")  # no library fetches it
    if name != "tiny_imagenet":
        assert "download" in refusal(option, download=True)


def test_the_environment_says_where_datasets_lie(lay_out, monkeypatch):
    root = lay_out("cifar10")
    monkeypatch.setenv("MIXVAL_DATA", root)
    assert len(datasets.cifar10().train) == 30
    assert "no cifar10 under" in refusal(datasets.cifar10, root=f"{root}/none")


DAMAGE = {
    "cifar10": "cifar-10-batches-py/data_batch_2",
    "cifar100": "cifar-100-python/train",
    "stl10": "stl10_binary/test_X.bin",
    "fashion_mnist": "FashionMNIST/raw/train-images-idx3-ubyte",
    "caltech101": "caltech101/101_ObjectCategories/bee/image_0002.jpg",
    "dtd": "dtd/dtd/labels/val1.txt",
    "fgvc_aircraft": "fgvc-aircraft-2013b/data/images_variant_test.txt",
    "tiny_imagenet": "tiny-imagenet-200/val/val_annotations.txt",
}


@pytest.mark.parametrize("how", ["cut", "gone"])
@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_a_damaged_or_incomplete_copy_is_refused_by_name(name, how, lay_out):
    # Catches a training on what an interrupted download left.
    root = lay_out(name)
    path = Path(root) / DAMAGE[name]
    if how == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    message = refusal(lambda: held(getattr(datasets, name)(root=root)))
    assert str(Path(root) / DAMAGE[name].split("/")[0]) in message


@pytest.mark.parametrize("name", ["caltech101", "dtd", "fgvc_aircraft", "tiny_imagenet"])
def test_a_missing_image_file_is_refused(name, lay_out):
    # One of 100,000: the count is checked, or the list that names it.
    root = lay_out(name)
    images = sorted(p for p in Path(root).rglob("*.[jJ]*") if "BACKGROUND" not in str(p))
    image = next(p for p in images if "/test/" not in str(p))
    image.unlink()
    assert "damaged or incomplete" in refusal(getattr(datasets, name), root=root)


def test_known_labels_that_differ_are_refused(lay_out, monkeypatch):
    # Counts can be right where the labels are not.
    root = lay_out("fashion_mnist")
    facts = replace(dataset_facts.FACTS["fashion_mnist"], digest="0" * 16)
    monkeypatch.setitem(dataset_facts.FACTS, "fashion_mnist", facts)
    assert "not the known ones" in refusal(datasets.fashion_mnist, root=root)


def test_unequal_classes_are_refused_where_they_are_known_to_be_equal(lay_out):
    root = lay_out("fashion_mnist")
    path = Path(root) / "FashionMNIST/raw/train-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] = 0
    path.write_bytes(content)
    assert "class T-shirt/top has 6 images, not 5" in refusal(datasets.fashion_mnist, root=root)


# -- fetching -----------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    """Return the address that serves tmp_path/server."""
    (tmp_path / "server").mkdir()
    handler = partial(QuietHandler, directory=str(tmp_path / "server"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_download_fetches_once_and_says_why_it_could_not(lay_out, tmp_path, monkeypatch, server):
    # The whole way: torchvision is given the address of a server on this machine.
    root = Path(lay_out("cifar10"))
    archive = miniatures.write_archive(
        tmp_path / "server" / "cifar.tar.xz", root / "cifar-10-batches-py", "cifar-10-batches-py"
    )
    dataset = torchvision.datasets.CIFAR10
    monkeypatch.setattr(dataset, "url", f"{server}/cifar.tar.xz")
    monkeypatch.setattr(dataset, "filename", "cifar.tar.xz")
    monkeypatch.setattr(dataset, "tgz_md5", miniatures.md5(archive))
    new = tmp_path / "new" / "root"
    source = datasets.cifar10(root=str(new), download=True)
    assert source.train.fingerprint == datasets.cifar10(root=str(root)).train.fingerprint
    archive.unlink()
    assert len(datasets.cifar10(root=str(new), download=True).train) == 30
    monkeypatch.setattr(dataset, "url", "http://127.0.0.1:9/cifar.tar.xz")  # nobody listens there
    message = refusal(datasets.cifar10, root=str(tmp_path / "other"), download=True)
    assert "could not be fetched" in message and "cifar-10-batches-py" in message


# -- one's own folder ---------------------------------------------------------------------


def own_folder(root: Path, places: dict[str, int]) -> str:
    for place, count in places.items():
        (root / place).mkdir(parents=True, exist_ok=True)
        for k in range(count):
            miniatures.save_image(root / place / f"{k}.png")
    return str(root)


def test_a_folder_of_classes_is_what_torchvision_reads(tmp_path):
    path = own_folder(tmp_path, {"cat": 3, "dog/puppies": 2, "dog": 2, "eel": 1})
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    miniatures.save_image(tmp_path / "overview.png")
    source = held(datasets.image_folder(path=path, size=16))
    oracle = torchvision.datasets.ImageFolder(path)
    wanted = torch.stack([to_tensor(square(image, 16)) for image, _ in oracle])
    labels = torch.tensor(oracle.targets)
    assert samples(source.train) == samples(Part(wanted, labels, source.train.ids))
    assert source.classes == tuple(oracle.classes)
    assert source.test is None


def test_folders_named_train_val_and_test_are_the_splits(tmp_path):
    path = own_folder(
        tmp_path, {"train/a": 3, "train/b": 2, "test/b": 2, "val/a": 1, "val/.hidden": 1}
    )
    source = datasets.image_folder(path=path, size=8, mode="L")
    assert (len(source.train), len(source.val), len(source.test)) == (5, 1, 2)
    assert source.test.labels.tolist() == [1, 1] and source.train.images.shape[1:] == (1, 8, 8)
    assert torch.cat([source.train.ids, source.val.ids, source.test.ids]).tolist() == [*range(8)]


def test_a_class_may_be_called_train(tmp_path):
    # Locomotives.
    source = datasets.image_folder(path=own_folder(tmp_path, {"train": 2, "tram": 2}), size=8)
    assert source.classes == ("train", "tram") and source.test is None


BAD_FOLDERS = {
    "one class": ({"cat": 3}, "one class only"),
    "no class": ({}, "no class"),
    "empty class": ({"cat": 3, "dog": 0}, "class dog has no image"),
    "a split by another name": ({"train/a": 2, "train/b": 2, "valid/a": 1}, "valid/; rename it"),
    "unknown class in test": ({"train/a": 2, "train/b": 2, "test/c": 1}, "test/c/0.png"),
    "empty test": ({"train/a": 2, "train/b": 2, "test/a": 0}, "test split has no image"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_folders_that_nobody_can_learn_from_are_refused(case, tmp_path):
    places, fragment = BAD_FOLDERS[case]
    (tmp_path / "own").mkdir()
    message = refusal(datasets.image_folder, path=own_folder(tmp_path / "own", places))
    assert fragment in message and "own" in message


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    assert "no folder" in refusal(datasets.image_folder, path=str(tmp_path / "none"))
