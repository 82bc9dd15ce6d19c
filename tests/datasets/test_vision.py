"""Tests of ``from_torchvision``, and of torchvision's transforms in distribute mode."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
import pytest
import torch
from data_files import PICTURES, write_data_files
from idx_files import write_idx
from living import Plain
from torch.utils.data import DataLoader
from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

from dpex import DpexDataLoader
from dpex.datasets import FashionMNIST, ImageFolder, cached, from_torchvision, on_node
from dpex.transforms import MappedDataset, Stage

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("shared_ray")]

OURS = {"distribute_mode": True, "head_address": "local"}

Same = Callable[[Any, Any], None]


def batches(loader_type: Any, dataset: Any, **options: Any) -> list[Any]:
    """Return the batches of an epoch, whose order depends only on the options."""
    generator = torch.Generator().manual_seed(4)
    # torch's default_collate turns torchvision's tensors into plain ones.
    options = {"batch_size": 4, "shuffle": True, "collate_fn": list, **options}
    return list(loader_type(dataset, generator=generator, **options))


# --- datasets -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data_files(folder)
    box = {"bbox": [1, 2, 5, 6], "category_id": 1, "area": 30, "iscrowd": 0}
    content = {
        "images": [{"id": n, "file_name": name} for n, name in enumerate(PICTURES)],
        "annotations": [{"id": n, "image_id": n, **box} for n in range(len(PICTURES))],
        "categories": [{"id": 1, "name": "x"}],
    }
    (folder / "coco.json").write_text(json.dumps(content))
    write_idx(folder / "digits", "MNIST")
    write_cifar(folder / "cifar")
    return folder


class SmallCIFAR(datasets.CIFAR10):
    """CIFAR10 with the files and checksums of ``write_cifar``."""

    train_list: ClassVar[list[Any]] = []


def write_cifar(folder: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (12, 3 * 32 * 32), dtype=np.uint8)
    batch = pickle.dumps({"data": pixels, "labels": [*range(10), 0, 1]})
    meta = pickle.dumps({"label_names": [f"class {number}" for number in range(10)]})
    files = folder / SmallCIFAR.base_folder
    files.mkdir(parents=True)
    for name, content in (("test_batch", batch), ("batches.meta", meta)):
        (files / name).write_bytes(content)
    SmallCIFAR.test_list = [["test_batch", hashlib.md5(batch).hexdigest()]]
    SmallCIFAR.meta = {**SmallCIFAR.meta, "md5": hashlib.md5(meta).hexdigest()}


COMPOSE = v1.Compose([v1.Resize(20), v1.ToTensor(), v1.Normalize((0.5,), (0.5,))])


def fashion(root: Path) -> Any:
    return datasets.FashionMNIST(str(root / "digits"), False, COMPOSE, float)


def fashion_by_uri(root: Path) -> Any:
    return FashionMNIST((root / "zipped").as_uri(), False, COMPOSE, float)


def folder(root: Path) -> Any:
    return datasets.ImageFolder(str(root / "pictures"), v2.Compose([v2.ToImage(), v2.Resize(8)]))


def folder_by_uri(root: Path) -> Any:
    return ImageFolder((root / "pictures").as_uri(), target_transform=str)


def fake(root: Path) -> Any:
    return datasets.FakeData(12, (3, 8, 8), transform=v1.ToTensor())


def coco(root: Path) -> Any:
    pytest.importorskip("pycocotools")
    flipped = v2.Compose([v2.ToImage(), v2.Resize(10), v2.RandomHorizontalFlip(1.0)])
    place = (str(root / "pictures"), str(root / "coco.json"))
    whole = datasets.CocoDetection(*place, transforms=flipped)
    return datasets.wrap_dataset_for_transforms_v2(whole, target_keys=("boxes", "labels"))


def bare(root: Path) -> Any:
    return datasets.FashionMNIST(str(root / "digits"), train=False)


def joint(root: Path) -> Any:
    def both(image: Any, label: int) -> tuple[torch.Tensor, int]:
        return v2.functional.pil_to_tensor(image) + label, -label

    return Pairs(str(root), transforms=both)


class Pairs(datasets.VisionDataset):
    """A dataset that uses only ``transforms``, as datasets for detection do."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        sample: Any = PIL.Image.new("L", (4, 4), index), index
        return sample if self.transforms is None else self.transforms(*sample)


