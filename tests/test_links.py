"""Tests of epochs during which links are cut or slow, object stores fill, or memory runs short."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from cluster_programs import small_disk, wait_until, workplace
from cluster_programs.clusters import (
    SMALL_STORE_NODE,
    SPARE_BYTES,
    Cluster,
    little_memory,
    spilled,
)
from cluster_programs.links import Network, network
from cluster_programs.training_process import (
    LENGTH,
    SMALL_STORE,
    Drawn,
    TrainingProcess,
    drawn,
    longest_wait,
    nodes_in,
)

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="needs network namespaces"),
]


@pytest.fixture(scope="module")
def links() -> Iterator[Network]:
    try:
        with network() as made:
            made.attach()  # raises if namespaces or links are not allowed
            yield made
    except (OSError, subprocess.CalledProcessError) as error:
        if "CI" in os.environ:  # CI has root and ip
            raise
        pytest.skip(f"needs root and the ip command: {error}")


@pytest.fixture(scope="module")
def cluster(links: Network) -> Iterator[Cluster]:
    with workplace() as place:
        cluster = Cluster(place, links)
        cluster.add()
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Drawn]:
    return drawn(TrainingProcess(cluster.place, cluster.address).finish())


@pytest.mark.parametrize(
    "seconds",
    [5, pytest.param(30, marks=pytest.mark.long), pytest.param(None, marks=pytest.mark.long)],
    ids="for {} s".format,
)
def test_a_link_that_is_cut_changes_nothing(
    cluster: Cluster, links: Network, undisturbed: list[Drawn], seconds: int | None
) -> None:
    behind = cluster.add()
    # Slow samples, and no stops, so that some batch is always being made.
    training = TrainingProcess(cluster.place, cluster.address, nodes=[behind], seconds=0.05)
    training.until_from(behind)
    training.go()
    links.cut(cluster.links[behind])
    if seconds is not None:
        time.sleep(seconds)
        links.repair(cluster.links[behind])
    result = training.finish(250)
    assert drawn(result) == undisturbed
    # The training process waited for the batches that were being made behind the link.
    assert longest_wait(result) > (seconds or 30) / 2


def test_a_slow_link_changes_nothing(
    cluster: Cluster, links: Network, undisturbed: list[Drawn]
) -> None:
    behind = cluster.add()
    training = TrainingProcess(cluster.place, cluster.address, nodes=[behind])
    training.until_from(behind)
    # A batch of 200 kB takes half a second, including the nodes' other messages.
    links.slow(cluster.links[behind], megabits=4)
    result = training.finish(200)
    assert drawn(result) == undisturbed
    assert behind in nodes_in({"samples": result["samples"][LENGTH // 2 :]})


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("disk_is_full", [pytest.param(False, marks=pytest.mark.long), True])
def test_full_object_stores_change_nothing(disk_is_full: bool) -> None:
    with contextlib.ExitStack() as stack:
        place, quiet = (stack.enter_context(workplace()) for _ in range(2))
        cluster = Cluster(place)
        if disk_is_full:
            stack.enter_context(small_disk(place / "disk"))
            cluster.add(*SMALL_STORE_NODE, f"--object-spilling-directory={place / 'disk'}")
        else:
            cluster.add(*SMALL_STORE_NODE)
        training = TrainingProcess(place, cluster.address, **SMALL_STORE)
        training.until(2)
        # The stopped process takes no batches out of the object store, so the store fills up.
        training.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: spilled(place), 60, "full object store")
        training.process.send_signal(signal.SIGCONT)
        undisturbed = drawn(TrainingProcess(quiet, "local", **SMALL_STORE).finish())
        assert drawn(training.finish()) == undisturbed


# This test is here because the training process needs a node whose memory is not short.
@pytest.mark.long
def test_memory_that_runs_short_costs_time_alone(links: Network, undisturbed: list[Drawn]) -> None:
    with workplace() as place:
        cluster = Cluster(place, links)
        cluster.add(**little_memory())
        mark = place / "mark"
        training = TrainingProcess(place, cluster.address, hungry=(57, 2 * SPARE_BYTES, str(mark)))
        assert drawn(training.finish()) == undisturbed
        assert mark.exists()
