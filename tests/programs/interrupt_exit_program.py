"""A program for ``test_interrupt.py``: an epoch that Ctrl-C ends, and the program with it."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from dpex import DpexDataLoader


def touch_and_wait(path: Path) -> NoReturn:
    path.touch()
    threading.Event().wait()
    raise AssertionError("nobody sets the event")


class Waits:
    def __init__(self, waiting: Path) -> None:
        self.waiting = waiting

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> NoReturn:
        touch_and_wait(self.waiting)


def import_until_exit() -> None:
    """Run code as imports do, from the start of the exit on, for less than dpex waits for it."""
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        exec("pass")


def main() -> None:
    # A process that a shell starts in the background ignores SIGINT, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mode, waiting, *exiting = sys.argv[1:]
    for path in exiting:
        atexit.register(touch_and_wait, Path(path))
    if mode == "importing":
        from dpex.carriers.ray import session

        session._load_ray_data = import_until_exit
    list(
        DpexDataLoader(
            Waits(Path(waiting)),  # type: ignore[arg-type]
            batch_size=10,
            num_workers=2,
            distribute_mode=mode != "torch",
            head_address="processes" if mode == "processes" else "local",
        )
    )


if __name__ == "__main__":
    main()