def mnist(root: Path) -> Any:
    return datasets.MNIST(str(root / "digits"), True, COMPOSE)


def cifar(root: Path) -> Any:
    flipped = v1.Compose([v1.RandomHorizontalFlip(1.0), v1.ToTensor()])
    return SmallCIFAR(str(root / "cifar"), False, flipped, lambda label: 9 - label)


MAKERS = [fashion, fashion_by_uri, mnist, cifar, folder, folder_by_uri, fake, bare, coco, joint]


@pytest.mark.parametrize("make", MAKERS)
def test_a_torchvision_dataset_and_its_chain_give_the_same_samples(
    make: Callable[[Path], Any], root: Path, assert_same: Same
) -> None:
    dataset = make(root)
    expected = [dataset[index] for index in range(4)]
    apart = from_torchvision(dataset)
    assert isinstance(apart, MappedDataset)
    assert len(apart) == len(dataset)
    assert_same([apart[index] for index in range(4)], expected)
    assert_same([dataset[index] for index in range(4)], expected)
    assert apart.source.transforms is apart.source.transform is None
    if make is coco:
        assert type(apart[0][1]["boxes"]) is tv_tensors.BoundingBoxes


def test_a_compose_becomes_a_chain(root: Path) -> None:
    dataset = fashion(root)
    chain = from_torchvision(dataset).parts[0].chain
    assert chain.transforms == tuple(dataset.transform.transforms)


def test_a_dataset_without_transforms_of_its_own_is_refused() -> None:
    with pytest.raises(TypeError, match=r"range has no attribute 'transform'.*MappedDataset"):
        from_torchvision(range(3))


class Twins(datasets.VisionDataset):
    """A dataset that transforms two pictures of a sample, as ``LFWPairs`` does."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        images = [PIL.Image.new("L", (4, 4), index + n) for n in range(2)]
        if self.transform is not None:
            images = [self.transform(image) for image in images]
        return *images, index


def test_a_dataset_that_applies_its_transforms_otherwise_is_refused(root: Path) -> None:
    with pytest.raises(
        TypeError, match=r"Twins does not apply its transforms .*joint_transforms=\[...\]"
    ):
        from_torchvision(Twins(str(root), transform=v1.ToTensor()))


@pytest.mark.parametrize("make", MAKERS)
def test_their_batches_are_the_same_in_distribute_mode(
    make: Callable[[Path], Any], root: Path, assert_same: Same
) -> None:
    whole = make(root)
    expected = batches(DataLoader, whole, batch_size=5)
    for dataset in (whole, from_torchvision(whole)):
        assert_same(batches(DpexDataLoader, dataset, batch_size=5), expected)
        assert_same(batches(DpexDataLoader, dataset, batch_size=5, num_workers=2, **OURS), expected)


# --- pictures with masks and boxes ----------------------------------------------------------------


class Marked:
    """Pictures of one bright rectangle, with its mask and its box."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        top, left = index % 5, index // 5
        pixels = torch.zeros(3, 12, 10, dtype=torch.uint8)
        pixels[:, top : top + 4, left : left + 3] = 255
        boxes = tv_tensors.BoundingBoxes(
            [[left, top, left + 3, top + 4]], format="XYXY", canvas_size=(12, 10)
        )
        target = {"boxes": boxes, "masks": tv_tensors.Mask(pixels[:1] > 0), "label": index}
        return tv_tensors.Image(pixels), target


AROUND: dict[str, Callable[[type], Any]] = {
    "itself": lambda make: make(),
    "on_node": on_node,
    "cached": lambda make: cached(make()),
}
KINDS = {"boxes": tv_tensors.BoundingBoxes, "masks": tv_tensors.Mask, "label": int}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("stage", [[], [Stage(v2.Pad(1), num_cpus=2)]], ids=["fused", "apart"])
def test_joint_transforms_keep_the_types_of_what_they_get(
    stage: list[Any], around: Callable[[type], Any], assert_same: Same
) -> None:
    flip = [v2.RandomHorizontalFlip(1.0), v2.Resize((24, 20)), *stage]
    dataset = MappedDataset(around(Marked), transforms=flip)
    ours = batches(DpexDataLoader, dataset, num_workers=2, **OURS)
    assert_same(ours, batches(DataLoader, MappedDataset(Marked(), transforms=flip)))
    for image, target in ours[0]:
        assert type(image) is tv_tensors.Image
        assert {name: type(value) for name, value in target.items()} == KINDS


