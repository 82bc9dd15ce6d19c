"""Ray nodes of this one machine, and samples that wait and compute nothing.

Each node has processes and an object store of its own, so what is measured on them is what dpex and
Ray cost, not what a network costs. All of them share the machine's cores; where those are busy the
rate is theirs, and the point is void.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset

from benchmarks.goals import VOID

TASKS_PER_NODE = 4
STORE_BYTES = 200 << 20
VOID_PERCENT = 70.0


class Waiting(Dataset[int]):
    """Samples that take time and no processor; each is its reader's pid.

    Args:
        length: How many.
        wait_s: What each one takes.
    """

    def __init__(self, length: int, wait_s: float) -> None:
        self.length = length
        self.wait_s = wait_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.wait_s)
        return os.getpid()


@contextmanager
def ray_nodes(nodes: int) -> Iterator[str]:
    """Have some nodes with ``TASKS_PER_NODE`` CPUs each, beside a head that has none.

    Yields:
        The cluster's address.
    """
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(nodes):
        cluster.add_node(num_cpus=TASKS_PER_NODE, object_store_memory=STORE_BYTES)
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def readers_of(batches: Any) -> set[int]:
    """Take all batches of waiting samples; return the processes that read them."""
    return {pid for batch in batches for pid in batch.tolist()}


def busy_note(percent: float) -> str:
    """Say how busy the machine was, and whether a point is void for that."""
    void = f"; {VOID}" if percent > VOID_PERCENT else ""
    return f"machine at most {percent:.0f} % busy{void}"
