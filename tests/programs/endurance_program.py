"""A program for ``endurance.py``: a long run, and measurements of its processes.

Usage: endurance_program.py EPOCHS BATCHES OUT HEAD_ADDRESS

It calls ``held()`` ten times during the run, and writes the results to ``OUT``.
"""

import gc
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import torch
from cluster_programs import processes_in

from dpex import DpexDataLoader

BATCH_SIZE = 4
LOOKS = 10


class Small:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), index)


def kind_of(pid: int, command: str) -> str:
    """Return the kind of a process."""
    if pid == os.getpid():
        return "training process"
    for mark, kind in {
        "ray::_PipelineActor": "pipeline actor",
        "ray::": "workers",
        "/raylet": "raylet",
        "/gcs_server": "head",
        Path(__file__).name: "workers",
    }.items():
        if mark in command:
            return kind
    return "others"


def held(place: Path) -> dict[str, dict[str, int]]:
    """Return, for each kind of process, the number of processes and the largest values of one.

    A sum would grow when Ray starts another worker process.
    """
    gc.collect()
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for pid, command in processes_in(place).items():
        process, of_kind = psutil.Process(pid), found[kind_of(pid, command)]
        for what, count in {
            # Not the unique set size (USS): it counts the pages of Ray's programs as soon as no
            # other Ray on the machine shares them.
            "bytes": sum(part.anonymous for part in process.memory_maps()),
            "threads": process.num_threads(),
            "files": process.num_fds(),
        }.items():
            of_kind[what] = max(of_kind[what], count)
        of_kind["processes"] += 1
    if "head" in found:
        found["head"].update(tables())
    return found


def tables() -> dict[str, int]:
    """Return the number of entries of each table in Ray's head, including dead ones."""
    import ray

    head, known = ray._private.worker.global_worker.gcs_client, ray._private.state.state
    return {
        "actors": len(known.actor_table(None)),
        "groups": len(known.placement_group_table()),
        "jobs": len(known.job_table()),
        "workers": len(known.workers()),
        "tasks": len(known._connect_and_get_accessor().get_task_events()),
        "keys": len(head.internal_kv_keys(b"")),
    }


def main() -> None:
    epochs, batches = map(int, sys.argv[1:3])
    looks: list[dict[str, Any]] = []
    loader: Any = DpexDataLoader(
        Small(batches * BATCH_SIZE),
        batch_size=BATCH_SIZE,
        num_workers=2,
        distribute_mode=True,
        head_address=sys.argv[4],
    )
    loader.warm_up(wait=True)
    total = epochs * batches
    done = 0
    for _ in range(epochs):
        expected = 0
        for batch in loader:
            assert batch[0, 0] == expected, "a batch is lost, or comes twice"
            expected += BATCH_SIZE
            done += 1
            if done * LOOKS >= (len(looks) + 1) * total:
                looks.append({"batches": done, "held": held(Path.cwd())})
        assert expected == batches * BATCH_SIZE
    Path(sys.argv[3]).write_text(json.dumps(looks))


if __name__ == "__main__":
    main()
