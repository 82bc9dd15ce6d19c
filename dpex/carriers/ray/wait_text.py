"""The text that explains to the user why a batch is late."""

from __future__ import annotations

__all__ = ["likely_cause", "wait_text"]


def wait_text(ray: str, *, tasks: int | None, in_flight: int, cause: str) -> str:
    """Return a text about a loader that waits for a batch.

    Args:
        ray: The Ray that the loader uses, and its size.
        tasks: Number of tasks that make batches now; None if it is unknown.
        in_flight: Batches requested and not delivered yet.
        cause: The likely cause of the wait.
    """
    running = "" if tasks is None else f", {_counted(tasks, 'task')} running"
    return f"{ray[0].upper()}{ray[1:]}{running}, {_counted(in_flight, 'batch')} in flight. {cause}"


def _counted(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def likely_cause(
    *, tasks: int | None, cpus: float, free_cpus: float | None, lacking: str | None, users: str
) -> str:
    """Return the likely cause of a wait for a batch, and the next step.

    Args:
        tasks: Number of tasks that make batches now; None if it is unknown.
        cpus: CPUs of the Ray.
        free_cpus: CPUs that no task or actor claims; None for a local Ray, which has CPUs to spare.
        lacking: The worker options that no node meets, as text; None if a node meets them.
        users: Description of the tasks and actors that claim CPUs.
    """
    if not cpus:
        return (
            "The cluster has no CPU yet: the loader waits for a node that has some, started by "
            "hand or by the cluster's autoscaler"
        )
    if lacking is not None:
        return f"worker_options asks for {lacking}"
    if tasks:
        return (
            "The samples may be slow, or the worker processes still import their modules. Read a "
            "sample in this process, and measure the time"
        )
    if tasks is None:
        return "The process that runs the pipeline does not answer"
    if free_cpus is not None and free_cpus < 1:
        seen = users or "no task or actor on this node"
        return f"No CPU is free: worker processes are starting, or others use the CPUs ({seen})"
    return "The worker processes are starting"
