"""Tests of limits on cores and memory, which dpex reads from files like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cluster_programs import RANK_VARIABLES

from dpex.cluster import machine_share

GIB = 1 << 30
MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine_share, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine_share, "_GROUPS", tmp_path / "groups")
    write(tmp_path / "proc/meminfo", f"MemTotal: 999 kB\nMemAvailable: {8 << 20} kB\nHuge: 0\n")
    return tmp_path


def write(file: Path, text: str | int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(text))


@pytest.mark.parametrize("own", ["", "/job/step", "/../elsewhere"])
def test_where_nothing_is_limited_the_machine_is(kernel: Path, own: str) -> None:
    if own:
        write(kernel / "proc/self/cgroup", f"1:net:/\n0::{own}\n")
        write(kernel / "groups/job/step/memory.max", "max\n")
        write(kernel / "groups/job/step/cpu.max", "max 100000\n")
    assert machine_share.usable_memory() == MACHINE_BYTES
    assert machine_share.free_memory() == min(MACHINE_BYTES, 8 * GIB)
    assert machine_share.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("limited", ["", "job", "job/step"])
def test_a_limit_counts_wherever_it_is_set(kernel: Path, limited: str) -> None:
    write(kernel / "proc/self/cgroup", "0::/job/step\n")
    group = kernel / "groups" / limited
    write(group / "memory.max", 3 * GIB)
    write(group / "memory.current", 2 * GIB)
    write(group / "memory.stat", f"anon {GIB}\ninactive_file {GIB // 2}\n")
    write(group / "cpu.max", "50000 100000\n")
    assert machine_share.usable_memory() == 3 * GIB
    assert machine_share.free_memory() == 3 * GIB // 2
    assert machine_share.usable_cores() == 1


def test_older_kernels_have_their_limits_elsewhere(kernel: Path) -> None:
    write(kernel / "groups/memory/memory.limit_in_bytes", GIB)
    assert machine_share.usable_memory() == GIB
    write(kernel / "groups/cpu/cpu.cfs_quota_us", "-1\n")
    write(kernel / "groups/cpu/cpu.cfs_period_us", "100000\n")
    assert machine_share.usable_cores() == len(os.sched_getaffinity(0))
    write(kernel / "groups/cpu/cpu.cfs_quota_us", "50000\n")
    assert machine_share.usable_cores() == 1


def test_what_cannot_be_read_does_not_matter(kernel: Path) -> None:
    (kernel / "proc/meminfo").unlink()
    assert machine_share.free_memory() == MACHINE_BYTES


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "1"}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "1"}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_SIZE": "2"}, 1),  # not a launcher's
        ({"WORLD_SIZE": "2"}, 2),
        ({"WORLD_SIZE": "many"}, 1),
    ],
)
def test_the_launcher_says_how_many_ranks_are_on_this_machine(
    bare_environment: pytest.MonkeyPatch, variables: dict[str, str], ranks: int
) -> None:
    for name, value in variables.items():
        bare_environment.setenv(name, value)
    assert machine_share.ranks_here() == ranks


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_cores_are_divided_among_ranks(variable: str, bare_environment: pytest.MonkeyPatch) -> None:
    cores = machine_share.free_cores()
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    bare_environment.setenv("LOCAL_RANK", "0")
    bare_environment.setenv(variable, str(cores))
    assert machine_share.free_cores() == 1
    bare_environment.setenv(variable, "1000")
    assert machine_share.free_cores() == 1


@pytest.mark.parametrize(
    ("own", "of_parent", "ranks", "share"),
    [
        (64, 64, "", 64),
        (64, 64, "8", 8),
        (8, 64, "8", 8),  # bound to cores of its own
        (32, 64, "8", 8),  # bound to a NUMA node, with three others
        (8, 8, "8", 1),
        (64, 1, "8", 8),  # OpenMP has bound the parent's main thread
    ],
)
def test_a_bound_rank_uses_all_its_cores(
    own: int, of_parent: int, ranks: str, share: int, bare_environment: pytest.MonkeyPatch
) -> None:
    bare_environment.setenv("LOCAL_WORLD_SIZE", ranks)
    cores = {0: own, os.getppid(): of_parent}
    bare_environment.setattr(machine_share, "_own_groups", lambda: iter(()))
    bare_environment.setattr(os, "sched_getaffinity", lambda process: set(range(cores[process])))
    assert machine_share.free_cores() == share
