"""A program for ``test_trainers.py``: two workers of Ray Train write the steps of both loaders.

Usage: ray_train_program.py DIRECTORY HEAD_ADDRESS
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
import trainer_runs
from torch.utils.data import BatchSampler, IterableDataset, SubsetRandomSampler
from trainer_runs import (
    BATCH_SIZE,
    EPOCHS,
    Line,
    Points,
    Seen,
    make_ours,
    make_torchs,
    train,
)

from dpex import DpexDataLoader
from dpex.integrations.ray_train import add_distributed_sampler


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def run(make: Any, prepare: Any) -> Any:
    torch.manual_seed(1)
    model = ray.train.torch.prepare_model(Line())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ray.train.torch.prepare_data_loader(
        prepare(make(Points(), batch_size=BATCH_SIZE, shuffle=True))
    )
    seen = Seen()
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            train(model, optimizer, batch, lambda loss: loss.backward(), seen)
    seen.close(loader._dataloader)
    return seen.report


def train_loop(config: dict[str, Any]) -> None:
    trainer_runs.OURS["head_address"] = config["head_address"]
    reports = {
        "torch": run(make_torchs, lambda loader: loader),
        "dpex": run(make_ours, add_distributed_sampler),
    }
    refusal({"sampler": SubsetRandomSampler(range(9))}, "own SubsetRandomSampler")
    refusal({"batch_sampler": BatchSampler(range(9), 3, False)}, "own BatchSampler")
    stream: Any = DpexDataLoader(Stream(), 3, num_workers=2, distribute_mode=True)
    assert add_distributed_sampler(stream) is stream
    assert ray.train.torch.prepare_data_loader(stream)._dataloader is stream
    path = Path(config["directory"], f"rank{dist.get_rank()}.json")
    path.write_text(json.dumps({"ray_train": reports}))


def refusal(sampling: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        add_distributed_sampler(make_ours(Points(), **sampling))


def main() -> None:
    directory, head_address = sys.argv[1:]
    # Each of the two ranks takes one CPU, and dpex uses the other two if its workers are Ray's.
    ray.init(num_cpus=4, include_dashboard=False)
    ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config={"directory": directory, "head_address": head_address},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=directory, name="run"),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
