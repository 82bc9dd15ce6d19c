"""The search itself: many schedules, the seeds of the races that it has found, and planted bugs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from simulation import model, mutations
from simulation.mutations import ALL, FIRST, MUTATIONS, SELDOM
from simulation.plan import Plan
from simulation.schedule import World, play, readable
from simulation.search import WORLDS, failures_among

SCHEDULES = 20_000
# A planted bug has to fail one of so many schedules, from its seed in `FIRST` on.
SCHEDULES_OF_A_BUG = 300
# So many test cases share the schedules that two processes of pytest end together.
PARTS = 8
LEAST_EVENTS = 200
# The races that the search has found in the protocol: each as the bug that its correction removed,
# and a seed that fails with that bug. A change of what seeds draw needs other seeds, which
# `make simulate MUTATIONS=1` prints.
RACES = [
    ("a replaced process returns, and ends its task", 223),
    ("a restarted task before a later stage continues in the next iteration", 2776),
    ("a repeated request counts as a restart", 72),
    ("a restarted task reports only the first logical worker that starts again", 242),
    ("the state after a repeated chunk is taken for that of the last chunk", 72),
    ("an early request forgets the deaths on the chunk that is being made", 170),
    ("a lost batch gets a new budget for its blocks", 1070),
    ("a cancelled chunk takes along that the state starts again", 63),
    ("a restarted task that had ended gives its chunks to other tasks", 38439),
    ("a chunk that is repeated does not bind its logical worker", 55050),
    ("a task does not hold the logical workers of the chunks that it has to repeat", 120387),
    ("a closed pipeline forgets the processes that have not ended with their tasks", 139354),
    ("the deaths on a chunk whose last sample kills its process are not counted", 225),
    ("a repeated early request releases a logical worker whose sample is being made", 460855),
    ("a new process makes a chunk of an iteration that has ended", 355803),
    ("a chunk to repeat waits for ever for a dead process whose request comes late", 805856),
    ("a logical worker whose only chunk was cancelled has had a process", 482964),
    ("a logical worker whose only chunk was cancelled has had a process", 812619),
    ("a block that a request has announced does not count if its chunk is cancelled", 534935),
    ("a process that Ray has replaced counts as at work after its last sample", 423345),
    ("a late change of an earlier iteration binds its logical worker in this one", 354993),
]


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_fails(part: int) -> None:
    size = SCHEDULES // PARTS
    assert failures_among(range(part * size, (part + 1) * size)) == []


def test_the_same_seed_gives_the_same_history() -> None:
    histories = [play(7).history for _ in range(2)]
    assert histories[0] == histories[1]


def test_a_schedule_has_enough_events_workers_and_faults() -> None:
    for seed in range(200):
        world = World(seed)
        faults = len(world.plan.faults)
        world.play()
        assert world.clock.events >= LEAST_EVENTS
        assert 2 <= world.plan.workers <= 8
        assert faults <= 5


def test_a_seed_replays_with_a_log() -> None:
    command = [sys.executable, "-m", "simulation", "--seed", "3"]
    tests = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert readable(play(3).history) in done.stdout


def a_plan(**values: object) -> Plan:
    plan = World(0).plan
    given = {"streams": None, "length": 3, "in_order": True, "deadly": frozenset(), **values}
    for name, value in given.items():
        setattr(plan, name, value)
    return plan


def a_history(*batches: int) -> list[tuple[object, ...]]:
    deliveries = [(0.0, "delivers", 0, batch, (batch, 0), "batch") for batch in batches]
    return [*deliveries, (1.0, "leaves", 0, "READ", True)]


@pytest.mark.parametrize(
    ("batches", "wrong"),
    [
        ((0, 1, 2), None),
        ((0, 2, 1), "in order"),
        ((0, 1), "in order"),
        ((0, 1, 1, 2), "in order"),
    ],
)
def test_the_model_knows_what_an_epoch_delivers(
    batches: tuple[int, ...], wrong: str | None
) -> None:
    found = model.check(a_history(*batches), a_plan())
    assert found is None if wrong is None else wrong in str(found)


def test_the_model_needs_all_batches_in_any_order() -> None:
    plan = a_plan(in_order=False)
    assert model.check(a_history(2, 0, 1), plan) is None
    assert "did not deliver [1]" in str(model.check(a_history(2, 0), plan))
    assert "twice" in str(model.check(a_history(2, 0, 0, 1), plan))


def test_the_model_shares_no_code_with_dpex() -> None:
    imports = [line for line in Path(model.__file__).read_text().splitlines() if "import" in line]
    assert not [line for line in imports if "dpex" in line or "simulation" in line]


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_the_source_that_a_planted_bug_changes_occurs_once(mutation: mutations.Mutation) -> None:
    assert mutation.path.read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new


@pytest.mark.parametrize(
    "name", sorted({m.name for m in MUTATIONS} - {name for name, _ in RACES} - SELDOM)
)
def test_a_planted_bug_is_found(name: str) -> None:
    assert mutations.find(name, first=FIRST.get(name, 0), count=SCHEDULES_OF_A_BUG)


@pytest.mark.parametrize(("name", "seed"), RACES)
def test_a_race_of_the_past_is_gone(name: str, seed: int) -> None:
    assert mutations.find(name, first=seed, count=1)
    carrier = next(m.carrier for m in ALL if m.name == name)
    WORLDS[carrier](seed).play()


def test_thirty_bugs_are_planted() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) >= 30
    assert FIRST.keys() | SELDOM < {mutation.name for mutation in MUTATIONS}
