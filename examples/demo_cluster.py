"""The demo on a cluster: nodes on this machine, one of which dies during an epoch.

The nodes are real nodes of Ray, each with its own processes and object store. They share the cores
of this machine, so the demo shows what a failure changes, and not how fast a cluster is.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from demo_training import Training
from torch.utils.data import Dataset
from tqdm import tqdm

from dpex import DataLoader

NODES = 2


def train_on_cluster(dataset: Dataset[Any], arguments: dict[str, Any], epochs: int) -> Training:
    """Train on a simulated cluster, and kill a node in the middle of the last epoch.

    Args:
        dataset: The dataset.
        arguments: Arguments of the loader.
        epochs: Number of epochs.
    """
    print(f"Starting a head without CPUs, and {NODES} nodes with one CPU each ...")
    with simulated_cluster() as cluster:

        def kill_a_node() -> None:
            tqdm.write("Killing a node, with its processes and its object store ...")
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

        loader = DataLoader(dataset, **arguments, head_address=cluster.address)
        training = Training("cluster", loader)
        for epoch in range(epochs):
            training.train_epoch(halfway=kill_a_node if epoch == epochs - 1 else None)
        training.close()
    return training


@contextmanager
def simulated_cluster() -> Iterator[Any]:
    """Start a head without CPUs for the training process, and ``NODES`` nodes of one CPU each."""
    with tempfile.TemporaryDirectory(prefix="dpex", ignore_cleanup_errors=True) as place:
        # Other programs look for their Ray in Ray's usual folder, and must not find this one.
        os.environ["RAY_TMPDIR"] = place
        # Ray would print the log of the dead node.
        os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "Raylet is terminated|marked dead|Task .* failed"
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
