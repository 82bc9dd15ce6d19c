"""Tests of the worker processes that hold dataset copies of a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dpex.carriers.ray.copy_holders import CopyHolders


def play(
    scenario: Callable[[CopyHolders], Awaitable[None]], dead: frozenset[str] = frozenset()
) -> None:
    async def run() -> None:
        await scenario(CopyHolders(lambda process, _: process not in dead))

    asyncio.run(asyncio.wait_for(run(), 30))


async def is_waiting(task: asyncio.Task[object]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return not task.done()


def test_released_waits_until_each_process_has_confirmed_the_end() -> None:
    async def scenario(holders: CopyHolders) -> None:
        asking = {p: asyncio.create_task(holders.next_end(p, 0)) for p in ("a", "b", "idle")}
        holders.hold("a")
        holders.hold("b")
        assert await holders.released(9) == [], "the iteration is not over"
        holders.end()
        released = asyncio.create_task(holders.released(9))
        assert [await task for task in asking.values()] == [1, 1, 1]
        for process in ("a", "b"):
            assert await is_waiting(released)
            asking[process] = asyncio.create_task(holders.next_end(process, 1))
        assert await released == []
        for process in ("a", "b"):
            assert await is_waiting(asking[process])
            asking[process].cancel()

    play(scenario)


def test_a_confirmation_does_not_count_for_a_later_iteration() -> None:
    async def scenario(holders: CopyHolders) -> None:
        holders.hold("a")
        holders.end()
        holders.hold("a")  # the next iteration begins before the confirmation
        holders.drop("a", 1)
        holders.end()
        released = asyncio.create_task(holders.released(9))
        assert await is_waiting(released)
        holders.drop("a", 2)
        assert await released == []

    play(scenario)


def test_a_process_that_answers_late_is_named_once() -> None:
    async def scenario(holders: CopyHolders) -> None:
        holders.hold("late")
        holders.end()
        assert await holders.released(0) == ["late"]
        assert await holders.released(0) == []

    play(scenario)


def test_a_dead_process_holds_nothing() -> None:
    async def scenario(holders: CopyHolders) -> None:
        holders.hold("dead")
        holders.end()
        assert await holders.released(20) == []

    play(scenario, dead=frozenset({"dead"}))


def test_copies_that_outlive_an_iteration_are_held_until_all_are_dropped() -> None:
    """The process may be told of the iteration's end only after the pipeline was closed."""

    async def scenario(holders: CopyHolders) -> None:
        holders.hold("a")
        holders.end(keep=True)
        assert await holders.released(9) == [], "persistent workers keep their copies"
        holders.end()
        holders.drop("a", 1)
        released = asyncio.create_task(holders.released(9))
        await asyncio.sleep(0)
        assert not released.done()
        holders.drop("a", 1 << 62)
        assert await released == []

    play(scenario)
