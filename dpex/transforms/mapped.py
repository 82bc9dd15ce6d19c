"""A map-style dataset with a chain of transforms, which may have several stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from torch.utils.data import Dataset, IterableDataset, default_collate

from dpex.transforms.chain import Chain
from dpex.transforms.stage import Stage
from dpex.worker.batched_reads import read_at_once, reads_batches
from dpex.worker.seeding import begin_sample, one_deeper

__all__ = ["CollateAndTransform", "MappedDataset", "Part", "stages_inside"]

Transform = Callable[..., Any]
Transforms = Transform | Stage | Sequence[Transform | Stage]


@dataclass(frozen=True)
class Part:
    """The part of a chain that one stage runs.

    Attributes:
        chain: Its transforms.
        stage: The ``Stage`` that starts it; None for the part that reads the source.
    """

    chain: Chain
    stage: Stage | None

    @property
    def batched(self) -> bool:
        """Whether it gets whole batches."""
        return self.stage is not None and self.stage.batched


class MappedDataset(Dataset[Any]):
    """A map-style dataset whose samples go through a chain of transforms.

    In torch's own loader, it behaves like any other dataset. In distribute mode, every ``Stage``
    in the chain starts a separate ``map_batches``, with the CPUs, GPUs and resources that the
    stage asks for. A plain transform runs in the stage of the ``Stage`` before it. Transforms
    before the first ``Stage`` run in the stage that reads the source. The arguments have the same
    meaning as in torchvision's datasets: a sample's first item is its input, the second its target.

    Generators are seeded for every sample, and again at every stage; a batched stage seeds them
    for every batch. In distribute mode, the numbers that transforms draw therefore depend only on
    the loader's generator.

    Args:
        source: A map-style dataset.
        transform: One transform or several for the input.
        target_transform: One transform for the target; it runs in the first stage.
        joint_transforms: One transform or several for input and target together, in place of
            ``transform`` and ``target_transform``. They get all items of the sample as separate
            arguments.
        transforms: The old name of ``joint_transforms``, which torchvision's datasets use.

    Raises:
        TypeError: ``source`` is not map-style, or an element of the chain cannot be called.
        ValueError: ``joint_transforms`` is given with ``transform``, ``target_transform`` or
            ``transforms``; a stage that gets samples comes after a stage that gets batches; or
            ``source`` has stages.

    Source:
        ``torchvision.datasets.VisionDataset``.
    """

    def __init__(
        self,
        source: Any,
        transform: Transforms = (),
        *,
        target_transform: Callable[[Any], Any] | None = None,
        joint_transforms: Transforms | None = None,
        transforms: Transforms | None = None,
    ) -> None:
        if isinstance(source, IterableDataset) or not hasattr(source, "__getitem__"):
            raise TypeError(
                f"source must be a map-style dataset, with __getitem__ and __len__, got {source!r}"
            )
        if isinstance(source, MappedDataset) and source.parts[1:]:
            raise ValueError("source already has stages. Pass the whole chain to one MappedDataset")
        if joint_transforms is not None and transforms is not None:
            raise ValueError("transforms= is the old name of joint_transforms=: give one of them")
        together = joint_transforms if transforms is None else transforms
        joint = together is not None
        if joint and (_listed(transform) or target_transform is not None):
            raise ValueError(
                "joint_transforms= gets input and target together: give either it, or transform= "
                "and target_transform="
            )
        self.source = source
        self.parts: list[Part] = list(_parts(_listed(together if joint else transform), joint))
        for part, later in pairwise(self.parts):
            part.chain.continues = not later.batched
        self.parts[0].chain.target_transform = target_transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        """Return one sample.

        If the chain has stages that get batches, the result is only for ``collate()``. Its
        ``content`` is the sample after the last stage that gets samples.
        """
        sample = self._through(self.source[index])
        return _Uncollated(sample) if self.batched else sample

    def _through(self, sample: Any) -> Any:
        for part in self.parts:
            if not part.batched:
                sample = part.chain(sample)
        return sample

    @property
    def __getitems__(self) -> Callable[[list[Any]], Any] | None:
        """The function that reads a whole batch; None if the source cannot read whole batches."""
        return self._samples if reads_batches(self.source) else None

    def _samples(self, indices: list[Any]) -> list[Any]:
        with one_deeper() as depth:
            read = read_at_once(self.source, indices)
        samples = []
        for place, sample in enumerate(read):
            begin_sample(place, depth)
            samples.append(self._through(sample))
        return list(map(_Uncollated, samples)) if self.batched else samples

    @property
    def batched(self) -> bool:
        """Whether the chain ends in stages that get batches."""
        return self.parts[-1].batched

    def collate(self, collate_fn: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` for torch's own loader that also runs the batched stages.

        Args:
            collate_fn: Makes the batch that the stages get; torch's default if None.
        """
        if isinstance(collate_fn, CollateAndTransform):
            return collate_fn
        chains = [part.chain for part in self.parts if part.batched]
        return CollateAndTransform(collate_fn or default_collate, chains)

    def first_part(self) -> MappedDataset:
        """Return the dataset with only the transforms before the first ``Stage``."""
        first = MappedDataset(self.source)
        first.parts = self.parts[:1]
        return first


