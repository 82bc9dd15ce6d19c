"""A program that trains with Ray Train; other CPUs of the cluster make the batches.

Run it with ``python examples/ray_train.py``.
"""

import argparse
import tempfile
from typing import Any

import ray
import ray.train
import torch
from digits import Digits, Net
from ray.train import torch as ray_torch
from torch import nn

from dpex import DpexDataLoader
from dpex.integrations.ray_train import add_distributed_sampler


def train_loop(config: dict[str, Any]) -> dict[str, float]:
    """Train in one worker of Ray Train; Ray Train returns the figures of the first worker."""
    torch.manual_seed(0)
    model = ray_torch.prepare_model(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DpexDataLoader(
        Digits(), batch_size=50, shuffle=True, num_workers=2, distribute_mode=True
    )
    # instead of: prepare_data_loader(loader), which would make a new torch DataLoader
    loader = ray_torch.prepare_data_loader(add_distributed_sampler(loader))
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        steps = 0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    return {"loss": loss.item(), "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Ray Train.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    # Each of the two workers of Ray Train needs one CPU, and two for its loader. The ranks train
    # in step, so a rank must not wait for the CPUs of another rank's loader.
    ray.init(num_cpus=6)
    with tempfile.TemporaryDirectory() as directory:
        result = ray_torch.TorchTrainer(
            train_loop,
            train_loop_config={"epochs": options.epochs},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=directory),
        ).fit()
    last = result.return_value
    print(f"loss {last['loss']:.3f} after {last['steps']} steps in each epoch")


if __name__ == "__main__":
    main()
