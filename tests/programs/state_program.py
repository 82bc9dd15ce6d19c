"""Reads the loaders of ``stateful`` in a process of its own and prints their batches."""

from __future__ import annotations

import functools
import json
import sys

from cluster_programs.output import take_stdout
from stateful import epochs

from dpex import DpexDataLoader


def main() -> None:
    """Read what the arguments say: an address, then kind, number of workers and persistence."""
    answer = take_stdout()
    address, *combinations = sys.argv[1:]
    make = functools.partial(DpexDataLoader, distribute_mode=True, head_address=address)
    read = []
    for combination in combinations:
        kind, workers, persistent = json.loads(combination)
        read.append(epochs(kind, make, workers=workers, persistent=persistent))
    print(json.dumps(read), file=answer)


if __name__ == "__main__":
    main()
