"""A program for ``test_binding.py``: it reads loaders of ``stateful``, and prints their batches."""

from __future__ import annotations

import functools
import json
import sys

from cluster_programs.output import take_stdout
from stateful import epochs

from dpex import DpexDataLoader


def main() -> None:
    """Read the loaders of the arguments: an address, then kind, ``num_workers`` and persistence."""
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
