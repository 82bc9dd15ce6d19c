"""The figures of the records: one SVG for each record, and an overview of all records.

An SVG has no background and grey text, so that it is readable on light and dark pages. The same
values give the same file, byte for byte.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import comparisons

GREY = "#808080"
BLUE = "#3b82c4"
ORANGE = "#d97a1f"
COLOURS = (BLUE, ORANGE, "#3f9e5f", "#b0589c", "#8a8f2e", GREY)
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "dpex",
    "svg.fonttype": "none",
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def bars(
    path: Path,
    title: str,
    series: Mapping[str, Sequence[float]],
    unit: str,
    reference: float | None = None,
) -> None:
    """Draw the median of each series as a bar, with its range and all its values.

    Args:
        path: Path of the SVG.
        title: Title above the figure.
        series: Values by name, from top to bottom; dpex has another colour.
        unit: Unit of the values.
        reference: Where to draw a dashed line, such as a limit.
    """
    with drawing(path, title, height=0.9 + 0.42 * len(series)) as axes:
        medians = [statistics.median(values) for values in series.values()]
        colours = [ORANGE if name.startswith("dpex") else BLUE for name in series]
        places = range(len(series))
        axes.barh(places, medians, height=0.6, color=colours, alpha=0.75)
        draw_ranges(axes, list(series.values()), medians)
        for place, values in enumerate(series.values()):
            axes.plot(values, [place] * len(values), "|", color=GREY, markersize=6)
            axes.annotate(
                short(statistics.median(values)),
                (max(values), place),
                (5, 0),
                textcoords="offset points",
                va="center",
            )
        if reference is not None:
            axes.axvline(reference, color=GREY, linestyle="--", linewidth=1)
        name_rows(axes, list(series))
        axes.set_xlim(left=min(0.0, *(min(values) for values in series.values())))
        axes.margins(x=0.12)
        axes.set_xlabel(unit)


def lines(
    path: Path,
    title: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
) -> None:
    """Draw how each series changes with ``x``.

    Args:
        path: Path of the SVG.
        title: Title above the figure.
        x: The values of ``x``, each with a tick.
        series: One value for every ``x``, by name.
        xlabel: Description of ``x``, with its unit.
        ylabel: Description of the values, with their unit.
    """
    with drawing(path, title, height=3.2) as axes:
        for number, (name, values) in enumerate(series.items()):
            axes.plot(x, values, "o-", label=name, color=COLOURS[number % len(COLOURS)])
        axes.set_xticks(list(x), [f"{value:g}" for value in x])
        axes.set_ylim(bottom=min(0.0, *(min(values) for values in series.values())))
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.legend()


def overview(records: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw dpex over torch for every workload: the median ratio as a dot, its range as a line.

    Args:
        records: Records, as the benchmarks write them. Records that compare no rates are left out.
        path: Path of the SVG.
    """
    ratios = {
        name: part["dpex_over"]["torch"]
        for record in records
        for name, part in comparisons(record)
        if "torch" in part["dpex_over"]
    }
    title = "Samples per second, dpex over torch: median and range of turns"
    with drawing(path, title, height=0.9 + 0.3 * len(ratios)) as axes:
        medians = [ratio["median"] for ratio in ratios.values()]
        draw_ranges(axes, [ratio["all"] for ratio in ratios.values()], medians)
        axes.plot(medians, range(len(medians)), "o", color=ORANGE, markersize=8)
        axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
        name_rows(axes, list(ratios))
        axes.set_xlim(left=0.0)
        axes.set_xlabel("dpex/torch (right of the line dpex is faster)")


def scaling(record: Mapping[str, Any], path: Path) -> None:
    """Draw the samples per second against the number of nodes.

    Args:
        record: The record of ``benchmark_scale``, as read from its file.
        path: Path of the SVG.
    """
    settings, rates = record["settings"], record["samples_per_s"]
    wait_s, tasks = settings["wait_s"], settings["tasks_per_node"]
    lines(
        path,
        f"1 to {max(settings['nodes'])} nodes, simulated on one machine; samples wait {wait_s:g} s",
        settings["nodes"],
        {
            "dpex": [rates[str(nodes)]["median"] for nodes in settings["nodes"]],
            "limit by the waits": [nodes * tasks / wait_s for nodes in settings["nodes"]],
        },
        f"nodes, {tasks} tasks each",
        "samples/s",
    )


@contextmanager
def drawing(path: Path, title: str, height: float) -> Iterator[Axes]:
    """Yield the axes of a new figure, and write it as SVG at the end.

    Args:
        path: Path of the SVG.
        title: Title above the figure.
        height: Height in inches; all figures have the same width.

    Yields:
        The axes.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, fontsize="medium")
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def draw_ranges(axes: Axes, rows: Sequence[Sequence[float]], medians: Sequence[float]) -> None:
    """Draw a whisker from the smallest to the largest value of each row."""
    below = [median - min(values) for values, median in zip(rows, medians, strict=True)]
    above = [max(values) - median for values, median in zip(rows, medians, strict=True)]
    axes.errorbar(
        medians, range(len(rows)), xerr=[below, above], fmt="none", ecolor=GREY, capsize=4
    )


def short(value: float) -> str:
    """Format a number with three digits, or without decimals if it is at least 100."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Write the names of the rows beside them, from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
