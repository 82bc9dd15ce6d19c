"""A program for ``test_interrupt.py``: Ctrl-C while Ray is imported, then an epoch."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from cluster_programs.output import take_stdout

from dpex import DpexDataLoader


def interrupt_once_ray_is_being_imported() -> None:
    while "ray" not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    replies = take_stdout()
    # A process that a shell starts in the background ignores SIGINT, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader: DpexDataLoader[int] = DpexDataLoader(
        range(100),  # type: ignore[arg-type]
        batch_size=10,
        num_workers=2,
        distribute_mode=True,
        head_address="local",
    )
    threading.Thread(target=interrupt_once_ray_is_being_imported, daemon=True).start()
    try:
        list(loader)
    except KeyboardInterrupt:
        print("interrupted", file=replies)
    got = [int(index) for batch in loader for index in batch]
    print("complete" if got == list(range(100)) else got, file=replies)


if __name__ == "__main__":
    main()
