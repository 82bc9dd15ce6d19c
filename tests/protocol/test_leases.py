"""Tests of the index of what leases hold."""

from __future__ import annotations

import pytest
from simulation.schedule import World

from dpex.protocol.binding import Binding
from dpex.protocol.chunks import Part, PickledChunk
from dpex.protocol.leases import Leases
from dpex.protocol.scheduler import Answer, Scheduler
from dpex.protocol.task_lease import TaskLease


def scanned_holders(leases: Leases) -> dict[int, TaskLease | None]:
    """Return what ``holders`` has to be, from all leases."""
    holders: dict[int, TaskLease | None] = {}
    for lease in leases.values():
        for worker in lease.held:
            holders[worker] = None if worker in holders else lease
    return holders


@pytest.mark.parametrize("part", range(4))
def test_the_index_agrees_with_all_leases_after_each_event(part: int) -> None:
    for seed in range(part, 80, 4):
        world = World(seed)
        world.training.start()
        while not world.training.over:
            faults = world.plan.faults
            if faults and world.clock.events >= faults[-1][0]:
                world.faults.happen(faults.pop()[1])
            world.clock.step()
            for pipeline in world.pipelines:
                leases = pipeline.scheduler._leases
                assert leases.holders == scanned_holders(leases)
                assert leases.running == sum(t.busy or not t.ended for t in leases.values())


def test_only_the_latest_leases_that_are_over_are_kept() -> None:
    leases = Leases()
    for number in range(6):
        leases.add(str(number), "process", 0.0)
    leases["0"].give(PickledChunk(b"", 0, Part("run", 0)), run=1)
    for name in ("2", "1", "4", "3"):
        leases[name].end()
    leases["0"].end()  # it still makes samples
    leases.forget_ended(2)
    assert list(leases) == ["0", "3", "4", "5"]
    assert leases.holders == {0: leases["0"]}
    leases["0"].note_request("process", 1, 1, early=False)
    leases.forget_ended(0)
    assert list(leases) == ["5"]


def looked_at(tasks: int, binding: Binding, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many leases a scheduler looks at, in a request and a further chunk of a task."""
    scheduler = Scheduler(0.0, num_workers=tasks, binding=binding)
    scheduler.begin(0.0, in_run=True)
    scheduler.parallel = scheduler.starting = tasks

    def feed(number: int) -> list[Answer]:
        chunk = PickledChunk(b"", number % tasks, Part("run", number))
        decided = scheduler.feed(0.0, chunk)
        return [decision for decision in decided if isinstance(decision, Answer)]

    for number in range(2 * tasks):
        feed(number)
    for number in range(tasks):
        scheduler.request(0.0, str(number), 0, 0, "process")
    looks = 0
    held = TaskLease.held.fget
    assert held is not None

    def look(lease: TaskLease) -> set[int]:
        nonlocal looks
        looks += 1
        return held(lease)

    monkeypatch.setattr(TaskLease, "held", property(look))
    for number in range(10):
        assert scheduler.request(0.0, str(number), 1, 1, "process")
        feed(number)
    return looks


@pytest.mark.parametrize("binding", [Binding.RELEASED, Binding.ALWAYS])
def test_an_event_does_not_look_at_all_leases(
    binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        few = looked_at(16, binding, patch)
    with monkeypatch.context() as patch:
        many = looked_at(256, binding, patch)
    assert many == few
