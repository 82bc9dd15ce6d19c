"""Tests of the sizes of chunks and of the run-ahead, which follow from costs alone."""

from __future__ import annotations

import itertools
from typing import Any

from dpex.protocol.chunk_sizes import ChunkPlanner


def planner(*, free_cores: int = 2, **changes: Any) -> ChunkPlanner:
    values = {"num_workers": 2, "prefetch_factor": 2, "prefetch_bytes": 64 << 20}
    p = ChunkPlanner(**{**values, **changes})
    p.begin(free_cores=free_cores)
    return p


def observe(p: ChunkPlanner, *, ms: float, kilobytes: float, share: float = 1.0) -> None:
    seconds = ms / 1e3
    size = int(kilobytes * 1024)
    p.observe(batches=1, seconds=seconds, cpu_seconds=share * seconds, size_bytes=size)


def sizes(p: ChunkPlanner, count: int, remaining: int | None = None) -> list[int]:
    found = []
    for _ in range(count):
        found.append(p.size(remaining=remaining))
        p.count_sent()
    return found


def test_unknown_costs_mean_single_batches_and_torch_s_run_ahead() -> None:
    p = planner(num_workers=3, prefetch_factor=4)
    assert p.window == 12
    assert sizes(planner(), 6) == [1] * 6


def test_chunks_begin_with_one_batch_and_grow_with_every_round_of_tasks() -> None:
    p = planner()
    observe(p, ms=1, kilobytes=1)
    for _ in range(2):
        made = sizes(p, 8)
        assert made[0] == 1
        for place, size in enumerate(made):
            assert 4 ** (place // 2) <= size <= 4 ** (place // 2 + 1)
        p.begin(free_cores=2)


def test_a_chunk_is_settled_once_every_task_has_had_two() -> None:
    p = planner()
    assert not p.past_first_chunks
    sizes(p, 10)
    assert not p.past_first_chunks  # no costs are known
    observe(p, ms=10, kilobytes=1)
    assert p.past_first_chunks
    p.begin(free_cores=2)
    assert not p.past_first_chunks


def test_chunks_are_longer_where_many_tasks_run() -> None:
    p = planner(num_workers=60, prefetch_bytes=1 << 40)
    observe(p, ms=1000, kilobytes=1, share=0.01)
    past_first_chunks = sizes(p, 1000)[200:]
    assert 2.9 <= sum(past_first_chunks) / len(past_first_chunks) <= 3.1


def test_chunks_are_a_second_of_work_and_no_two_in_a_row_the_same() -> None:
    p = planner(prefetch_bytes=1 << 40)
    observe(p, ms=10, kilobytes=1)
    past_first_chunks = sizes(p, 200)[10:]
    assert 75 <= min(past_first_chunks) < 80 < 120 < max(past_first_chunks) <= 125
    assert 98 <= sum(past_first_chunks) / len(past_first_chunks) <= 102
    assert all(a != b for a, b in itertools.pairwise(past_first_chunks))


def test_a_slow_batch_is_a_chunk_of_its_own() -> None:
    p = planner()
    observe(p, ms=3000, kilobytes=1)
    assert set(sizes(p, 100)) == {1}


def test_bytes_bound_chunk_and_window() -> None:
    p = planner(prefetch_bytes=320 << 20)
    observe(p, ms=1, kilobytes=32 << 10)
    assert p.window == 10
    assert max(sizes(p, 100)) == 1
    p = planner(prefetch_bytes=512 << 20)
    observe(p, ms=1, kilobytes=32 << 10)
    assert max(sizes(p, 100)) == 16 // 6


def test_a_chunk_is_a_quarter_of_a_gigabyte_at_most() -> None:
    p = planner(prefetch_bytes=1 << 40)
    observe(p, ms=1, kilobytes=64 << 10)
    assert max(sizes(p, 100)) == 4


def test_the_window_is_never_less_than_torch_s() -> None:
    p = planner(num_workers=4, prefetch_factor=3, prefetch_bytes=0)
    observe(p, ms=1, kilobytes=1024)
    assert p.window == 12


def test_run_ahead_covers_every_worker_three_times() -> None:
    p = planner(prefetch_bytes=100 << 20)
    observe(p, ms=0.1, kilobytes=1024)
    assert max(sizes(p, 200)) * 3 * p.parallel <= p.window


def test_chunks_that_the_window_limits_differ() -> None:
    p = planner(num_workers=32, free_cores=32)
    observe(p, ms=1, kilobytes=1)
    limit = p.window // (3 * 32)
    past_first_chunks = sizes(p, 200)[70:]
    assert set(past_first_chunks) == set(range(limit - 3, limit + 1))


def test_chunks_shrink_towards_the_end() -> None:
    p = planner(prefetch_bytes=1 << 40)
    observe(p, ms=1, kilobytes=1)
    sizes(p, 100)
    assert p.size(remaining=40) == 10
    assert p.size(remaining=1) == 1


def test_open_chunks_count_as_if_they_were_sent() -> None:
    p, other = planner(num_workers=32, free_cores=32), planner(num_workers=32, free_cores=32)
    for one in (p, other):
        observe(one, ms=1, kilobytes=1)
        sizes(one, 70)
    assert sizes(p, 32) == [other.size(remaining=None, open_chunks=place) for place in range(32)]


def test_tasks_begin_with_the_free_cores() -> None:
    assert planner(num_workers=32, free_cores=2).parallel == 2
    assert planner(num_workers=1, free_cores=8).parallel == 1


def test_tasks_that_compute_stay_on_the_cores() -> None:
    p = planner(num_workers=32)
    observe(p, ms=10, kilobytes=1, share=1.0)
    assert p.parallel == 2


def test_tasks_that_wait_scale_up_to_num_workers() -> None:
    p = planner(num_workers=32)
    observe(p, ms=10, kilobytes=1, share=0.01)
    assert p.parallel == 32


def test_where_ray_counts_cpus_all_workers_tasks_are_left_to_it_once_warm() -> None:
    p = planner(num_workers=8, prefetch_bytes=0, free_cores=1, claims_cpus=True)
    assert p.parallel == 1
    observe(p, ms=10, kilobytes=1)
    assert p.parallel == 8


def test_free_cores_are_counted_again_for_every_iteration() -> None:
    p = planner(num_workers=8, free_cores=1)
    p.begin(free_cores=4)
    assert p.parallel == 4
