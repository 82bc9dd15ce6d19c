"""Tests of ``ImageFolder``: what people do with torchvision's class, on a disk and in a store."""

from __future__ import annotations

import collections
import copy
import json
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split
from torchvision import datasets
from torchvision.transforms import v2

import dpex.datasets
from dpex import DpexDataLoader
from dpex.datasets import MNIST, ImageFolder

CLASSES, PER_CLASS = 3, 6
ToTensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32)])
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for label in range(CLASSES):
        (root / f"c{label}").mkdir()
        for number in range(PER_CLASS):
            pixels = np.full((4, 4, 3), 10 * label + number, np.uint8)
            PIL.Image.fromarray(pixels).save(root / f"c{label}" / f"{number}.png")
    return root


def labels(dataset: Any) -> list[int]:
    return torch.cat([label for _, label in DataLoader(dataset, batch_size=4)]).tolist()


def without_a_class(make: Make) -> Any:
    dataset = make(transform=ToTensor)
    dataset.samples = [sample for sample in dataset.samples if sample[1] != 1]
    return len(dataset), labels(dataset)


def three_images(make: Make) -> int:
    dataset = make()
    dataset.imgs = dataset.samples = dataset.samples[:3]
    return len(dataset)


def other_targets(make: Make) -> Any:
    dataset = make()
    dataset.targets = [0] * len(dataset)
    return dataset[17][1], dataset.targets


def weights(make: Make) -> list[float]:
    targets = make().targets
    counts = collections.Counter(targets)
    return [1 / counts[target] for target in targets]


def as_json(make: Make) -> str:
    dataset = make()
    return json.dumps([dataset.classes, dataset.class_to_idx, dataset.targets])


def late_transforms(make: Make) -> Any:
    dataset = make()
    dataset.transform, dataset.target_transform = ToTensor, lambda label: 10 * label
    picture, label = dataset[-1]
    return picture.tolist(), label


def loader_called(make: Make) -> Any:
    dataset = make()
    return dataset.loader(dataset.samples[0][0]).size


def loader_given(make: Make) -> str:
    return make(loader=lambda file: PIL.Image.open(file).convert("L"))[0][0].mode


def some_files(make: Make) -> list[str]:
    made = make(is_valid_file=lambda path: path.endswith("3.png"))
    return [Path(path).name for path, _ in made.samples]


def split_at_random(make: Make) -> list[int]:
    parts = random_split(make(transform=ToTensor), [12, 6], torch.Generator().manual_seed(1))
    return labels(parts[1])


def pickled(make: Make) -> Any:
    dataset = pickle.loads(pickle.dumps(make(transform=ToTensor)))
    seen = labels(dataset), dataset.targets, dataset.samples == make().samples, len(dataset.imgs)
    dataset.samples.append(dataset.samples[0])
    dataset.samples[1] = dataset.samples[17]
    del dataset.samples[2:4]
    again = pickle.loads(pickle.dumps(dataset))
    return *seen, len(dataset), labels(again), [label for _, label in again.samples[1:-1]]


def copied(make: Make) -> Any:
    dataset = make()
    other = copy.copy(dataset)
    return other.samples is dataset.samples, json.dumps(other.targets), other[3][1]


USES = {
    use.__name__: use
    for use in (
        *(without_a_class, three_images, other_targets, weights, as_json, late_transforms),
        *(loader_called, loader_given, some_files, split_at_random, pickled, copied),
    )
} | {
    "a subset": lambda make: labels(Subset(make(transform=ToTensor), [0, 7, 17])),
    "two datasets": lambda make: len(ConcatDataset([make(), make()])),
    "counts": lambda make: torch.bincount(torch.tensor(make().targets)).tolist(),
    "methods of a list": lambda make: (make().targets.count(1), make().targets.index(2)),
    "its class": lambda make: isinstance(make(), datasets.ImageFolder),
    "its text": lambda make: [line.partition(":")[0] for line in repr(make()).splitlines()],
    "pairs": lambda make: make().samples == make().imgs,
}


@pytest.mark.parametrize("where", ["disk", "store"])
@pytest.mark.parametrize("name", USES)
def test_it_is_used_as_torchvisions(name: str, where: str, folder: Path) -> None:
    def ours(**options: Any) -> ImageFolder:
        filesystem = fsspec.filesystem("file") if where == "store" else None
        return ImageFolder(str(folder), filesystem=filesystem, **options)

    expected = USES[name](lambda **options: datasets.ImageFolder(str(folder), **options))
    assert USES[name](ours) == expected


class OneClass:
    def find_classes(self, _: Any) -> tuple[list[str], dict[str, int]]:
        return ["c2"], {"c2": 0}


class Joined:
    def find_classes(self, _: Any) -> tuple[list[str], dict[str, int]]:
        return ["c0", "c1"], {"c0": 0, "c1": 0}


class WithPath:
    def __getitem__(self, index: Any) -> Any:
        return (*super().__getitem__(index), Path(self.samples[index][0]).name)  # type: ignore[misc, attr-defined]


@pytest.mark.parametrize("where", ["disk", "store"])
@pytest.mark.parametrize("mixin", [OneClass, Joined, WithPath])
def test_its_methods_can_be_overridden(mixin: type, where: str, folder: Path) -> None:
    options = {"filesystem": fsspec.filesystem("file")} if where == "store" else {}
    ours = type("Ours", (mixin, ImageFolder), {})(str(folder), ToTensor, **options)
    torchs = type("Torchs", (mixin, datasets.ImageFolder), {})(str(folder), ToTensor)
    assert ours.classes == torchs.classes
    assert ours.samples == torchs.samples
    assert [sample[1:] for sample in ours] == [sample[1:] for sample in torchs]


