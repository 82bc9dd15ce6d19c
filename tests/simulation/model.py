"""A model of what a loader has to deliver. It knows the history of a schedule, and nothing of dpex.

A history is a list of tuples: the time, the kind of the event, and its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["check"]


def check(history: Sequence[tuple[Any, ...]], plan: Any) -> str | None:
    """Return what is wrong with a history, or None.

    Args:
        history: The events of a schedule.
        plan: The values that the schedule was drawn with. The model reads ``workers``, ``length``,
            ``streams``, ``in_order``, ``deadly`` and ``unstorable``.
    """
    deliveries: dict[int, list[tuple[Any, str]]] = {}
    left: dict[int, bool] = {}
    for event in history:
        if event[1] == "delivers":
            _, _, epoch, batch, value, outcome = event
            if outcome == "batch" and not _is_right(batch, value, plan):
                return f"epoch {epoch}: batch {batch} has the content {value}"
            deliveries.setdefault(epoch, []).append((batch, outcome))
        elif event[1] == "leaves":
            left[event[2]] = event[4]
    if not left:
        return "no epoch was begun"
    for epoch, finished in left.items():
        got = deliveries.get(epoch, [])
        wrong = _wrong_streams(got, plan, finished) if plan.streams else _wrong(got, plan, finished)
        if wrong is not None:
            return f"epoch {epoch}: {wrong}"
    return None


def _is_right(batch: int, value: Any, plan: Any) -> bool:
    if plan.streams:
        return bool(value == (batch % plan.workers, batch // plan.workers))
    return bool(value[0] == batch)


def _wrong(got: list[tuple[int, str]], plan: Any, finished: bool) -> str | None:
    batches = [batch for batch, _ in got]
    expected = list(range(plan.length if finished else len(batches)))
    if plan.in_order and batches != expected:
        return f"delivered {batches}, not 0 to {len(expected) - 1} in order"
    if len(set(batches)) != len(batches):
        return f"delivered a batch twice: {batches}"
    if finished and sorted(batches) != expected:
        return f"did not deliver {sorted(set(expected) - set(batches))}"
    for batch, outcome in got:
        if (outcome == "error") != (batch in plan.deadly or batch in plan.unstorable):
            return f"batch {batch} is delivered as {outcome}"
    return None


def _wrong_streams(got: list[tuple[int, str]], plan: Any, finished: bool) -> str | None:
    workers = plan.workers
    lengths = list(plan.streams)
    for batch in plan.deadly:
        worker, number = batch % workers, batch // workers
        lengths[worker] = min(lengths[worker], number + 1)
    of_stream: list[list[int]] = [[] for _ in range(workers)]
    for batch, outcome in got:
        of_stream[batch % workers].append(batch // workers)
        deadly = batch in plan.deadly and batch // workers < plan.streams[batch % workers]
        if (outcome == "error") != deadly:
            return f"batch {batch} is delivered as {outcome}"
    for worker, numbers in enumerate(of_stream):
        if numbers != list(range(len(numbers))):
            return f"stream {worker} has the batches {numbers}"
        if finished and len(numbers) != lengths[worker]:
            return f"stream {worker} ends after {len(numbers)} of {lengths[worker]} batches"
    if plan.in_order:
        batches = [batch for batch, _ in got]
        expected = sorted(
            number * workers + worker
            for worker in range(workers)
            for number in range(lengths[worker])
        )
        if batches != expected[: len(batches)]:
            return f"delivered {batches}, not {expected[: len(batches)]}"
    return None
