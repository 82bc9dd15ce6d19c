"""A program with ``nn.DataParallel``: one process and one loader for all GPUs of the node.

Run it with ``python examples/data_parallel.py``. The only batch has thirty vectors of five floats.
``nn.DataParallel`` divides it among the GPUs.
"""

import torch
from torch import nn
from vectors import Model, RandomVectors

from dpex import DpexDataLoader


def main() -> None:
    loader = DpexDataLoader(
        RandomVectors(30), batch_size=30, shuffle=True, num_workers=2, distribute_mode=True
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{torch.cuda.device_count()} GPUs")
    model = nn.DataParallel(Model()).to(device)
    for vectors in loader:
        output = model(vectors.to(device))
        print(f"outside: input {tuple(vectors.shape)}, output {tuple(output.shape)}")


if __name__ == "__main__":
    main()