def _listed(transforms: Transforms | None) -> list[Transform | Stage]:
    if transforms is None:
        return []
    several = isinstance(transforms, Iterable) and not callable(transforms)
    return list(transforms) if several else [transforms]  # type: ignore[arg-type, list-item]


def _parts(transforms: list[Transform | Stage], joint: bool) -> Iterator[Part]:
    stage: Stage | None = None
    fused: list[Transform] = []
    for transform in transforms:
        if isinstance(transform, Stage):
            if stage is not None and stage.batched and not transform.batched:
                raise ValueError(
                    f"{transform!r} gets samples, but comes after {stage!r}, which gets batches. "
                    "Put stages with batched=True last"
                )
            yield Part(Chain(fused, joint=joint), stage)
            stage, fused = transform, [transform.fn]
        elif callable(transform):
            fused.append(transform)
        else:
            raise TypeError(f"a transform must be callable or a Stage, got {transform!r}")
    yield Part(Chain(fused, joint=joint), stage)


class CollateAndTransform:
    """A ``collate_fn`` followed by batched stages.

    Attributes:
        collate_fn: Makes the batch.
        chains: The transforms of each stage.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], chains: list[Chain]) -> None:
        self.collate_fn = collate_fn
        self.chains = chains

    def __call__(self, samples: Any) -> Any:
        """Return the transformed batch of a list of samples, or of one sample without batching."""
        several = isinstance(samples, list)
        content = [_content(sample) for sample in samples] if several else _content(samples)
        batch = self.collate_fn(content)
        for chain in self.chains:
            batch = chain(batch)
        return batch


class _Uncollated:
    """A sample that only ``CollateAndTransform`` can read.

    Attributes:
        content: The sample.
    """

    def __init__(self, content: Any) -> None:
        self.content = content

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            "this MappedDataset has stages with batched=True, which run after collate_fn. Pass "
            "collate_fn=dataset.collate() or dataset.collate(your_collate_fn) to the loader. A "
            "DpexDataLoader needs this only if another dataset, such as a Subset, contains the "
            "MappedDataset"
        )

    __getitem__ = __iter__ = __len__ = _refuse


# default_collate reads the items of a Sequence, so it gets the error of _refuse.
Sequence.register(_Uncollated)


def _content(sample: Any) -> Any:
    return sample.content if isinstance(sample, _Uncollated) else sample


def stages_inside(dataset: Any) -> Iterator[Stage]:
    """Yield the stages of every ``MappedDataset`` inside a dataset, without the dataset's own."""
    seen: set[int] = set()
    waiting = [dataset]
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        attributes = getattr(holder, "__dict__", {})
        several = attributes.get("datasets")
        inside = [attributes.get("source"), attributes.get("dataset")]
        inside += several if isinstance(several, list | tuple) else []
        for part in inside:
            if isinstance(part, MappedDataset):
                yield from (p.stage for p in part.parts if p.stage is not None)
        waiting += inside
