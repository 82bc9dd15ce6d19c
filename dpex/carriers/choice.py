"""Choice of what runs a loader's workers: processes of this machine, or a Ray."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpex.carriers.processes.session import ProcessSession, check_system
from dpex.carriers.ray.worker_options import WorkerOptions, needs_ray
from dpex.cluster.connect import PROCESSES, connect, finds_ray
from dpex.cluster.machine_share import usable_cores
from dpex.log import announce_once, warn_once

if TYPE_CHECKING:
    from dpex.carriers.interface import CarrierSession
    from dpex.transforms.stage import Stage

__all__ = ["Demand", "choose_address", "new_session"]

logger = logging.getLogger("dpex")


@dataclass(frozen=True)
class Demand:
    """What a loader asks of its workers.

    Attributes:
        head_address: As for ``DpexDataLoader``.
        worker_options: As for ``DpexDataLoader``.
        stages: The later stages.
        num_workers: Number of logical workers.
        persistent: Whether the workers outlive an iteration.
    """

    head_address: str
    worker_options: WorkerOptions
    stages: Sequence[Stage]
    num_workers: int
    persistent: bool

    @property
    def only_ray(self) -> list[str]:
        """The options and stages that only Ray can meet, as text."""
        options = [f"worker_options[{name!r}]" for name in needs_ray(self.worker_options)]
        return options + [repr(stage) for stage in self.stages if stage.needs_ray]


def choose_address(demand: Demand, *, again: bool) -> str:
    """Return the ``head_address`` of a loader, in which ``"auto"`` is decided if there is no Ray.

    Args:
        demand: What the loader asks of its workers.
        again: Whether the loader has had a Ray, which has ended.

    Raises:
        ValueError: RAY_ADDRESS has none of the forms of an address.
    """
    if demand.head_address != "auto" or finds_ray("auto"):
        return demand.head_address
    if demand.only_ray:
        announce_once(
            f"no Ray cluster found, and {', '.join(demand.only_ray)} needs Ray: a local Ray starts"
        )
        return "local"
    if again:
        logger.warning(
            "the Ray of this loader has ended, and there is no other. Worker processes of this "
            "machine make its batches from now on"
        )
    return PROCESSES


def new_session(demand: Demand, address: str) -> CarrierSession:
    """Connect to a Ray, or prepare worker processes of this machine.

    Args:
        demand: What the loader asks of its workers.
        address: What ``choose_address`` returned.

    Raises:
        ClusterError: As for ``connect``.
        NotImplementedError: Worker processes do not run on this system.
        ValueError: Worker processes without Ray cannot do the loader's work.
    """
    if address == PROCESSES:
        return _processes(demand)
    connection = connect(address)
    from dpex.carriers.ray.session import Session  # loads Ray

    return Session(
        connection,
        worker_options=demand.worker_options,
        num_workers=demand.num_workers,
        persistent=demand.persistent,
    )


def _processes(demand: Demand) -> ProcessSession:
    check_system()
    if demand.only_ray:
        raise ValueError(
            f"head_address={PROCESSES!r} cannot meet {', '.join(demand.only_ray)}: only Ray "
            'assigns resources to worker processes. Pass head_address="local" or a cluster\'s '
            "address"
        )
    ignored = [f"worker_options[{name!r}]" for name in demand.worker_options]
    ignored += [f"max_workers of {stage!r}" for stage in demand.stages if stage.max_workers]
    ignored += [f"num_cpus of {stage!r}" for stage in demand.stages if stage.num_cpus != 1]
    if ignored:
        warn_once(
            f"worker processes of this machine ignore {', '.join(ignored)}: each logical worker "
            "has one process, which runs all stages"
        )
    why = "no Ray cluster found: " if demand.head_address == "auto" else ""
    number, cores = demand.num_workers, usable_cores()
    announce_once(
        f"{why}{number} worker process{'es' * (number != 1)} on {cores} core{'s' * (cores != 1)} "
        "of this machine"
    )
    return ProcessSession(number, persistent=demand.persistent)
