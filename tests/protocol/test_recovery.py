"""Tests of the recovery of lost chunks: the batches to resend, and the batches that fail."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from chunks import sent

from dpex.errors import BatchLostError
from dpex.protocol.loss_causes import LossCause
from dpex.protocol.recovery import Recovery, recover


def resent(plan: Recovery) -> list[tuple[list[list[int]], bool, int]]:
    return [
        ([list(c.numbers) for c in m.chunks], m.attempt.alone, m.attempt.tries)
        for m in plan.resends
    ]


def test_each_batch_gets_a_task_of_its_own() -> None:
    chunk = sent(0, 0, 3)
    chunk.missing -= {0}
    plan = recover([chunk, sent(1, 1, 1)], LossCause.TASK, "a worker died")
    assert resent(plan) == [([[3], [6], [1]], True, 1)]
    assert (plan.retries, plan.failed, plan.reason) == (3, [], "a worker died")


def test_a_batch_that_is_lost_alone_fails_and_names_its_indices() -> None:
    plan = recover([sent(0, 4, 1, tries=1), sent(1, 1, 1)], LossCause.TASK, "killed")
    [(batch, error)] = plan.failed
    assert batch == 4
    assert isinstance(error, BatchLostError)
    with pytest.raises(
        BatchLostError, match=r"batch 4 \(dataset indices \[0\]\) died\..*probably.*: killed$"
    ):
        raise error
    assert resent(plan) == [([[1]], True, 1)]


def test_an_error_that_was_pickled_by_its_old_name_loads() -> None:
    pickled = pickle.dumps(BatchLostError("batch 4"), protocol=0)
    old = pickled.replace(b"BatchLostError", b"ChunkLostError")
    assert old != pickled
    error = pickle.loads(old)
    assert type(error).__name__ == "BatchLostError"
    assert error.args == ("batch 4",)


def test_a_stream_stays_whole_and_gets_a_second_try() -> None:
    lost = [sent(0, 0, 2, stream=True), sent(1, 6, 2, stream=True)]
    first = recover(lost, LossCause.TASK, "died")
    assert resent(first) == [([[0, 3, 6, 9]], True, 1)]
    assert first.retries == 4
    second = recover([sent(2, 0, 4, tries=1, stream=True)], LossCause.TASK, "died")
    assert resent(second) == [([[0, 3, 6, 9]], True, 2)]
    assert second.retries == 4
    third = recover([sent(3, 0, 4, tries=2, stream=True)], LossCause.TASK, "died")
    assert (resent(third), third.retries) == ([], 0)
    assert [batch for batch, _ in third.failed] == [0]
    assert third.ended == [3]


def test_lost_blocks_are_resent_as_they_were() -> None:
    chunk = sent(1, 1, 3, tries=2)
    chunk.missing -= {4}
    plan = recover([sent(0, 0, 2), chunk], LossCause.BLOCK, "ObjectLostError")
    assert resent(plan) == [([[0, 3]], False, 1), ([[1], [7]], True, 2)]
    assert [message.attempt.lost_blocks for message in plan.resends] == [1, 1]
    assert (plan.retries, plan.failed) == (4, [])


def test_a_full_store_gets_time_and_more_tries_one_at_a_time() -> None:
    plan = recover([sent(0, 0, 2), sent(1, 1, 1, tries=5)], LossCause.STORE_FULL, "full")
    assert plan.wait_s > 0
    assert resent(plan) == [([[0], [3]], True, 1), ([[1]], True, 6)]
    assert all(message.attempt.one_by_one for message in plan.resends)
    [(batch, error)] = recover([sent(0, 0, 1, tries=6)], LossCause.STORE_FULL, "full").failed
    assert batch == 0
    assert str(error).startswith("Ray has no space for batch 0 (dataset indices [0])")


@pytest.mark.parametrize("cause", [LossCause.TASK, LossCause.STORE_FULL])
@pytest.mark.parametrize("tries", [0, 1])
def test_a_loss_of_another_kind_leaves_the_budget_of_lost_blocks(
    cause: LossCause, tries: int
) -> None:
    chunk = sent(0, 0, 1, tries=tries, stream=True)
    chunk.attempt = replace(chunk.attempt, lost_blocks=2)
    [message] = recover([chunk], cause, "lost").resends
    assert message.attempt.lost_blocks == 2


def test_chunks_of_a_stream_with_other_budgets_are_not_joined() -> None:
    lost = [sent(0, 0, 1, stream=True), sent(1, 3, 1, stream=True)]
    lost[1].attempt = replace(lost[1].attempt, lost_blocks=2)
    plan = recover(lost, LossCause.BLOCK, "lost")
    assert resent(plan) == [([[0]], False, 1), ([[3]], False, 1)]
    assert [message.attempt.lost_blocks for message in plan.resends] == [1, 3]


@pytest.mark.parametrize("cause", list(LossCause))
@pytest.mark.parametrize("tries", [0, 1, 6])
@pytest.mark.parametrize("stream", [False, True])
def test_every_missing_batch_is_resent_or_fails_once(
    cause: LossCause, tries: int, stream: bool
) -> None:
    lost = [sent(n, n % 3 + 6 * (n // 3), 2, tries=tries, stream=stream) for n in range(6)]
    missing = sorted(batch for chunk in lost for batch in chunk.missing)
    plan = recover(lost, cause, "lost")
    again = [b for message in plan.resends for c in message.chunks for b in c.numbers]
    failed = [batch for batch, _ in plan.failed]
    after_the_end = [b for b in missing for end in plan.ended if b >= end and (b - end) % 3 == 0]
    assert sorted([*again, *failed, *after_the_end]) == missing
    assert plan.retries == len(again)
