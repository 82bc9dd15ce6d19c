"""A program for ``test_checkpoint.py``: it kills itself at a batch, and resumes when restarted.

Usage: resume_program.py fresh|persistent CHECKPOINT LOG KILL_AT
"""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from dpex import DpexDataLoader

EPOCHS = 3


class Drawing:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()), random.random()


def main(mode: str, checkpoint: Path, log: Path, kill_at: int) -> None:
    torch.manual_seed(1)
    loader: DpexDataLoader[Any] = DpexDataLoader(
        Drawing(),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        persistent_workers=mode == "persistent",
        distribute_mode=True,
        head_address="local",
    )
    epoch, lines = 0, []
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        epoch, lines = saved["epoch"], saved["lines"]
        loader.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["generator"])
    steps = 0
    for number in range(epoch, EPOCHS):
        for batch in loader:
            torch.rand(3)  # as a model draws
            lines.append(repr([tensor.tolist() for tensor in batch]))
            whole = {
                "epoch": number,
                "lines": lines,
                "loader": loader.state_dict(),
                "generator": torch.get_rng_state(),
            }
            torch.save(whole, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)
            if steps == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            steps += 1
    log.write_text("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
