"""The tables of whole trainings, from the records of ``accuracy`` and ``training_speed``."""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import spread
from benchmarks.nodes import VOID_PERCENT

Record = Mapping[str, Any]


def accuracy_table(record: Record) -> str:
    """Return the table of accuracy and loss, one row for each setting and mode."""
    settings, trainings = record["settings"], record["trainings"]
    rows = [
        "| setting | `distribute_mode` | accuracy %, median [range] | loss, median [range] |",
        "|---|---|---|---|",
    ]
    rows += [
        f"| {setting} | `{mode == 'on'}` | {spread(found['accuracy'][mode])} "
        f"| {spread(found['loss'][mode], '.4f')} |"
        for setting, found in trainings.items()
        for mode in ("on", "off")
    ]
    one = next(iter(trainings.values()))
    runs = [run for found in trainings.values() for run in found["runs"]]
    without_gpu = "" if one["gpus"] else ", on the CPU, where `DataParallel` is the model itself"
    about = (
        f"{one['data']}, {one['samples']:,} pictures{without_gpu}; DDP with "
        f"{trainings['DDP']['ranks']} ranks. {settings['epochs']} epochs, learning rate "
        f"{settings['learning_rate']}, batch {settings['batch_size']} of all ranks together, "
        f"{settings['seeds']} seeds. The loss is the last epoch's mean over the training set. Of "
        f"{sum(run['steps'] for run in runs):,} steps that were taken with both modes, the losses "
        f"of {sum(run['differing'] for run in runs):,} differ."
    )
    return "\n".join([about, "", *rows])


def speed_table(record: Record) -> str:
    """Return the tables of epoch times and waiting shares, one row for each loader."""
    settings = record["settings"]
    waits = ", ".join(f"{1e3 * wait_s:g} ({kind})" for kind, wait_s in settings["wait_s"].items())
    sizes = ", ".join(
        f"{width}x{height} ({kind})"
        for kind, (width, height) in settings["photograph_size"].items()
    )
    if settings["step"] == "sleep":
        step = f"a sleep of {settings['step_s']} s in place of a GPU"
    else:
        step = f"{settings['step']} that take {settings['step_s']} s"
    most_apart = max(
        abs(run["stats_waiting_share"] - run["waiting_share"])
        for part in ("waiting", "working")
        for by_kind in record[part].values()
        for found in by_kind.values()
        for run in found["runs"]
        if run["stats_waiting_share"] is not None
    )
    about = (
        f"Each cell has the median time of an epoch, its range, and the share of it spent in "
        f"`iter()` and `next()`. Both loaders are measured alike. `stats()` of dpex differs by at "
        f"most {100 * most_apart:.2f} % of the epoch. The step is {step}."
    )
    simulated = (
        f"Simulated preprocessing: samples wait {waits} ms and compute nothing, in place of the "
        f"processors of other machines. An epoch has {settings['waiting_steps']} steps of "
        f"{settings['waiting_batch_size']} samples. Steps alone take "
        f"{settings['waiting_steps'] * settings['step_s']:.1f} s."
    )
    real = (
        f"Real preprocessing, on the {record['cores']} cores of one machine: photographs of "
        f"{sizes} pixels are decoded and augmented. An epoch has {settings['photograph_steps']} "
        f"steps of {settings['photograph_batch_size']} samples. Steps alone take "
        f"{settings['photograph_steps'] * settings['step_s']:.1f} s."
    )
    return "\n\n".join(
        [
            about,
            simulated,
            times(record["waiting"], VOID_PERCENT),
            real,
            times(record["working"], 100.0),
        ]
    )


def times(rows: Mapping[str, Mapping[str, Any]], void_percent: float) -> str:
    """Return a table of epochs, one row per loader and one column per kind of preprocessing.

    Args:
        rows: Epochs by loader and kind.
        void_percent: Load of the machine above which a cell is void.
    """
    kinds = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for name, by_kind in rows.items():
        cells = []
        for kind in kinds:
            found = by_kind[kind]
            waits = 100 * found["waiting_share"]["median"]
            busy = found["busy_percent"]["median"]
            void = f" (void: machine {busy:.0f} % busy)" if busy > void_percent else ""
            cells.append(f"{spread(found['seconds'], '.1f')} s, waits {waits:.0f} %{void}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
