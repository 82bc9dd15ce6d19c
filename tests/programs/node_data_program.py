"""A program for ``test_built_on_node.py``: a training process on a node without data files.

Usage: node_data_program.py HOST:PORT '{"length": ..., "train": ...}' FILE
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

from dpex import DpexDataLoader
from dpex.datasets import on_node

# Number of nodes that have the files.
NODES = 2


class FilesOfTheNode(FashionMNIST):
    """FashionMNIST from this node's folder; reading a sample also returns the folder."""

    def __init__(self, train: bool | None, **options: Any) -> None:
        folder = os.environ.get("NODE_FILES", "nowhere") if train is not None else "nowhere"
        if not Path(folder).is_dir():
            raise FileNotFoundError(folder)
        super().__init__(folder, bool(train), **options)

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, label, str(self.root)


def main() -> None:
    address, given, out = sys.argv[1:]
    changes = json.loads(given)
    report: dict[str, Any] = {}
    try:
        on_node(FilesOfTheNode, train=True)
    except Exception as error:
        report["here"] = f"{type(error).__name__}: {error}"
    dataset = on_node(
        FilesOfTheNode, changes["train"], length=changes["length"], transform=ToTensor()
    )
    loader: Any = DpexDataLoader(
        dataset, 10, num_workers=4, distribute_mode=True, head_address=address
    )
    images, labels, folders = [], [], set()
    try:
        for image, label, folder in loader:
            images += image.flatten(1).sum(1).tolist()
            labels += label.tolist()
            folders |= set(folder)
        # One node may have made all samples before the other node's worker processes start.
        while len(folders) < NODES:
            for _, _, folder in loader:
                folders |= set(folder)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    report |= {"sums": images, "labels": labels, "folders": list(folders)}
    Path(out).write_text(json.dumps(report))
    loader.close()


if __name__ == "__main__":
    main()
