"""The benchmark ``widen``: time to the first batch with 2, 10 and 32 workers.

Samples wait and take no processor time. If a loader starts all its workers at once, they compete
for the cores before the first batch. If it starts few workers, it must start the others in time. So
the benchmark measures two times, both from the start of a fresh process. One is the time to the
first batch. The other is the time until the rate of one second is nine tenths of the ideal rate of
all workers. This takes many seconds, so the benchmark measures it only once.
"""

import sys
from dataclasses import asdict
from typing import Any

from benchmarks.fresh import run_fresh
from benchmarks.goals import Goal
from benchmarks.harness import arguments, describe_machine, say, spread, summarise, write
from benchmarks.plots import lines
from benchmarks.start_up import first_sleeping_batch

PEERS = ("torch fork", "dpex")
WORKERS = (2, 10, 32)
SLEEP_S = 0.005
BATCH_SIZE = 50
RAMP_SHARE = 0.9
GIVE_UP_S = 60.0
GOAL_WIDEST_OVER_NARROWEST = 1.2
GOAL_RAMP_OVER_TORCH = 1.0


def main() -> None:
    options = arguments(__doc__, "widen", ["--rounds", "3", *sys.argv[1:]])
    record = describe_machine("widen")
    record["settings"] = {
        "num_workers": WORKERS,
        "batch_size": BATCH_SIZE,
        "sleep_s": SLEEP_S,
        "ramp_share": RAMP_SHARE,
        "give_up_s": GIVE_UP_S,
    }

    def run(peer: str, workers: int, ramp_share: float) -> dict[str, float | None]:
        moments: dict[str, float | None] = run_fresh(
            first_sleeping_batch,
            peer=peer,
            sleep_s=SLEEP_S,
            batch_size=BATCH_SIZE,
            workers=workers,
            ramp_share=ramp_share,
            give_up_s=GIVE_UP_S,
        )
        say(f"widen {peer} {workers}: {moments}")
        return moments

    # These runs come first, so that they also fill the page cache. Their times to the first batch
    # do not count.
    ramps = {
        peer: {workers: run(peer, workers, RAMP_SHARE) for workers in WORKERS} for peer in PEERS
    }
    runs: dict[str, dict[int, list[Any]]] = {
        peer: {workers: [] for workers in WORKERS} for peer in PEERS
    }
    for _ in range(options.rounds):
        for peer in PEERS:
            for workers in WORKERS:
                runs[peer][workers].append(run(peer, workers, 0.0))
    record["runs"] = runs
    record["ramps"] = ramps
    first = {
        peer: {n: [moments["first_batch_s"] for moments in by_workers[n]] for n in WORKERS}
        for peer, by_workers in runs.items()
    }
    record["first_batch_s"] = {
        peer: {n: summarise(values) for n, values in by_workers.items()}
        for peer, by_workers in first.items()
    }
    over = {
        peer: [
            wide / narrow
            for wide, narrow in zip(by_workers[WORKERS[-1]], by_workers[WORKERS[0]], strict=True)
        ]
        for peer, by_workers in first.items()
    }
    record["widest_over_narrowest"] = {peer: summarise(ratios) for peer, ratios in over.items()}

    def ramp_note(peer: str) -> str:
        moments = (ramps[peer][workers]["full_rate_s"] for workers in WORKERS)
        return f"{peer} " + " / ".join(
            f"{m:.0f} s" if m else f"not in {GIVE_UP_S:.0f} s" for m in moments
        )

    goal = Goal.of(
        "latency",
        f"first batch of a fresh process with {WORKERS[-1]} workers / with {WORKERS[0]}",
        over["dpex"],
        "<=",
        GOAL_WIDEST_OVER_NARROWEST,
        "ratio",
        f"torch fork {spread(record['widest_over_narrowest']['torch fork'])}; "
        f"{RAMP_SHARE:.0%} of the rate of {' / '.join(map(str, WORKERS))} workers after: "
        + ", ".join(map(ramp_note, PEERS)),
    )
    ramp_s = {peer: ramps[peer][WORKERS[-1]]["full_rate_s"] or GIVE_UP_S for peer in PEERS}
    ramp_goal = Goal.of(
        "latency",
        f"{RAMP_SHARE:.0%} of the rate of {WORKERS[-1]} waiting workers after, dpex / torch fork",
        [ramp_s["dpex"] / ramp_s["torch fork"]],
        "<=",
        GOAL_RAMP_OVER_TORCH,
        "ratio",
        ", ".join(f"{peer} {seconds:.1f} s" for peer, seconds in ramp_s.items()),
    )
    record["goals"] = [asdict(goal), asdict(ramp_goal)]
    write(record, options.out)
    lines(
        options.out.with_suffix(".svg"),
        "First batch of a fresh process, samples that sleep",
        WORKERS,
        {peer: [record["first_batch_s"][peer][n]["median"] for n in WORKERS] for peer in PEERS},
        "num_workers",
        "s after the start of the process",
    )
    for peer in PEERS:
        figures = ", ".join(f"{n}: {spread(record['first_batch_s'][peer][n])} s" for n in WORKERS)
        print(f"{peer}: first batch with {figures}")
    for each in (goal, ramp_goal):
        print(f"{each.what}: {each.figure}, goal {each.bound}; {each.note}")


if __name__ == "__main__":
    main()
