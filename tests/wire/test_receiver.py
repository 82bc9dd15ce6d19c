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
from dpex.protocol.chunks import Entry, Part
from dpex.protocol.loss_causes import Loss, LossCause
from dpex.wire.arrivals import Arrivals
from dpex.wire.block_format import BlockWriter
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

    from dpex.carriers.ray.actor import PipelineActor, Reply
    from dpex.wire.receiver import Receiver

    class Worker:
        def put(self, table: Any) -> list[Any]:
            return [ray.put(table)]

    class FakePipelineActor:
        def __init__(self, replies: list[Any]) -> None:
            self.replies = replies

        def take(self, pipeline_key: str, run: str) -> Any:
            return self.replies.pop(0)

    worker: Any = ray.remote(num_cpus=0)(Worker)
    lives, dies = worker.remote(), worker.remote()
    workers = enumerate([lives, dies, lives])
    blocks = [ray.get(worker.put.remote(table_of(batch)))[0] for batch, worker in workers]
    ray.kill(dies)
    wait_until(lambda: is_lost(blocks[1]), 60, "loss of the block")
    parts = [Part("run", number, (number,)) for number in range(3)]
    full = Loss(LossCause.STORE_FULL, "a full disk", Part("run", 7))
    # All come in one reply, and the first is read before the loss of another chunk is told.
    reply = Reply([(block, 1, part) for block, part in zip(blocks, parts, strict=True)])
    reply.losses = [full]
    actor_class: Any = ray.remote(num_cpus=0)(FakePipelineActor)
    actor = actor_class.remote([reply, Reply(ended=True)])
    context = ray.get_runtime_context()
    handle = PipelineActor(actor, "actor", (context.gcs_address, context.get_job_id()))
    arrivals = Arrivals()
    receiver = Receiver(
        handle,
        "pipeline",
        "run",
        arrivals,
        pin_device=None,
        through_client=through_client,
    )
    wait_until(lambda: arrivals._ended, 60, "end of the replies")
    assert receiver.failure is None
    read: list[Any] = []
    while (news := arrivals.take()) is not None:
        read.append(news if isinstance(news, Loss) else [entry.batch for entry in news.batches])
    first, lost, second, told = read
    assert (first, second, told) == ([0], [2], full)
    assert (lost.cause, lost.part) == (LossCause.BLOCK, parts[1])
    assert lost.text.startswith("a block was lost: ")


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
