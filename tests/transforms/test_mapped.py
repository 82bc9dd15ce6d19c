"""Tests of chains of transforms without a cluster, also in torch's loader."""

from __future__ import annotations

import inspect
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import albumentations
import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

from dpex import DpexDataLoader
from dpex.transforms import MappedDataset, Stage, split, split_deterministic
from dpex.transforms.splitting import _DETERMINISTIC, is_deterministic

Same = Callable[[Any, Any], None]
Labelled = namedtuple("Labelled", ["image", "label"])


class Pictures:
    """Sample i is a picture and its label."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def picture(self, index: int) -> PIL.Image.Image:
        pixels = np.random.default_rng(index).integers(0, 256, (12, 10, 3), dtype=np.uint8)
        return PIL.Image.fromarray(pixels)

    def __getitem__(self, index: int) -> Any:
        return self.picture(index), index % 3


class Alone(Pictures):
    def __getitem__(self, index: int) -> Any:
        return self.picture(index)


class Named(Pictures):
    def __getitem__(self, index: int) -> Any:
        return Labelled(self.picture(index), index % 3)


class ByName(Pictures):
    def __getitem__(self, index: int) -> Any:
        return {"image": np.asarray(self.picture(index)), "label": index % 3}


class Boxed(Pictures):
    def __getitem__(self, index: int) -> Any:
        image = tv_tensors.Image(v2.functional.pil_to_tensor(self.picture(index)))
        boxes = [[1, 2, 4, 6]]
        return image, tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(12, 10))


class Batched(Pictures):
    """Pictures that can be read in whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Brightens:
    """A transform like albumentations': it takes keywords, and returns a mapping."""

    def __call__(self, *, force_apply: bool = False, **data: Any) -> dict[str, Any]:
        return {**data, "image": data["image"] // 2 + 100}


AROUND: dict[str, Callable[[Any], Any]] = {
    "itself": lambda dataset: dataset,
    "subset": lambda dataset: Subset(dataset, range(2, 14)),
    "concatenated": lambda dataset: ConcatDataset([dataset, dataset]),
}


def halve(image: torch.Tensor) -> torch.Tensor:
    return image / 2


def flip(batch: torch.Tensor) -> torch.Tensor:
    return batch.flip(-1)


CHAINS = {
    "v1": [v1.Resize(8), v1.CenterCrop(6), v1.ToTensor()],
    "v1 compose": v1.Compose([v1.Resize(8), v1.ToTensor()]),
    "v2": [v2.ToImage(), v2.Resize(8), v2.ToDtype(torch.float32, scale=True)],
    "sequential": torch.nn.Sequential(v2.ToImage(), v2.CenterCrop(4)),
    "lambda": [v1.ToTensor(), lambda image: image * 2],
    "stages": [Stage(v1.Resize(8)), v1.ToTensor(), Stage(halve, num_cpus=2)],
}


def directly(chain: Any, image: Any) -> Any:
    for transform in chain if isinstance(chain, list) else [chain]:
        image = (transform.fn if isinstance(transform, Stage) else transform)(image)
    return image


@pytest.mark.parametrize(
    "source", [Pictures(), Named(), Alone(), Batched()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_chain_gets_the_input_and_leaves_the_rest(
    chain: Any, source: Any, assert_same: Same
) -> None:
    dataset = MappedDataset(source, chain)
    assert len(dataset) == len(source)
    for index in (0, 7):
        sample = source[index]
        if isinstance(sample, tuple):
            image, label = sample
            expected = (directly(chain, image), label)
            if type(sample) is Labelled:
                expected = Labelled(*expected)
        else:
            expected = directly(chain, sample)
        assert_same(dataset[index], expected)


def stacked(crops: Any) -> torch.Tensor:
    return torch.stack([v1.functional.to_tensor(crop) for crop in crops])


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("source", [Pictures(), Alone()], ids=["with targets", "alone"])
@pytest.mark.parametrize(
    "chain",
    [
        [v1.FiveCrop(4), stacked, halve],
        [v1.FiveCrop(4), Stage(stacked), halve],
        [Stage(v1.FiveCrop(4)), Stage(list), Stage(stacked), Stage(halve)],
        [v1.FiveCrop(4), Stage(stacked), halve, Stage(flip, batched=True), flip],
    ],
    ids=["no stage", "one stage", "three stages", "batched stage"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1, "distribute_mode": True, "head_address": "local"}],
    ids=["here", "distributed"],
)
def test_a_transform_that_returns_a_tuple(
    options: dict[str, Any], chain: Any, source: Any, assert_same: Same
) -> None:
    composed = MappedDataset(source, v1.Compose([v1.FiveCrop(4), stacked, halve]))
    ours: Any = DpexDataLoader(MappedDataset(source, chain), 5, **options)
    assert_same(list(ours), list(DataLoader(composed, 5)))


def test_targets_have_transforms_of_their_own() -> None:
    dataset = MappedDataset(Pictures(), v1.ToTensor(), target_transform=lambda label: label + 10)
    assert [dataset[index][1] for index in range(4)] == [10, 11, 12, 10]


def test_targets_are_transformed_after_inputs() -> None:
    """The order is torchvision's, so that both draw the same numbers."""

    def noisy(_: Any) -> torch.Tensor:
        return torch.rand(())

    given = {"transform": noisy, "target_transform": noisy}
    torchs = datasets.FakeData(4, (3, 8, 8), **given)  # type: ignore[arg-type]
    drawn = []
    for dataset in (torchs, MappedDataset(datasets.FakeData(4, (3, 8, 8)), **given)):  # type: ignore[arg-type]
        torch.manual_seed(3)
        drawn.append(dataset[1])
    assert drawn[0] == drawn[1]


def test_joint_transforms_get_all_items(assert_same: Same) -> None:
    chain = [v2.RandomHorizontalFlip(p=1.0), v2.Resize((24, 20))]
    image, boxes = MappedDataset(Boxed(), joint_transforms=chain)[3]
    expected = v2.Compose(chain)(*Boxed()[3])
    assert_same((image, boxes), expected)
    assert_same(MappedDataset(Boxed(), transforms=chain)[3], expected)
    assert type(boxes) is tv_tensors.BoundingBoxes
    assert boxes.tolist() == [[12, 4, 18, 12]]


@pytest.mark.parametrize("transform", [v1.ToTensor(), v1.Resize(8)])
def test_a_joint_transform_of_the_input_alone_is_told_the_argument(transform: Any) -> None:
    with pytest.raises(TypeError, match="3 were given") as info:
        MappedDataset(Pictures(), joint_transforms=[transform])[0]
    assert "all 2 items of a sample" in info.value.__notes__[0]
    assert "use transform=" in info.value.__notes__[0]


def test_transforms_that_take_keywords_get_them() -> None:
    label_beside = MappedDataset(Pictures(), [Brightens()])[4]
    assert label_beside[1] == 1
    mapping = MappedDataset(ByName(), [Brightens()])[4]
    assert sorted(mapping) == ["image", "label"]
    expected = np.asarray(Pictures().picture(4)) // 2 + 100
    for image in (label_beside[0], mapping["image"]):
        assert np.array_equal(image, expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_generator_of_a_transforms_own_is_seeded_from_torchs(num_workers: int) -> None:
    noise = albumentations.Compose([albumentations.GaussNoise(p=1.0)])
    grey = np.full((4, 4, 3), 128, np.uint8)
    dataset = MappedDataset([grey] * 20, [noise, torch.from_numpy])

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        loader = DataLoader(dataset, num_workers=num_workers)
        return torch.cat([image for _ in range(2) for image in loader])

    once = drawn(1)
    assert torch.equal(once, drawn(1))
    assert len(torch.cat([once, drawn(2)]).unique(dim=0)) == 80


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batched_stages_run_behind_collate_fn(num_workers: int, assert_same: Same) -> None:
    chain = [v1.ToTensor(), Stage(flip, batched=True), halve]
    dataset = MappedDataset(Pictures(), chain)
    plain = MappedDataset(Pictures(), v1.ToTensor())
    expected = [[images.flip(-1) / 2, labels] for images, labels in DataLoader(plain, 6)]
    torchs = DataLoader(dataset, 6, num_workers=num_workers, collate_fn=dataset.collate())
    ours: Any = DpexDataLoader(dataset, 6, num_workers=num_workers)
    assert_same(list(torchs), expected)
    assert_same(list(ours), expected)


def test_batched_stages_run_behind_a_collate_fn_of_the_user() -> None:
    dataset = MappedDataset(range(10), [float, Stage(lambda batch: -batch, batched=True)])
    summing = dataset.collate(lambda samples: torch.tensor(samples).sum())
    assert [float(b) for b in DataLoader(dataset, 5, collate_fn=summing)] == [-10, -35]  # type: ignore[arg-type]


def added_up(samples: list[Any]) -> torch.Tensor:
    return torch.stack([image.sum() for image, _ in samples])


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize(
    "options",
    [{}, {"collate_fn": added_up}, {"batch_size": None}],
    ids=["", "collate_fn", "no batches"],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_forgetting_the_batched_stages_raises(
    num_workers: int, options: dict[str, Any], around: Callable[[Any], Any]
) -> None:
    dataset = around(MappedDataset(Pictures(), [v1.ToTensor(), Stage(flip, batched=True)]))
    loader = DataLoader(dataset, num_workers=num_workers, **{"batch_size": 4, **options})
    with pytest.raises(TypeError, match=re.escape("Pass collate_fn=dataset.collate()")) as caught:
        next(iter(loader))
    # Free the iterator now. The garbage collector might free its queue first, and torch would then
    # wait in vain for its worker process.
    caught.value.__traceback__ = None
    del caught


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("loader_type", [DataLoader, DpexDataLoader])
def test_batched_stages_run_also_inside_of_other_datasets(
    around: Callable[[Any], Any], batch_size: Any, loader_type: Any, assert_same: Same
) -> None:
    inner = MappedDataset(Pictures(), [v1.ToTensor(), Stage(flip, batched=True)])
    base = torch.utils.data.default_convert if batch_size is None else None
    loader = loader_type(around(inner), batch_size, collate_fn=inner.collate(base))
    plain = around(MappedDataset(Pictures(), v1.ToTensor()))
    expected = [[images.flip(-1), labels] for images, labels in DataLoader(plain, batch_size)]
    assert_same([list(batch) for batch in loader], expected)
    assert torch.equal(inner[3].content[0], v1.ToTensor()(Pictures()[3][0]))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Stage(3), TypeError, "fn must be callable, got 3"),  # type: ignore[arg-type]
        (lambda: Stage(Stage(halve)), TypeError, "fn must not be a Stage"),
        (lambda: Stage(halve, num_gpus=-1), ValueError, "num_gpus must be >= 0, got -1"),
        (lambda: Stage(halve, num_cpus="2"), TypeError, "num_cpus must be a number, got '2'"),  # type: ignore[arg-type]
        (lambda: Stage(halve, resources={"ssd": -2}), ValueError, "ssd must be >= 0, got -2"),
        (lambda: Stage(halve, resources="ssd"), TypeError, "a mapping or None, got 'ssd'"),  # type: ignore[arg-type]
        (
            lambda: Stage(halve, label_selector={"disk": 1}),  # type: ignore[dict-item]
            TypeError,
            "label_selector must be a dict of strings or None, got {'disk': 1}",
        ),
        (lambda: Stage(halve, label_selector="fast"), TypeError, "or None, got 'fast'"),  # type: ignore[arg-type]
        (lambda: Stage(halve, max_workers=0), ValueError, ">= 1 or None, got 0"),
        (lambda: Stage(halve, max_workers=True), ValueError, ">= 1 or None, got True"),
        (lambda: Stage(halve, batched=1), TypeError, "batched must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: MappedDataset(Stream()), TypeError, "map-style dataset"),
        (
            lambda: MappedDataset(range(3), [halve, 7]),
            TypeError,
            "must be callable or a Stage, got 7",
        ),  # type: ignore[list-item]
        (
            lambda: MappedDataset(range(3), [Stage(flip, batched=True), Stage(halve)]),
            ValueError,
            "Put stages with batched=True last",
        ),
        (
            lambda: MappedDataset(range(3), halve, joint_transforms=[halve]),
            ValueError,
            "either it, or transform=",
        ),
        (
            lambda: MappedDataset(range(3), joint_transforms=[halve], transforms=[halve]),
            ValueError,
            "is the old name of joint_transforms=",
        ),
        (
            lambda: MappedDataset(MappedDataset(range(3), [Stage(halve)]), halve),
            ValueError,
            "Pass the whole chain to one MappedDataset",
        ),
    ],
)
def test_bad_input_is_told_at_once(
    make: Callable[[], Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=re.escape(says)):
        make()


class Tensors(Pictures):
    """Numbers that are read in whole batches, each batch as one tensor."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


def test_a_whole_batch_may_be_a_tensor(assert_same: Same) -> None:
    loader = DataLoader(MappedDataset(Tensors(), lambda number: number + 1), 20)
    assert_same(list(loader), [torch.arange(1, 21)])


# --- split ----------------------------------------------------------------------------------------


def test_split_ends_before_the_first_random_transform() -> None:
    fixed = [v1.Resize(8), v2.ToImage(), v2.CenterCrop(6)]
    rest = [v2.RandomCrop(4), v2.ToDtype(torch.float32, scale=True)]
    nested = v1.Compose([fixed[0], v2.Compose([*fixed[1:], rest[0]]), rest[1]])
    assert split_deterministic(nested) == (fixed, rest)
    assert split_deterministic([*fixed, *rest]) == (fixed, rest)
    assert split_deterministic(fixed[0]) == (fixed[:1], [])
    assert split_deterministic([halve, *fixed]) == ([], [halve, *fixed]), (
        "what is not known may draw"
    )
    assert split is split_deterministic


def test_split_where_it_is_told_to() -> None:
    chain = [halve, v1.ToTensor(), flip]
    assert split_deterministic(chain, at=2) == (chain[:2], chain[2:])
    with pytest.raises(
        IndexError, match=re.escape("at must be in [0, 3], the chain's length; got 4")
    ):
        split_deterministic(chain, at=4)
    with pytest.raises(TypeError, match="must be callable, got 5"):
        split_deterministic([halve, 5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="must be callable, got 'Resize'"):
        split_deterministic("Resize")  # type: ignore[arg-type]


def test_a_class_of_ones_own_may_draw() -> None:
    class Sometimes(v1.Resize):
        pass

    assert is_deterministic(v1.Resize(3))
    assert not is_deterministic(Sometimes(3))


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "CenterCrop": (4,),
    "ConvertBoundingBoxFormat": ("XYWH",),
    "ConvertImageDtype": (torch.float32,),
    "FiveCrop": (3,),
    "ImageClassification": (),
    "LinearTransformation": (torch.eye(192), torch.zeros(192)),
    "Normalize": ([0.5] * 3, [0.25] * 3),
    "ObjectDetection": (),
    "Pad": (2,),
    "Resize": (5,),
    "SetClampingMode": ("soft",),
    "TenCrop": (3,),
    "ToDtype": (torch.float32,),
    "UniformTemporalSubsample": (2,),
}
# These transforms take boxes, key points, videos or pairs of pictures, not single pictures.
OTHER_INPUTS = {
    *("ClampBoundingBoxes", "ClampKeyPoints", "ConvertBoundingBoxFormat", "OpticalFlow"),
    *("SanitizeBoundingBoxes", "SanitizeKeyPoints", "SemanticSegmentation", "SetClampingMode"),
    *("UniformTemporalSubsample", "VideoClassification"),
}
# The oldest torchvision that dpex supports lacks these.
NEWER = {"ClampKeyPoints", "SanitizeKeyPoints", "SetClampingMode"}
TAKES_PICTURES = {"PILToTensor", "ToImage", "ToTensor"}


def torchvisions(name: str) -> list[Any]:
    from torchvision.transforms import _presets

    found = [getattr(module, name, None) for module in (v1, v2, _presets)]
    return [transform for transform in found if inspect.isclass(transform)]


@pytest.mark.parametrize("name", sorted(_DETERMINISTIC))
@pytest.mark.filterwarnings("ignore:The transform .ToTensor")
def test_what_is_called_deterministic_draws_nothing(name: str, assert_same: Same) -> None:
    classes = torchvisions(name)
    if not classes and name in NEWER:
        pytest.skip("this torchvision is older")
    assert classes, f"torchvision has no {name}"
    if name in OTHER_INPUTS:
        return
    picture = v1.Resize((8, 8))(Pictures().picture(0))
    tensor = v1.functional.pil_to_tensor(picture)
    if name in {"LinearTransformation", "Normalize"}:
        tensor = tensor.float().contiguous()
    for made in classes:
        extra = {"crop_size": 4} if name == "ImageClassification" else {}
        transform = made(*ARGUMENTS.get(name, ()), **extra)
        results = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            results.append(transform(picture if name in TAKES_PICTURES else tensor))
            assert torch.equal(state, torch.get_rng_state()), f"{made} drew"
        assert_same(*results)


def test_torchvisions_random_transforms_are_not_called_deterministic() -> None:
    drawing = {
        name
        for module in (v1, v2)
        for name in dir(module)
        if re.match("Random|Auto|Trivial|Aug|Color|Elastic|Gaussian|CutMix|MixUp|JPEG|Scale", name)
    }
    assert len(drawing) > 30
    assert drawing.isdisjoint(_DETERMINISTIC)
