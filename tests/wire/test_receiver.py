"""Tests of the receiver: dpex recomputes blocks that are lost with their process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster_programs import wait_until
from living import Plain

from dpex import DpexDataLoader
from dpex.wire.arrivals import Arrivals
from dpex.wire.block_format import BlockWriter, Entry
from dpex.wire.buffer_pool import MemoryPool
from dpex.wire.loss_causes import LossCause
from dpex.wire.timings import Costs
from dpex.worker.map_style import encode

pytestmark = pytest.mark.usefixtures("shared_ray")


def table_of(batch: int) -> Any:
    writer = BlockWriter("run", batch)
    writer.add(Entry(batch, encode(torch.full((4,), batch)), "batch"), Costs())
    return writer.table()


def is_lost(block: Any) -> bool:
    import ray

    try:
        ray.get(block)
    except ray.exceptions.ObjectLostError:
        return True
    return False


@pytest.mark.parametrize("through_client", [False, True])
def test_a_block_whose_process_has_died_is_reported_and_the_others_are_read(
    through_client: bool,
) -> None:
    """The receiver reads blocks through Ray Data, except in a Ray Client."""
    import ray

    from dpex.pipeline.actor import PipelineActor, Reply
    from dpex.wire.receiver import Receiver

    class Worker:
        def put(self, table: Any) -> list[Any]:
            return [ray.put(table)]

    class FakePipelineActor:
        def __init__(self, replies: list[Any]) -> None:
            self.replies = replies
            self.released: list[Any] = []

        def take(self, pipeline_key: str, run: str) -> Any:
            return self.replies.pop(0)

        def release(self, pipeline_key: str, run: str) -> None:
            self.released.append((pipeline_key, run))

        def calls(self) -> list[Any]:
            return self.released

    worker: Any = ray.remote(num_cpus=0)(Worker)
    lives, dies = worker.remote(), worker.remote()
    workers = enumerate([lives, dies, lives])
    blocks = [ray.get(worker.put.remote(table_of(batch)))[0] for batch, worker in workers]
    ray.kill(dies)
    wait_until(lambda: is_lost(blocks[1]), 60, "loss of the block")
    replies = [Reply([(block, 1)], quiet_at=number + 1) for number, block in enumerate(blocks)]
    actor_class: Any = ray.remote(num_cpus=0)(FakePipelineActor)
    actor = actor_class.remote([*replies, Reply(ended=True)])
    context = ray.get_runtime_context()
    handle = PipelineActor(actor, "actor", (context.gcs_address, context.get_job_id()))
    arrivals = Arrivals()
    receiver = Receiver(
        handle,
        "pipeline",
        "run",
        arrivals,
        MemoryPool(),
        pin_device=None,
        through_client=through_client,
    )
    wait_until(lambda: arrivals._ended, 60, "end of the replies")
    read = []
    while (arrival := arrivals.take()) is not None:
        read += [entry.batch for entry in arrival.batches]
    assert read == [0, 2]
    assert receiver.failure is None
    [loss] = arrivals.take_losses()
    assert loss.cause is LossCause.BLOCK
    assert loss.text.startswith("a block was lost: ")
    assert ray.get(actor.calls.remote()) == [("pipeline", "run")]
    assert arrivals.quiet_at == 0, "of the last reply, which has ended the run"


class DiesAfterLargeBatches(Plain):
    """Three samples kill their process once, after it may have sent a large batch."""

    def __init__(self, place: Path) -> None:
        super().__init__(120)
        self.place = place

    def __getitem__(self, index: int) -> Any:
        if index % 40 == 20:
            mark = self.place / str(index)
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return index, np.full(1 << 20, index, dtype=np.uint8)


def test_no_batch_is_lost_or_comes_twice_where_processes_die(tmp_path: Path) -> None:
    loader: DpexDataLoader[Any] = DpexDataLoader(
        DiesAfterLargeBatches(tmp_path), 10, num_workers=2, distribute_mode=True
    )
    seen = []
    for indices, arrays in loader:
        assert [int(array[-1]) for array in arrays] == indices.tolist()
        seen += indices.tolist()
    assert seen == list(range(120))
    assert len(list(tmp_path.iterdir())) == 3
