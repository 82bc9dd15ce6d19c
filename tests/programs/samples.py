"""Datasets, samplers and collate functions of the tests; worker processes import this module too.

A sample depends only on its index, so that torch's loader and dpex's can be compared.
"""

from __future__ import annotations

import collections
import datetime
import enum
import fractions
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import Dataset, Sampler, default_collate
from torchvision import tv_tensors


def seed_everything(seed: int = 20) -> None:
    """Seed the global generators of this process."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


@dataclass
class Record:
    image: torch.Tensor
    names: list[str]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrozenRecord:
    image: torch.Tensor
    label: int


class Colour(enum.Enum):
    RED = 0
    GREEN = 1
    BLUE = 2


class Custom:
    """An object without ``__eq__``; tests compare it by its ``__dict__``."""

    def __init__(self, image: torch.Tensor) -> None:
        self.image = image
        self.again = {"image": image}

    def pin_memory(self) -> Custom:
        self.image = self.image.pin_memory()
        return self


class TaggedTensor(torch.Tensor):
    """A tensor subclass that is not torch's."""


class TaggedDict(dict[str, Any]):
    pass


class TaggedList(list[Any]):
    pass


def image(index: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that differs for each index, as far as the dtype can represent it."""
    count = int(np.prod(size)) if size else 1
    return (torch.arange(count) + 7 * index).reshape(size).to(dtype)


def _sliced(index: int) -> torch.Tensor:
    return image(index, 6, 8)[::2, 1:6:2]


def _structured(index: int) -> np.ndarray[Any, Any]:
    return np.array([(index, 0.5), (index + 1, 1.5)], dtype=[("id", "i4"), ("weight", "f8")])


def _object_array(index: int) -> np.ndarray[Any, Any]:
    array = np.empty(3, dtype=object)
    array[:] = [index, str(index), None]
    return array


def _recursive(index: int) -> list[Any]:
    items: list[Any] = [index]
    items.append(items)
    return items


def _shared(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = image(index, 3)
    return tensor, tensor


_SAMPLE_DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]
_FLOAT8_DTYPES = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]

TENSORS: dict[str, Callable[[int], Any]] = {
    **{
        f"tensor-{dtype}".replace("torch.", ""): lambda i, dtype=dtype: image(i, 2, 3, dtype=dtype)
        for dtype in _SAMPLE_DTYPES
    },
    "tensor-0-dim": lambda i: torch.tensor(float(i)),
    "tensor-zero-length": lambda i: torch.empty(0),
    "tensor-zero-size": lambda i: torch.empty(3, 0, 2, dtype=torch.int16),
    "tensor-nan": lambda i: torch.tensor([float("nan"), float("inf"), -0.0, i]),
    "tensor-large": lambda i: image(i, 64, 1024),
    "tensor-expanded": lambda i: image(i, 3, 1).expand(3, 4),
    "tensor-sliced": _sliced,
    "tensor-transposed": lambda i: image(i, 2, 5).t(),
    "tensor-large-transposed": lambda i: image(i, 64, 128).t(),
    "tensor-channels-last": lambda i: image(i, 2, 3, 4, 5).to(memory_format=torch.channels_last),
}
"""Functions that make a sample that torch's ``default_collate`` takes, by kind."""

NUMPY: dict[str, Callable[[int], Any]] = {
    "numpy-float32": lambda i: np.full((2, 3), i, dtype=np.float32),
    "numpy-uint8": lambda i: np.full((5, 4, 3), i, dtype=np.uint8),
    "numpy-bool": lambda i: np.array([i % 2 == 0, True]),
    "numpy-0-dim": lambda i: np.array(i, dtype=np.int16),
    "numpy-zero-length": lambda i: np.empty((0, 2)),
    "numpy-large": lambda i: np.full((64, 1024), i, dtype=np.float32),
    "numpy-fortran": lambda i: np.asfortranarray(np.arange(12.0).reshape(3, 4) + i),
    "numpy-sliced": lambda i: (np.arange(24).reshape(4, 6) + i)[::2, ::3],
    "numpy-scalar-float64": lambda i: np.float64(i),
    "numpy-scalar-int8": lambda i: np.int8(i),
    "numpy-scalar-bool": lambda i: np.bool_(i % 2),
}
try:
    torch.as_tensor(np.bool_(1))
except TypeError:  # torch before 2.7 refuses the bool of numpy 2
    del NUMPY["numpy-scalar-bool"]

PLAIN: dict[str, Callable[[int], Any]] = {
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "string": lambda i: "x" * i,
    "bytes": lambda i: bytes([i]),
    "tuple": lambda i: (image(i, 2), i, str(i)),
    "list": lambda i: [i, [float(i), image(i, 2)]],
    "dict": lambda i: {"image": image(i, 2, 2), "label": i, "deep": {"name": str(i)}},
    "ordered-dict": lambda i: collections.OrderedDict(b=i, a=image(i, 1)),
    "default-dict": lambda i: collections.defaultdict(list, a=i),
    "named-tuple": lambda i: Pair(image(i, 2), i),
}

CUSTOM: dict[str, Callable[[int], Any]] = {
    **{
        f"tensor-{dtype}".replace("torch.", ""): lambda i, dtype=dtype: image(i, 4, dtype=dtype)
        for dtype in _FLOAT8_DTYPES
    },
    "tensor-complex32": lambda i: image(i, 2).to(torch.complex32),
    "tensor-conj": lambda i: torch.complex(image(i, 3), image(i, 3)).conj(),
    "tensor-neg": lambda i: torch.complex(image(i, 3), image(i, 3)).conj().imag,
    "tensor-requires-grad": lambda i: image(i, 3).requires_grad_(),
    "tensor-large-requires-grad": lambda i: image(i, 1024).requires_grad_(),
    "tensor-shared": _shared,
    "tensor-channels-last-3d": lambda i: image(i, 1, 2, 3, 4, 5).to(
        memory_format=torch.channels_last_3d
    ),
    "tensor-quantized": lambda i: torch.quantize_per_tensor(image(i, 4), 0.5, 3, torch.qint8),
    "parameter": lambda i: torch.nn.Parameter(image(i, 3)),
    "storage": lambda i: image(i, 3).untyped_storage(),
    "large-storage": lambda i: image(i, 1 << 19).untyped_storage(),
    "empty-storage": lambda _: torch.UntypedStorage(0),
    "typed-storage": lambda i: torch.FloatStorage([i, 2]),
    "sparse-coo": lambda i: torch.eye(3).mul(i).to_sparse(),
    "sparse-csr": lambda i: torch.eye(3).mul(i + 1).to_sparse_csr(),
    "sparse-empty": lambda i: torch.zeros(3, 3).to_sparse(),
    "packed-sequence": lambda i: pack_sequence([image(i, 3), image(i, 2)]),
    "size": lambda i: torch.Size([i, 2]),
    "dtype": lambda i: (torch.bfloat16, torch.device("cpu"), torch.channels_last),
    "tensor-subclass": lambda i: image(i, 3).as_subclass(TaggedTensor),
    "tv-image": lambda i: tv_tensors.Image(image(i, 3, 4, 4, dtype=torch.uint8)),
    "tv-large-image": lambda i: tv_tensors.Image(image(i, 3, 64, 64, dtype=torch.uint8)),
    "tv-mask": lambda i: tv_tensors.Mask(image(i, 4, 4, dtype=torch.bool)),
    "tv-boxes": lambda i: tv_tensors.BoundingBoxes(
        image(i, 2, 4), format="XYXY", canvas_size=(8, 9)
    ),
    "pil": lambda i: PIL.Image.new("RGB", (4 + i, 3), (i, 2 * i, 3)),
    "pil-palette": lambda i: PIL.Image.new("RGB", (4, 3), (i, 2, 3)).quantize(2),
    "numpy-object": _object_array,
    "numpy-structured": _structured,
    "numpy-string": lambda i: np.array(["a", "b" * i]),
    "numpy-datetime": lambda i: np.array(["2024-01-01"], dtype="datetime64[D]") + i,
    "numpy-masked": lambda i: np.ma.masked_equal(np.arange(4), i),
    "numpy-nan": lambda i: np.array([np.nan, i]),
    "numpy-scalar-str": lambda i: np.str_(i),
    "numpy-scalar-complex": lambda i: np.complex64(i + 1j),
    "numpy-dtype": lambda i: np.dtype("float32"),
    "none": lambda i: None,
    "none-inside": lambda i: {"label": None, "items": [None, i]},
    "ragged": lambda i: [image(k, k + 1) for k in range(i % 4)],
    "empty": lambda i: ([], (), {}, "", b"", set()),
    "bytearray": lambda i: bytearray([i, 1]),
    "large-bytes": lambda i: bytes([i]) * 5000,
    "big-int": lambda i: 10**30 + i,
    "complex": lambda i: complex(i, 1),
    "set": lambda i: {i, -1, "a"},
    "frozenset": lambda i: frozenset([i]),
    "deque": lambda i: collections.deque([i], maxlen=3),
    "counter": lambda i: collections.Counter("a" * i),
    "enum": lambda i: Colour(i % 3),
    "date": lambda i: datetime.date(2024, 1, 1 + i),
    "fraction": lambda i: fractions.Fraction(i, 3),
    "path": lambda i: pathlib.PurePosixPath("a") / str(i),
    "slice": lambda i: (slice(i), range(i), Ellipsis),
    "class": lambda i: (Custom, len, image),
    "dataclass": lambda i: Record(image(i, 2), [str(i)], {"nan": float("nan")}),
    "frozen-dataclass": lambda i: FrozenRecord(image(i, 2), i),
    "custom": lambda i: Custom(image(i, 2)),
    "large-custom": lambda i: Custom(image(i, 2000)),
    "dict-subclass": lambda i: TaggedDict(image=image(i, 2)),
    "list-subclass": lambda i: TaggedList([image(i, 2)]),
    "recursive": _recursive,
}
"""Functions that make a sample that only a user's ``collate_fn`` takes, by kind."""

GARBLED_BY_TORCH = {"tensor-conj", "tensor-neg", "tensor-quantized"}
"""Kinds that torch's worker processes return wrong: all but the storage is lost."""

VALUES: dict[str, Callable[[int], Any]] = {**TENSORS, **NUMPY, **PLAIN, **CUSTOM}


class Squares(Dataset[torch.Tensor]):
    """A minimal dataset: sample i is i squared."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.tensor(int(index) ** 2)


class Labelled(Squares):
    """Samples that are an image and its label."""

    def __init__(self, length: int, size: tuple[int, ...] = (2, 3)) -> None:
        super().__init__(length)
        self.size = size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return image(index, *self.size), index


class Valued(Dataset[Any]):
    """Samples of one kind of ``VALUES``."""

    def __init__(self, kind: str, length: int = 5) -> None:
        self.kind = kind
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return VALUES[self.kind](index)


class Echo(Dataset[Any]):
    """Samples that are the name of the index's type, and the index."""

    def __getitem__(self, index: Any) -> Any:
        return type(index).__name__, index


class Batched(Squares):
    """A dataset that reads whole batches; each sample says how many indices the call had."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.tensor(index), len(indices)) for index in indices]


class NoBatched(Squares):
    """A dataset that does not read whole batches: torch checks whether the attribute is true."""

    __getitems__ = None


class Table(Dataset[Any]):
    """A dataset that takes a list of indices as one index, as columnar datasets do."""

    def __init__(self, length: int) -> None:
        self.column = torch.arange(length) * 10

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        return {"column": self.column[index]}


class Sequenced:
    """A dataset that is not a ``Dataset``: ``__getitem__`` and ``__len__`` suffice."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> float:
        return index / 2


class Key:
    """An index of a user's class."""

    def __init__(self, name: str) -> None:
        self.name = name


class KeyBatch:
    """A batch of indices that is not a sequence and has no length."""

    def __init__(self, *indices: int) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class LazySampler(Sampler[int]):
    """A sampler that draws from torch's global generator at every index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))

    def __len__(self) -> int:
        return self.length


class EagerSampler(Sampler[int]):
    """A sampler that draws in ``__iter__``, before the loader draws the base seed."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())

    def __len__(self) -> int:
        return self.length


class EagerBatchSampler(Sampler[list[int]]):
    """A batch sampler that draws in ``__iter__``, from all three global generators."""

    def __init__(self, length: int, size: int) -> None:
        self.length = length
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.length).tolist()
        np.random.shuffle(order)
        random.shuffle(order)
        return iter([order[at : at + self.size] for at in range(0, self.length, self.size)])

    def __len__(self) -> int:
        return -(-self.length // self.size)


class BucketBatchSampler(Sampler[list[int]]):
    """A batch sampler without a length; its batches differ in size, and some are empty."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in [1, 4, 0, 2, 3, 1, 5]:
            yield list(range(start, min(start + size, self.length)))
            start += size


class CountingSampler(Sampler[int]):
    """A sampler whose order depends on its count of epochs, and whose length may be wrong."""

    def __init__(self, length: int, claimed: int) -> None:
        self.length = length
        self.claimed = claimed
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        for place in range(self.length):
            yield (place * self.passes) % self.length

    def __len__(self) -> int:
        return self.claimed


class NoLengthSampler(CountingSampler):
    """A sampler without a length: torch's loader does not need it to iterate."""

    def __len__(self) -> int:
        raise RuntimeError("this sampler does not know its length")


class EpochSampler(Sampler[int]):
    """A sampler whose order depends only on its epoch, as in ``DistributedSampler``."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.length, generator=generator).tolist()

    def __len__(self) -> int:
        return self.length


class Versioned(Squares):
    """Samples that contain the version that the dataset had when the iteration started."""

    version = 0

    def __getitem__(self, index: int) -> Any:
        return index, self.version


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def as_is(sample: Any) -> Any:
    return sample


def as_tuple(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(samples)


def as_dict(samples: list[Any]) -> dict[str, Any]:
    return {"samples": default_collate(samples), "count": len(samples), 3: "three"}


def as_pair(samples: list[Any]) -> Pair:
    return Pair(torch.stack([image for image, _ in samples]), len(samples))


def as_record(samples: list[Any]) -> Record:
    return Record(default_collate(samples)[0], [str(label) for _, label in samples])


def as_custom(samples: list[Any]) -> Custom:
    return Custom(default_collate(samples)[0])


def as_string(samples: list[Any]) -> str:
    return repr(samples)


def as_bytes(samples: list[Any]) -> bytes:
    return repr(samples).encode()


def as_none(samples: list[Any]) -> None:
    return None


def as_ragged(samples: list[Any]) -> list[torch.Tensor]:
    return [image(label, label + 1) for _, label in samples]


def as_padded(samples: list[Any]) -> torch.Tensor:
    return pad_sequence(as_ragged(samples), batch_first=True)


def as_channels_last(samples: list[Any]) -> torch.Tensor:
    images = torch.stack([image for image, _ in samples])[:, None].expand(-1, 3, -1, -1)
    return images.contiguous(memory_format=torch.channels_last)


def as_transposed(samples: list[Any]) -> torch.Tensor:
    return torch.stack([image for image, _ in samples]).transpose(0, 1)


def as_views(samples: list[Any]) -> list[torch.Tensor]:
    """Return rows that share memory here, but must not share it in the training process."""
    return list(torch.stack([image for image, _ in samples]))


def as_sparse(samples: list[Any]) -> torch.Tensor:
    return torch.stack([image.to_sparse() for image, _ in samples])


def as_nested(samples: list[Any]) -> torch.Tensor:
    return torch.nested.nested_tensor(as_ragged(samples), layout=torch.jagged)


def as_numpy(samples: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "images": np.stack([image.numpy() for image, _ in samples]),
        "labels": np.array([label for _, label in samples]),
    }


def as_half(samples: list[Any]) -> list[torch.Tensor]:
    images = default_collate(samples)[0]
    return [images.bfloat16(), images.half(), images.to(torch.complex64), images > 3]


def as_iterator_types(samples: list[Any]) -> list[type]:
    """Return the types that a ``collate_fn`` sees."""
    return [type(samples), *map(type, samples)]


COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    function.__name__.removeprefix("as_"): function
    for function in (
        *(as_list, as_tuple, as_dict, as_pair, as_record, as_custom, as_string, as_bytes),
        *(as_none, as_ragged, as_padded, as_channels_last, as_transposed, as_views, as_sparse),
        *(as_nested, as_numpy, as_half, as_iterator_types),
    )
}
"""Functions that take a list of samples of ``Labelled``, by name."""


def memory_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the dense tensors and arrays in a batch, as tensors that share its memory."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield value
    elif isinstance(value, np.ndarray):
        yield torch.from_numpy(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from memory_of(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from memory_of(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from memory_of(vars(value))
