"""The benchmark ``kept``: the store that ``cached`` uses, LMDB, compared with diskcache.

One process writes all values, then reads and copies them in another order. Neither store syncs
after each value. The files are new in every round, so the kernel's cache has them when the process
reads.
"""

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import diskcache
import lmdb

from benchmarks.goals import Goal
from benchmarks.harness import arguments, describe_machine, say, summarise, write
from benchmarks.plots import bars
from dpex.datasets.sample_store import SampleStore

FOLDER = Path("build/bench-data/kept")
TOTAL_BYTES = 64_000_000
VALUE_BYTES = (10_000, 150_000, 600_000)

Put = Callable[[bytes, bytes], object]
Get = Callable[[bytes], bytes]


@contextlib.contextmanager
def by_lmdb(folder: Path) -> Iterator[tuple[Put, Get]]:
    """Open LMDB with the options that ``cached`` uses."""
    store = SampleStore(folder, 4 * TOTAL_BYTES)
    environment: lmdb.Environment = store._environment

    def put(key: bytes, value: bytes) -> None:
        with environment.begin(write=True) as transaction:
            transaction.put(key, value)

    def get(key: bytes) -> bytes:
        with environment.begin() as transaction:
            value = transaction.get(key)
            assert isinstance(value, bytes)
            return value

    yield put, get
    environment.close()


@contextlib.contextmanager
def by_diskcache(folder: Path) -> Iterator[tuple[Put, Get]]:
    """Open diskcache without eviction."""
    with diskcache.Cache(str(folder), size_limit=4 * TOTAL_BYTES, eviction_policy="none") as cache:
        yield cache.set, cache.__getitem__


STORES = {"LMDB": by_lmdb, "diskcache": by_diskcache}


def measure(name: str, value_bytes: int, chance: random.Random) -> dict[str, float]:
    """Return a store's rates of writing and reading, and the size of its files."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, mode=0o700)
    keys = [number.to_bytes(8) for number in range(TOTAL_BYTES // value_bytes)]
    value = chance.randbytes(value_bytes)
    with STORES[name](FOLDER) as (put, get):
        begun = time.perf_counter()
        for key in keys:
            put(key, value)
        written = time.perf_counter()
        chance.shuffle(keys)
        shuffled = time.perf_counter()
        for key in keys:
            assert len(get(key)) == value_bytes
        read = time.perf_counter()
    files = sum(file.stat().st_blocks * 512 for file in FOLDER.rglob("*") if file.is_file())
    shutil.rmtree(FOLDER)
    return {
        "written_per_s": len(keys) / (written - begun),
        "read_per_s": len(keys) / (read - shuffled),
        "files_over_values": files / (len(keys) * value_bytes),
    }


def main() -> None:
    options = arguments(__doc__, "kept")
    record = describe_machine("kept")
    record["settings"] = {"total_bytes": TOTAL_BYTES}
    chance = random.Random(0)
    found: dict[int, dict[str, list[dict[str, float]]]] = {}
    for value_bytes in VALUE_BYTES:
        found[value_bytes] = {name: [] for name in STORES}
        for _ in range(options.rounds):
            for name, rounds in found[value_bytes].items():
                rounds.append(measure(name, value_bytes, chance))
        for name, rounds in found[value_bytes].items():
            say(f"{value_bytes:,} bytes, {name}: {rounds[-1]}")
    record["values"] = {
        str(value_bytes): {
            name: {what: summarise([each[what] for each in rounds]) for what in rounds[0]}
            for name, rounds in stores.items()
        }
        for value_bytes, stores in found.items()
    }
    goals = [
        Goal.of(
            f"kept, values of {value_bytes // 1000} kB: LMDB/diskcache, {what}",
            [ours[rate] / theirs[rate] for ours, theirs in zip(*stores.values(), strict=True)],
            ">=",
            1.0,
            "ratio",
            "files over values: "
            + ", ".join(f"{rounds[-1]['files_over_values']:.2f}" for rounds in stores.values()),
        )
        for value_bytes, stores in found.items()
        for what, rate in (("written", "written_per_s"), ("read", "read_per_s"))
    ]
    record["goals"] = [asdict(goal) for goal in goals]
    write(record, options.out)
    bars(
        options.out.with_suffix(".svg"),
        "Values read in a second, by one process",
        {
            f"{name}, {value_bytes // 1000} kB": [each["read_per_s"] for each in rounds]
            for value_bytes, stores in found.items()
            for name, rounds in stores.items()
        },
        "values/s",
    )
    for goal in goals:
        print(f"{goal.what}: {goal.figure}; {goal.note}")


if __name__ == "__main__":
    main()
