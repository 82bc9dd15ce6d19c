"""A stage of a chain, and the resources that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Stage"]


@dataclass(frozen=True)
class Stage:
    """A transform that starts a stage: in distribute mode, a separate ``map_batches``.

    In torch's own loader, and with ``distribute_mode=False``, only ``fn`` has an effect.

    Args:
        fn: The transform. It gets the result of the transform before it.
        batched: Whether it gets whole batches, after ``collate_fn``: tensors of shape (B, ...).
        num_cpus: CPUs of each worker of the stage.
        num_gpus: GPUs of each worker of the stage. A worker with a GPU keeps its process, so data
            that ``fn`` puts on the GPU stays there. dpex moves the tensors that ``fn`` returns to
            the CPU.
        resources: Other resources of each worker of the stage, named as in
            ``ray start --resources``.
        label_selector: Labels that the node of each worker of the stage must have, as in
            ``WorkerOptions``.
        max_workers: Maximum number of workers at once; the loader's ``num_workers`` if None.

    Raises:
        TypeError: ``fn`` is not callable, or an argument has the wrong type.
        ValueError: A number is out of range.

    Source:
        The arguments of ``ray.data.Dataset.map_batches``.
    """

    fn: Callable[..., Any]
    batched: bool = field(default=False, kw_only=True)
    num_cpus: float = field(default=1, kw_only=True)
    num_gpus: float = field(default=0, kw_only=True)
    resources: Mapping[str, float] | None = field(default=None, kw_only=True)
    label_selector: Mapping[str, str] | None = field(default=None, kw_only=True)
    max_workers: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.fn, Stage):
            raise TypeError(f"fn must not be a Stage. Pass {self.fn.fn!r} itself")
        if not callable(self.fn):
            raise TypeError(f"fn must be callable, got {self.fn!r}")
        if not isinstance(self.batched, bool):
            raise TypeError(f"batched must be True or False, got {self.batched!r}")
        amounts: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if self.resources is not None and not isinstance(self.resources, Mapping):
            raise TypeError(f"resources must be a mapping or None, got {self.resources!r}")
        amounts |= self.resources or {}
        for name, amount in amounts.items():
            if not isinstance(amount, int | float) or isinstance(amount, bool):
                raise TypeError(f"{name} must be a number, got {amount!r}")
            if not amount >= 0:
                raise ValueError(f"{name} must be >= 0, got {amount!r}")
        labels: Any = self.label_selector
        if labels is not None and not (
            isinstance(labels, Mapping)
            and all(isinstance(text, str) for label in labels.items() for text in label)
        ):
            raise TypeError(f"label_selector must be a dict of strings or None, got {labels!r}")
        most: Any = self.max_workers
        whole = isinstance(most, int) and not isinstance(most, bool)
        if most is not None and (not whole or most < 1):
            raise ValueError(f"max_workers must be an integer >= 1 or None, got {most!r}")

    @property
    def needs_ray(self) -> bool:
        """Whether Ray has to choose the node: for a GPU, for resources or for labels."""
        return bool(self.num_gpus or self.resources or self.label_selector)
