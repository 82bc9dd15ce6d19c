"""Tests of a pipeline's tasks, without Ray."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dpex.protocol.chunks import AssignedChunk, Chunk, Entry, Run
from dpex.wire.timings import Costs
from dpex.worker import kept_jobs, task
from dpex.worker.chunk_work import ChunkWork
from dpex.worker.map_style import encode, pickled_chunks
from dpex.worker.training_settings import Settings


@pytest.mark.parametrize("ended", [0, 1])
def test_a_chunk_of_an_iteration_that_has_ended_is_not_made(
    monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    """The process has dropped its copies by then, so it would read a stream a second time."""
    run = Run("run", "loader", 7, 0, 1, 0, Settings(".", torch.float32))
    [chunk] = pickled_chunks([Chunk(run, 0, 0, [[0]], [0])], alone=False, resent=False)
    answers: list[Any] = [AssignedChunk(chunk.payload, 0, iteration=1), None]
    actor = Mock(answer=Mock(side_effect=answers), report_of=Mock(return_value=None))
    made = Mock(return_value=iter(()))
    monkeypatch.setattr(task, "_Actor", lambda *_: actor)
    monkeypatch.setattr(ChunkWork, "batches", made)
    monkeypatch.setattr(task, "release_when_closed", Mock())
    monkeypatch.setitem(kept_jobs._jobs_of, "pipeline", set())
    monkeypatch.setitem(kept_jobs._ended, "pipeline", ended)

    whose: Any = {"actor_name": "actor", "pipeline_key": "pipeline", "job": [], "job_key": "job"}
    batches = task.make_batches(task.lease_block(), **whose, last=True, reader="", persistent=False)
    assert not list(batches)
    assert made.called is not bool(ended)


def test_the_end_of_an_early_request_is_reported_before_a_later_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No block takes the report along there, and without it the logical worker stays held."""
    run = Run("run", "loader", 7, 0, 1, 0, Settings(".", torch.float32))
    [chunk] = pickled_chunks([Chunk(run, 0, 0, [[0]], [0])], alone=False, resent=False)
    answers: list[Any] = [AssignedChunk(chunk.payload, 0, iteration=1), None]
    actor = Mock(answer=Mock(side_effect=answers))

    def batches(work: ChunkWork, *_: Any) -> Any:
        work._ask_early()
        yield Entry(0, encode(torch.zeros(1))), Costs()

    monkeypatch.setattr(task, "_Actor", lambda *_: actor)
    monkeypatch.setattr(ChunkWork, "batches", batches)
    monkeypatch.setattr(task, "release_when_closed", Mock())
    monkeypatch.setitem(kept_jobs._jobs_of, "pipeline", set())
    whose: Any = {"actor_name": "actor", "pipeline_key": "pipeline", "job": [], "job_key": "job"}
    blocks = task.make_batches(task.lease_block(), **whose, last=False, reader="", persistent=False)
    assert len(list(blocks)) == 1
    assert [call.args for call in actor.report.call_args_list] == [(1,), (None,)]
