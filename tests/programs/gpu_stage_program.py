"""A program for ``test_later_stage.py``: three epochs with a stage that asks for a GPU.

Usage: gpu_stage_program.py HOST:PORT FILE
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from dpex import DpexDataLoader
from dpex.transforms import MappedDataset, Stage


class OnDevice:
    """A transform that returns its node, device and process, and its number of calls there."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: torch.Tensor) -> Any:
        import ray

        self.calls += 1
        node = ray.get_runtime_context().get_node_id()
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return int(batch[0]) // 5, node, device, os.getpid(), self.calls


def main() -> None:
    dataset = MappedDataset(range(100), [Stage(OnDevice(), batched=True, num_gpus=1)])
    loader: Any = DpexDataLoader(
        dataset, 5, num_workers=4, distribute_mode=True, head_address=sys.argv[1]
    )
    Path(sys.argv[2]).write_text(json.dumps([list(loader) for _ in range(3)]))
    loader.close()


if __name__ == "__main__":
    main()
