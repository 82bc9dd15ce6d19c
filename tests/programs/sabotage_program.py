"""A program for ``test_sabotage.py``: two epochs, and a worker process that is killed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from living import KillsOnce

from dpex import DpexDataLoader
from dpex.transforms import MappedDataset, Stage


def keep(sample: Any) -> Any:
    return sample


def main(place: Path) -> None:
    """Write the batches of two epochs to a file; the first epoch kills a worker process."""
    loader: DpexDataLoader[list[torch.Tensor]] = DpexDataLoader(
        MappedDataset(KillsOnce(place / "mark", signal.SIGKILL), [Stage(keep, num_cpus=2)]),
        10,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
        num_workers=2,
        distribute_mode=True,
        head_address="local",
    )
    epochs = [[batch[0].tolist() for batch in loader] for _ in range(2)]
    (place / "epochs").write_text(json.dumps(epochs))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]))
