"""Search schedules for a failure, replay a seed, or search for planted bugs (`make simulate`)."""

from __future__ import annotations

import argparse
import sys
import time

from simulation import mutations
from simulation.schedule import Failure, readable
from simulation.search import WORLDS, search

MOST_SHOWN = 10


def replay(seed: int, carrier: str) -> int:
    """Print the log of a seed's schedule."""
    world = WORLDS[carrier](seed)
    print(world.plan)
    failure = None
    try:
        world.play()
    except Failure as error:
        failure = error
    print(readable(world.history))
    print(failure or f"seed {seed}: {world.clock.events} events, no failure")
    return 0 if failure is None else 1


def simulate(first: int, count: int) -> int:
    """Play schedules, and print the seeds that fail."""
    began, played, failed = time.monotonic(), 0, 0
    for number, failures in search(first, count):
        played += number
        failed += len(failures)
        for failure in failures:
            if failed <= MOST_SHOWN:
                _, seed, carrier, *_ = failure.split()
                how = f"SEED={seed} CARRIER={carrier.strip('(),')}"
                print(f"{failure}\n  replay it: make simulate {how}")
        if sys.stderr.isatty():
            print(f"\r{played} of {count} schedules", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    print(f"{played} schedules in {seconds:.0f} s, {failed} failures")
    return 1 if failed else 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this seed, with a log of its events")
    parser.add_argument("--carrier", choices=WORLDS, default="cluster", help="for the replay")
    parser.add_argument("--mutations", action="store_true", help="search for the planted bugs")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return replay(arguments.seed, arguments.carrier)
    if arguments.mutations:
        return mutations.main()
    return simulate(arguments.first, arguments.count)


if __name__ == "__main__":
    sys.exit(main())