class Pathed(WithPath, ImageFolder):
    pass


@pytest.mark.usefixtures("shared_ray")
def test_a_subclass_reads_in_workers(folder: Path) -> None:
    loader: Any = DpexDataLoader(
        Pathed(str(folder), ToTensor), batch_size=5, num_workers=2, distribute_mode=True
    )
    names = [name for *_, batch in loader for name in batch]
    assert names == [f"{number}.png" for _ in range(CLASSES) for number in range(PER_CLASS)]


def test_another_dataset_may_be_read_inside_of_a_transform(folder: Path) -> None:
    ours = ImageFolder(str(folder), filesystem=fsspec.filesystem("file"))
    torchs = datasets.ImageFolder(str(folder))
    for dataset in (ours, torchs):
        other = copy.copy(dataset)
        dataset.transform = lambda picture, other=other: (
            np.asarray(picture) + np.asarray(other[17][0])
        )
    expected = [(picture[0, 0, 0], label) for picture, label in torchs]
    got = [(picture[0, 0, 0], label) for picture, label in ours.__getitems__(list(range(18)))]
    assert got == expected


def test_threads_may_share_a_dataset(folder: Path) -> None:
    dataset = ImageFolder(str(folder), ToTensor, filesystem=fsspec.filesystem("file"))
    expected = [(picture[0, 0, 0].item(), label) for picture, label in dataset]

    def epoch(_: int) -> list[Any]:
        loader: Any = DataLoader(dataset, batch_size=6, collate_fn=list)
        return [(picture[0, 0, 0].item(), label) for batch in loader for picture, label in batch]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(epoch, range(16))) == [expected] * 16


def test_a_subclass_may_have_paths_of_its_own(folder: Path) -> None:
    class Mine(ImageFolder):
        def __init__(self, root: str) -> None:
            super().__init__(root)
            self.paths = [path for path, _ in self.samples]

    assert Mine(str(folder)).paths == [path for path, _ in Mine(str(folder)).samples]
    assert ImageFolder(str(folder)).paths[0] == "c0/0.png"


def test_torchvision_s_own_functions_work_on_the_class(folder: Path) -> None:
    made = ImageFolder.make_dataset(str(folder), {"c1": 0}, extensions=(".png",))
    assert len(made) == PER_CLASS
    dataset = ImageFolder(str(folder), filesystem=fsspec.filesystem("file"))
    assert dataset.find_classes(str(folder))[0] == dataset.classes
    assert not hasattr(ImageFolder(str(folder)), "__getitems__")
    assert hasattr(dataset, "__getitems__")


@pytest.mark.parametrize("name", ["a::b", "~nobody-of-this-name", "a b#c"])
def test_a_folder_s_name_is_no_uri(name: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(folder)
    for root in (tmp_path / name, str(tmp_path / name)):
        assert len(ImageFolder(root)) == CLASSES * PER_CLASS


def test_a_file_uri_that_names_a_host_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names the host 'tmp', .* Write file:///"):
        ImageFolder("file://tmp/pictures")


NO_PATH = "bucket/t contains '.*', which cannot be read as a path"


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ("bucket/t/a//1.png", NO_PATH),
        ("bucket/t//1.png", NO_PATH),
        ("bucket/t/a/./1.png", NO_PATH),
        ("bucket/t/../1.png", NO_PATH),
        ("pail/t/1.png", "listing of 'bucket/t' returned the path 'pail/t/1.png'"),
    ],
)
def test_a_key_that_cannot_be_read_is_named(
    listed: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.fs as pafs

    class Odd(pafs.FileSystemHandler):  # type: ignore[misc]
        """A store that lists one key."""

        def get_file_info_selector(self, _: Any) -> list[Any]:
            return [pafs.FileInfo(listed, pafs.FileType.File)]

        def get_type_name(self) -> str:
            return "odd"

        def normalize_path(self, path: str) -> str:
            return path

    for name in Odd.__abstractmethods__:
        monkeypatch.setattr(Odd, name, lambda *_: None)
    monkeypatch.setattr(Odd, "__abstractmethods__", frozenset())
    with pytest.raises(ValueError, match=says):
        ImageFolder("bucket/t", filesystem=pafs.PyFileSystem(Odd()))


def test_digits_are_used_as_torchvisions(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        head = bytes([0, 0, 8, 1, 0, 0, 0, 2])
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + b"\1\2")
        head = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28])
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + bytes(range(196)) * 8)
    torchs, ours = datasets.MNIST(str(tmp_path)), MNIST(str(tmp_path))
    assert isinstance(ours, datasets.MNIST)
    assert issubclass(dpex.datasets.FashionMNIST, datasets.FashionMNIST)
    assert dpex.datasets.FashionMNIST.resources == datasets.FashionMNIST.resources
    with pytest.raises(ValueError, match="dpex downloads nothing"):
        MNIST(str(tmp_path), download=True)
    assert repr(ours) == repr(torchs)
    assert ours.class_to_idx == torchs.class_to_idx
    for name in ("data", "targets"):
        assert torch.equal(getattr(ours, name), getattr(torchs, name))
    ours.data[0] = torchs.data[0] = 7  # written to, not replaced
    there = pickle.loads(pickle.dumps(ours))
    assert np.array_equal(np.asarray(there[0][0]), np.asarray(torchs[0][0]))


def test_torchvision_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "torchvision" or name == "dpex.datasets.folder":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ModuleNotFoundError, match="ImageFolder needs torchvision"):
        dpex.datasets.__getattr__("ImageFolder")
