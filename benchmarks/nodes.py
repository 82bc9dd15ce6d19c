"""Several Ray nodes on one machine, and samples that wait and compute nothing.

Each node has its own processes and its own object store. So a measurement shows the overhead of
dpex and Ray, but not that of a network. All nodes share the machine's cores. If the cores are busy,
they determine the rate, and the figure is void.
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
    """Samples that take time and no processor time; each sample is its reader's pid.

    Args:
        length: Number of samples.
        wait_s: Seconds that a sample takes.
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
    """Start some nodes with ``TASKS_PER_NODE`` CPUs each, and a head without CPUs.

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
    """Read all batches of waiting samples, and return the pids of their readers."""
    return {pid for batch in batches for pid in batch.tolist()}


def count_of(nodes: int) -> str:
    """Return a number of nodes as text."""
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def busy_note(percent: float) -> str:
    """Return a note on the load of the machine, which may declare a figure void."""
    void = f"; {VOID}" if percent > VOID_PERCENT else ""
    return f"machine at most {percent:.0f} % busy{void}"
