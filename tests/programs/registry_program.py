"""A program whose classes refuse a second definition, as those of many registries do.

It prints the batches of two loaders. The second loader's classes are pickled for the first time
after worker processes have started.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import Dataset

from dpex import DpexDataLoader

REGISTRY: dict[str, type] = {}


def register(kind: type) -> None:
    if REGISTRY.setdefault(kind.__name__, kind) is not kind:
        raise TypeError(f"{kind.__name__} is already registered")


class Registering(type):
    def __init__(cls, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> None:
        super().__init__(name, bases, content)
        register(cls)


class Registered:
    def __init_subclass__(cls) -> None:
        register(cls)


class Reading(metaclass=Registering):
    factor = 1

    def read(self, index: int) -> int:
        return self.factor * index


class Other(Registered):
    factor = 2

    def read(self, index: int) -> int:
        return self.factor * index


class Sample(NamedTuple):
    value: int
    kind: type


class Samples(Registered, Dataset[Any]):
    def __init__(self, reading: Any) -> None:
        self.reading = reading

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Sample:
        kind = type(self.reading)
        assert REGISTRY[kind.__name__] is kind, "the process has two classes of this name"
        return Sample(self.reading.read(index), kind)


def first(batch: list[Sample]) -> Sample:
    return batch[0]


def main() -> None:
    for reading in (Reading(), Other()):
        for epoch in (1, 2):
            type(reading).factor = 10 * epoch
            method = type(reading).read
            loader = DpexDataLoader(
                Samples(reading),
                num_workers=1,
                collate_fn=first,
                distribute_mode=True,
            )
            batches = list(loader)
            assert all(type(batch) is Sample for batch in batches)
            assert all(batch.kind is type(reading) for batch in batches)
            assert type(reading).read is method, "a batch has changed a class of this process"
            print([batch.value for batch in batches])


if __name__ == "__main__":
    main()
