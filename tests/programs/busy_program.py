"""A program for ``test_busy.py``: a training process on a Ray whose CPUs an actor holds."""

from __future__ import annotations

import logging
import threading

import ray
from living import Plain

from dpex import DpexDataLoader


@ray.remote(num_cpus=2)
class Hog:
    """An actor that holds both CPUs."""

    def ready(self) -> None:
        """Return as soon as the actor runs."""


class Release(logging.Handler):
    """A log handler that kills the hog once the loader has logged that it holds the CPUs."""

    def __init__(self, hog: object) -> None:
        super().__init__()
        self.hog = hog

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, and kill the hog if the record names it."""
        print(record.getMessage(), flush=True)
        if "Hog" in record.getMessage():
            threading.Thread(target=ray.kill, args=(self.hog,)).start()


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    hog = Hog.remote()
    ray.get(hog.ready.remote())
    logger = logging.getLogger("dpex")
    logger.setLevel(logging.INFO)
    logger.addHandler(Release(hog))
    # Ten logical workers on two CPUs, which the hog holds.
    loader = DpexDataLoader(Plain(), batch_size=10, num_workers=10, distribute_mode=True)
    indices = [int(index) for _, batch in loader for index in batch]
    print("complete" if indices == list(range(200)) else indices, flush=True)


if __name__ == "__main__":
    main()
