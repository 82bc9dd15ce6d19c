"""A model of a large cluster: how long each of its parts would take for one epoch.

It is not a measurement. Each line multiplies the measured cost of a benchmark, or an assumed rate
of a GPU or a network card. The text around the table says what the model leaves out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAMPLES = 1_000_000_000
CPU_NODES = 1_000
CORES_PER_NODE = 32
GPUS = 256
GPUS_PER_NODE = 8
BATCH_SIZE = 256
# Size of a (3, 224, 224) image.
BYTES = {"uint8": 3 * 224 * 224, "float32": 4 * 3 * 224 * 224}
TRAINING_NIC_BYTES_PER_S = 12.5e9
CPU_NIC_BYTES_PER_S = 3.125e9
# Assumption: rate at which a GPU trains a model of ResNet-50's size.
GPU_SAMPLES_PER_S = 3_000

Records = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Part:
    """One part of the cluster.

    Attributes:
        name: Name of the part.
        samples_per_s: Rate of all parts of this kind together.
        source: Source of the figure.
        remedy: Remedy if this part is the bottleneck.
    """

    name: str
    samples_per_s: float
    source: str
    remedy: str


def on_ray(by_peer: Mapping[str, Any]) -> Any:
    """Return the figure of dpex on a Ray; in records of the former design, ``dpex`` was on one."""
    return by_peer.get("local", by_peer["dpex"])


def parts(records: Records) -> list[Part]:
    """Return the parts, from the records of ``jpeg``, ``transport``, ``driver`` and ``scale``."""
    jpeg, scale = records["jpeg"], records["scale"]
    per_core = jpeg["limit_samples_per_s"] / jpeg["cores"]
    transport = on_ray(records["transport"]["gb_per_s"]["ready"])["median"] * 1e9
    thread_us = on_ray(records["driver"]["thread_us_per_batch"])["100000"]["median"]
    actor_ms = list(scale["pipeline_actor_ms_per_batch"].values())[-1]["median"]
    # Number of samples that a task makes before its lease ends.
    task = scale["task"]
    a_task = per_core * task["turn_s"]
    training_nodes = GPUS // GPUS_PER_NODE
    found = [
        Part(
            "GPUs",
            GPUS * GPU_SAMPLES_PER_S,
            f"{GPU_SAMPLES_PER_S:,} samples/s each, assumed",
            "what one wants",
        ),
        Part(
            "cores that decode and augment",
            CPU_NODES * CORES_PER_NODE * per_core,
            f"`jpeg`: {per_core:,.0f} samples/s a core",
            "more nodes; cheaper decoding",
        ),
        Part(
            "pipeline actors, one for each rank",
            GPUS * BATCH_SIZE * 1e3 / actor_ms,
            f"`scale`: {actor_ms:.1f} ms of its processor a batch, one chunk each",
            "larger batches; chunks hold more than one where batches are quick",
        ),
        Part(
            "pipeline actors, as tasks start",
            GPUS * a_task * 1e3 / task["pipeline_actor_ms"],
            f"`scale`: {task['pipeline_actor_ms']:.1f} ms a task, which makes {a_task:,.0f} "
            f"samples in {task['turn_s']:.0f} s",
            "more ranks",
        ),
        Part(
            "Ray's head, as it is told of tasks",
            a_task * 1e3 / task["head_ms"],
            f"`scale`: {task['head_ms']:.2f} ms a task",
            "`RAY_task_events_report_interval_ms=0` on the nodes",
        ),
        Part(
            f"raylets of {CPU_NODES:,} CPU nodes, as tasks start",
            CPU_NODES * a_task * 1e3 / task["raylets_ms"],
            f"`scale`: {task['raylets_ms']:.1f} ms a task",
            "more nodes",
        ),
        Part(
            "training loops' threads",
            GPUS * BATCH_SIZE * 1e6 / thread_us,
            f"`driver`: {thread_us:.0f} µs a batch",
            "larger batches",
        ),
    ]
    for kind, size in BYTES.items():
        found += [
            Part(
                f"copies into the training processes, {kind}",
                GPUS * transport / size,
                f"`transport`: {transport / 1e9:.1f} GB/s for each rank",
                "ship uint8, normalise on the GPU; `pin_memory=True` costs no further copy",
            ),
            Part(
                f"network cards of {training_nodes} training nodes, {kind}",
                training_nodes * TRAINING_NIC_BYTES_PER_S / size,
                "100 Gbit/s each",
                "ship uint8, normalise on the GPU; more cards",
            ),
            Part(
                f"network cards of {CPU_NODES:,} CPU nodes, {kind}",
                CPU_NODES * CPU_NIC_BYTES_PER_S / size,
                "25 Gbit/s each",
                "more nodes",
            ),
        ]
    return sorted(found, key=lambda part: part.samples_per_s)


def scaling_table(records: Records) -> str:
    """Return the table of the parts, slowest part first, and the cost of the sampler."""
    lines = [
        "| part | samples/s | an epoch takes | from | if it is the first to be full |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {part.name} | {part.samples_per_s / 1e6:,.2f} million | "
        f"{SAMPLES / part.samples_per_s / 60:,.0f} min | {part.source} | {part.remedy} |"
        for part in parts(records)
    ]
    sampler = records["scale"]["sampler"]
    seconds, size = (sampler[k] * SAMPLES for k in ("s_per_index", "bytes_per_index"))
    lines += [
        "",
        f"First, torch's `DistributedSampler` with `shuffle=True` makes a list of all indices in "
        f"every rank. For {SAMPLES:,} samples that takes {seconds / 60:,.1f} minutes and "
        f"{size / 1e9:,.0f} GB in each, {GPUS_PER_NODE * size / 1e9:,.0f} GB on a machine. It was "
        f"measured with {sampler['indices']:,} samples.",
    ]
    return "\n".join(lines)
