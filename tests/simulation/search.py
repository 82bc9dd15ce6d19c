"""Play many seeds on all processors, and collect the failures."""

from __future__ import annotations

import concurrent.futures
import gc
import os
from collections.abc import Iterator

from simulation.processes import ProcessWorld
from simulation.schedule import Failure, World

__all__ = ["WORLDS", "failures_among", "search"]

WORLDS = {world.carrier: world for world in (World, ProcessWorld)}
# Seeds that one call of a process plays.
SEEDS = 250
# Of so many seeds, one is also played on processes of one machine, which have fewer races.
SEEDS_FOR_PROCESSES = 4


def failures_among(seeds: range) -> list[str]:
    """Play seeds, and return the failures."""
    failures = []
    gc.disable()  # a world is a reference cycle, so the collector would run during most schedules
    try:
        for seed in seeds:
            worlds = list(WORLDS.values())
            for world in worlds if seed % SEEDS_FOR_PROCESSES == 0 else worlds[:1]:
                try:
                    world(seed).play()
                except Failure as failure:
                    failures.append(str(failure))
            if seed % 50 == 0:
                gc.collect()
    finally:
        gc.enable()
    return failures


def search(first: int, count: int) -> Iterator[tuple[int, list[str]]]:
    """Play seeds on all processors.

    Args:
        first: The first seed.
        count: Number of seeds.

    Yields:
        How many more schedules have been played, and their failures.
    """
    end = first + count
    parts = [range(start, min(start + SEEDS, end)) for start in range(first, end, SEEDS)]
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        playing = {pool.submit(failures_among, part): part for part in parts}
        for done in concurrent.futures.as_completed(playing):
            yield len(playing[done]), done.result()
