"""Datasets whose samples affect the worker process that reads them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch.utils.data import get_worker_info


class Plain:
    """Sample i is ``(tensor of i, i)``."""

    def __init__(self, length: int = 200) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), index


class LargeArray(Plain):
    """Samples that change a large array of the dataset.

    Each sample says whether the array is a private mapping of Ray's object store.
    """

    def __init__(self) -> None:
        super().__init__(20)
        self.array = np.zeros((20, 1 << 16))

    def __getitem__(self, index: int) -> Any:
        self.array[index] += 1
        start = self.array.__array_interface__["data"][0]
        with Path("/proc/self/maps").open() as maps:
            for line in maps:
                low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
                if low <= start < high:
                    shared = "plasma" in line and line.split()[1] == "rw-p"
        return float(self.array[index].sum()), shared


class ImageAndArrays(Plain):
    """A dataset with an image among large arrays."""

    def __init__(self) -> None:
        super().__init__(6)
        self.ones = np.full(1 << 20, 1.0)
        self.image = PIL.Image.new("RGB", (600, 400), (3, 3, 3))
        self.twos = np.full(1 << 20, 2.0)
        self.fours = np.full(1 << 20, 4.0)

    def __getitem__(self, index: int) -> Any:
        pixel = self.image.getpixel((5, 5))
        return [self.ones[index], self.twos[index], pixel[0], self.fours[index]]


class DividesByZero(Plain):
    def __getitem__(self, index: int) -> Any:
        return 1 / (index - 57), index


class KillsOnce(Plain):
    """Sample 57 kills the first worker process that reads it."""

    def __init__(self, mark: Path, how: signal.Signals, length: int = 200) -> None:
        super().__init__(length)
        self.mark = mark
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 57 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), self.how)
        return index, float(torch.rand(()))


class KillsWhileReading:
    """A wrapper whose sample ``index`` kills a worker process once, in the middle of a batch."""

    def __init__(self, dataset: Any, index: int, mark: Path) -> None:
        self.dataset = dataset
        self.index = index
        self.mark = mark

    def __len__(self) -> int:
        return len(self.dataset)

    def _strike(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.mark.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            self._strike()
        return self.dataset[index]

    @property
    def __getitems__(self) -> Any:
        return self._samples if getattr(self.dataset, "__getitems__", None) else None

    def _samples(self, indices: list[int]) -> Any:
        if self.index in indices and not self.mark.exists():
            self.dataset.__getitems__(indices[: indices.index(self.index)] or indices)
            self._strike()
        return self.dataset.__getitems__(indices)


class AlwaysKills(Plain):
    def __getitem__(self, index: int) -> Any:
        if index == 57:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class KillsPipelineActor(Plain):
    """Every sample kills all pipeline actors of the cluster."""

    def __getitem__(self, index: int) -> Any:
        import ray

        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["name"].startswith("dpex-pipeline-"):
                ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
        return super().__getitem__(index)


class Hangs(Plain):
    """One sample never returns; a mark shows that a worker process has started it.

    Args:
        mark: Path of the mark.
        at: Index of the sample.
        once: Whether the sample returns if the mark exists.
    """

    def __init__(self, mark: Path, at: int = 57, *, once: bool = False) -> None:
        super().__init__()
        self.mark = mark
        self.at = at
        self.once = once

    def __getitem__(self, index: int) -> Any:
        if index == self.at and not (self.once and self.mark.exists()):
            self.mark.touch()
            threading.Event().wait()
        return super().__getitem__(index)


class LastSamplesAreSlow(Plain):
    """Counts its samples; once, sample 196 waits for a file, and the last three take some time."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place
        self.count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        if index == 196 and not (self.place / "mark").exists():
            (self.place / "mark").touch()
            while not (self.place / "go").exists():
                time.sleep(0.01)
        elif index > 196 and self.count <= 200:
            time.sleep(0.15)
        return self.count, index


class Slow(Plain):
    """Samples that take some time; each sample adds its index to a log when it is made."""

    def __init__(self, log: Path, seconds: float) -> None:
        super().__init__(10_000)
        self.log = log
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


class Remembers(Plain):
    """Samples that are the pid, and the number of reads and the version of this dataset copy."""

    def __init__(self) -> None:
        super().__init__(40)
        self.reads = 0
        self.version = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return os.getpid(), self.reads, self.version


class SaysWorker(Plain):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.id, info.num_workers, info.seed, torch.initial_seed(), os.getpid()


class Draws(Plain):
    """Samples with numbers from the global generators of torch and numpy."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(())), float(np.random.rand())


class Threads(Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


class Surroundings(Plain):
    """Samples that are state of their process: a string's hash, directory and default dtype."""

    def __getitem__(self, index: int) -> Any:
        return hash("a.jpg"), str(Path.cwd()), torch.get_default_dtype()


def read_past_errors(iterator: Any) -> tuple[list[int], int]:
    """Return the first index of each batch that arrives, and the number of divisions by zero."""
    firsts, errors = [], 0
    while True:
        try:
            firsts.append(next(iterator)[1].tolist()[0])
        except ZeroDivisionError:
            errors += 1
        except StopIteration:
            return firsts, errors
