"""A driver of its own for test_busy.py: its own small Ray, whose CPUs an actor holds."""

from __future__ import annotations

import logging
import threading

import ray
from living import Plain

from dpex import DpexDataLoader


@ray.remote(num_cpus=2)
class Hog:
    """Holds both CPUs."""

    def ready(self) -> None:
        """Return once it does."""


class Release(logging.Handler):
    """Lets the hog go when the loader has said who holds the CPUs."""

    def __init__(self, hog: object) -> None:
        super().__init__()
        self.hog = hog

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line, and free the CPUs if it is the one."""
        print(record.getMessage(), flush=True)
        if "0 of 2 CPUs are free" in record.getMessage():
            threading.Thread(target=ray.kill, args=(self.hog,)).start()


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    hog = Hog.remote()
    ray.get(hog.ready.remote())
    logger = logging.getLogger("dpex")
    logger.setLevel(logging.INFO)
    logger.addHandler(Release(hog))
    # Ten logical workers on two CPUs, which are taken.
    loader = DpexDataLoader(Plain(), batch_size=10, num_workers=10, distribute_mode=True)
    indices = [int(index) for _, batch in loader for index in batch]
    print("complete" if indices == list(range(200)) else indices, flush=True)


if __name__ == "__main__":
    main()
