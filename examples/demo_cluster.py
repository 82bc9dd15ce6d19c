"""The demo on a cluster: three nodes on this machine, one of which dies during an epoch.

The nodes are real nodes of Ray, each with its own processes and object store. They share the cores
of this machine, so the demo shows what a failure changes, and not how fast a cluster is.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from demo_training import SEED, Training, conclude
from torch.utils.data import Dataset
from tqdm import tqdm

from dpex import DataLoader

NODES = 3
# In the first epoch, the nodes start their worker processes. A node is killed in the last one.
EPOCHS = 2


def train_on_cluster(dataset: Dataset[Any], batch_size: int) -> None:
    """Train twice on a simulated cluster, kill a node in the second training, and compare.

    Raises:
        SystemExit: The losses of the trainings differ.
    """
    print(f"Starting a cluster of {NODES} nodes ...")
    with simulated_cluster() as cluster:
        undisturbed, disturbed = (
            Training(name, make_loader(dataset, batch_size, cluster.address))
            for name in ("undisturbed", "disturbed")
        )

        def kill_a_node() -> None:
            tqdm.write("Killing a node, with its processes and its object store ...")
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

        retries = 0
        for training in (undisturbed, disturbed):
            for epoch in range(EPOCHS):
                kill = training is disturbed and epoch == EPOCHS - 1
                training.train_epoch(halfway=kill_a_node if kill else None)
                retries += training.loader.stats().retries
            training.loader.close()
    losses, expected = (
        [loss for epoch in training.epochs for loss in epoch.losses]
        for training in (disturbed, undisturbed)
    )
    if losses != expected:
        raise SystemExit("The losses of the two trainings differ. This is a bug of dpex.")
    wait, usual = (training.epochs[-1].longest_wait_s for training in (disturbed, undisturbed))
    conclude(
        f"one of {NODES} nodes died in the middle of an epoch, and the training continued. All "
        f"{len(losses)} losses are equal to those of the undisturbed training.",
        f"the other nodes recomputed the lost batches ({retries}), with the same random numbers. "
        f"The longest wait for a batch of this epoch was {wait:.1f} s instead of {usual:.1f} s.",
        "docs/plain_machines.md connects your machines. docs/faults.md lists the failures that a "
        "run survives.",
    )


def make_loader(dataset: Dataset[Any], batch_size: int, address: str) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=NODES,
        generator=torch.Generator().manual_seed(SEED),
        head_address=address,
    )


@contextmanager
def simulated_cluster() -> Iterator[Any]:
    """Start a head without CPUs for the training process, and ``NODES`` nodes of one CPU each."""
    with tempfile.TemporaryDirectory(prefix="dpex", ignore_cleanup_errors=True) as place:
        # Other programs look for their Ray in Ray's usual folder, and must not find this one.
        os.environ["RAY_TMPDIR"] = place
        # Ray would print the log of the dead node.
        os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "Raylet is terminated|Task .* failed"
        import ray
        from ray.cluster_utils import Cluster

        # All processes of the cluster end with this process, even if it is killed.
        head = {"num_cpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(NODES):
                cluster.add_node(num_cpus=1)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
