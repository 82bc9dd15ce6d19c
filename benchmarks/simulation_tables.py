"""Tables of simulated loaders on many nodes, from ``results/simulated/scale.json``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
# By name: the head of a column, and its cell.
Columns = Mapping[str, Callable[[Result], str]]


def _window(result: Result) -> str:
    """Return the window, and which of the loader's arguments determines it."""
    factor, bound = result["prefetch_factor"], "`prefetch_factor`"
    if result["prefetch_batches"] > factor * result["workers"]:
        factor, bound = result["prefetch_batches"] / result["workers"], "`prefetch_bytes`"
    return f"{result['window']:,} ({bound}: {factor:.0f} a worker)"


_LOADER: Columns = {
    "nodes": lambda r: f"{r['nodes']}",
    "workers": lambda r: f"{r['workers']:,}",
    "batch": lambda r: f"{r['batch_s']:.1f} s",
    "stragglers": lambda r: "yes" if r["stragglers"] else "no",
    "window": _window,
}
_TABLES: Mapping[str, Columns] = {
    "rate": {
        **_LOADER,
        "batches/s in order": lambda r: f"{r['batches_per_s']:.1f}",
        "of what the workers can make": lambda r: f"{r['batches_per_s'] / r['ideal_per_s']:.2f}",
        "pipeline actor is busy": lambda r: f"{100 * r['actor_busy']:.0f} %",
    },
    "next": {
        **_LOADER,
        "training step": lambda r: _time(r["step_s"]),
        "`next()`, p50": lambda r: _time(r["wait_s"]["50"]),
        "p99": lambda r: _time(r["wait_s"]["99"]),
        "p99.9": lambda r: _time(r["wait_s"]["99.9"]),
        "longest": lambda r: _time(r["wait_s"]["100"]),
        "mean step": lambda r: _time(r["step_s"] + r["mean_wait_s"]),
    },
    "loss": {
        **_LOADER,
        "batches that the node had": lambda r: f"{r['lost']}",
        "last of them delivered after": lambda r: _time(r["repaired_s"]),
        "longest `next()`": lambda r: _time(r["longest_wait_s"]),
    },
    "ranks": {
        **{head: _LOADER[head] for head in ("stragglers", "window")},
        "training step": lambda r: _time(r["step_s"]),
        "`next()` on one rank, p99": lambda r: _time(r["rank_wait_s"]["99"]),
        "step of all ranks, mean": lambda r: _time(r["step_s"] + r["mean_wait_s"]),
        "p50": lambda r: _time(r["step_s"] + r["wait_s"]["50"]),
        "p99": lambda r: _time(r["step_s"] + r["wait_s"]["99"]),
        "longest": lambda r: _time(r["step_s"] + r["wait_s"]["100"]),
    },
    "events": {
        "workers": _LOADER["workers"],
        "a request for a chunk": lambda r: _microseconds(r, "take_request"),
        "a new chunk": lambda r: _microseconds(r, "feed"),
        "a block": lambda r: _microseconds(r, "arrive"),
    },
}


def simulation_table(name: str, results: Mapping[str, Sequence[Result]]) -> str:
    """Return one of the tables.

    Args:
        name: Name of the table: ``"rate"``, ``"next"``, ``"loss"``, ``"ranks"`` or ``"events"``.
        results: The results of each simulation.

    Returns:
        Markdown.
    """
    columns = _TABLES[name]
    rows = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for result in results[name]:
        cells = [cell(result) for cell in columns.values()]
        rows += [f"| {' | '.join(cells)} |"]
    return "\n".join(rows)


def simulation_names() -> Sequence[str]:
    """Return the names of all tables."""
    return tuple(_TABLES)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def _microseconds(result: Result, event: str) -> str:
    return f"{result['cpu_us'][event]:.0f} µs"
