"""A program for ``test_trainers.py`` and torchrun: it writes one rank's steps of both loaders.

Usage: trainers_program.py FRAMEWORK DIRECTORY HEAD_ADDRESS
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
import trainer_runs


def main() -> None:
    framework, directory, trainer_runs.OURS["head_address"] = sys.argv[1:]
    reports = trainer_runs.both(framework, int(os.environ["WORLD_SIZE"]), Path(directory))
    Path(directory, f"rank{os.environ['RANK']}.json").write_text(json.dumps(reports))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