def test_what_joint_transforms_draw_is_for_all_items_of_a_sample(assert_same: Same) -> None:
    crop = [v2.RandomHorizontalFlip(), v2.RandomCrop((11, 9), padding=6)]
    flip = Stage(v2.RandomVerticalFlip(), num_cpus=2)
    dataset = MappedDataset(Marked(), transforms=[*crop, flip])
    once, *others = (
        list(chain.from_iterable(batches(DpexDataLoader, dataset, **options, **OURS)))
        for options in (
            {"num_workers": 1},
            {"num_workers": 4},
            {"num_workers": 2, "batch_size": 24},
        )
    )
    assert_same(others, [once] * 2)
    for image, target in once:
        assert torch.equal(target["masks"], image[:1] > 0)
        rows, columns = image[0].nonzero(as_tuple=True)
        if len(rows):  # the crop may not contain the rectangle
            box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert target["boxes"].tolist() == [[int(side) for side in box]]
    assert len({image.numpy().tobytes() for image, _ in once}) > 12


def boxes_of(target: dict[str, Any]) -> Any:
    return target["boxes"]


@pytest.mark.parametrize("num_cpus", [1, 2], ids=["fused", "apart"])
def test_target_transforms(num_cpus: int, assert_same: Same) -> None:
    transform = [v2.Resize(6), Stage(v2.ToDtype(torch.float32), num_cpus=num_cpus)]
    dataset = MappedDataset(Marked(), transform, target_transform=boxes_of)
    ours = batches(DpexDataLoader, dataset, num_workers=2, **OURS)
    assert_same(ours, batches(DataLoader, dataset))
    assert type(ours[0][0][1]) is tv_tensors.BoundingBoxes


# --- batches --------------------------------------------------------------------------------------


class Even(Plain):
    """Sample i is a picture whose pixels are all i, and the label i."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 8, 8), float(index)), index


@pytest.mark.parametrize("mix", [v2.MixUp, v2.CutMix])
def test_mixing_is_a_batched_stage(mix: Any, assert_same: Same) -> None:
    dataset = MappedDataset(Even(24), transforms=[Stage(mix(num_classes=24), batched=True)])
    options = {"batch_size": 6, "collate_fn": dataset.collate()}
    plain = batches(DataLoader, Even(24), batch_size=6, collate_fn=None)
    torchs = batches(DataLoader, dataset, **options)
    once, again = (
        batches(DpexDataLoader, dataset, num_workers=n, **options, **OURS) for n in (1, 3)
    )
    assert_same(again, once)
    for epoch in (torchs, once):
        shares = []
        for (images, labels), (_, order) in zip(epoch, plain, strict=True):
            own, share = torch.nn.functional.one_hot(order, 24), labels[0, order[0]]
            torch.testing.assert_close(labels, own * share + own.roll(1, 0) * (1 - share))
            # Pictures and labels are mixed in the same ratio.
            torch.testing.assert_close(images.mean((1, 2, 3)), labels @ torch.arange(24.0))
            shares.append(float(share))
        assert len(set(shares)) > 1, "every batch draws new numbers"
    assert type(once[0]) is type(torchs[0])


def test_normalising_late_gives_the_same(assert_same: Same) -> None:
    augment = [v2.RandomHorizontalFlip(), v2.RandomCrop(8)]
    finish = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])]
    early, late, staged = (
        batches(
            DpexDataLoader,
            MappedDataset(Marked(), transform, target_transform=boxes_of),
            collate_fn=None,
            num_workers=2,
            **OURS,
        )
        for transform in (
            [*augment, *finish],
            augment,
            [*augment, Stage(v2.Compose(finish), batched=True)],
        )
    )
    assert {images.dtype for images, _ in late} == {torch.uint8}
    assert_same([[v2.Compose(finish)(images), boxes] for images, boxes in late], early)
    assert_same(staged, early)
    assert early[0][0].dtype == torch.float32
