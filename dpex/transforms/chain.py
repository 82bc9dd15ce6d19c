"""Transforms one after the other, on one sample or on one batch."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dpex.wire.timings import spent
from dpex.worker.seeding import own_seed

__all__ = ["Chain"]


class Chain:
    """Applies transforms in order.

    A dataset's sample is, as torchvision's are, an input and what belongs to it: a tuple or a list
    whose first item is the input. Any other sample is an input alone.

    Args:
        transforms: Each gets the input, or (``joint``) all items, each an argument of its own.
            One of albumentations', or another that takes keywords only, gets ``image=`` and
            returns a mapping with ``"image"``; where the sample is a mapping, it gets and returns
            that. One with ``set_random_seed(seed)``, as theirs have it for the generators of their
            own, is seeded from torch's generator before every call.
        joint: Whether the transforms get all items and return all of them.
        target_transform: Gets the second item, after the others, as in torchvision's datasets.
    """

    def __init__(
        self,
        transforms: Sequence[Callable[..., Any]],
        *,
        joint: bool = False,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.transforms = tuple(transforms)
        self.joint = joint
        self.target_transform = target_transform
        self._keywords_only = tuple(map(_takes_keywords_only, self.transforms))

    def __bool__(self) -> bool:
        """Tell whether it does anything."""
        return bool(self.transforms) or self.target_transform is not None

    def __call__(self, sample: Any) -> Any:
        """Return the transformed sample, of the same structure unless a transform changes it."""
        started = time.perf_counter()
        try:
            return self._apply(sample)
        finally:
            spent("transform_s", started)

    def _apply(self, sample: Any) -> Any:
        for transform, keywords_only in zip(self.transforms, self._keywords_only, strict=True):
            # Copies of a generator of one's own all begin alike, in torch's workers too.
            if hasattr(transform, "set_random_seed"):
                transform.set_random_seed(own_seed())
            if keywords_only and isinstance(sample, Mapping):
                sample = transform(**sample)
            elif self.joint and isinstance(sample, tuple | list):
                sample = transform(*sample)
            elif isinstance(sample, tuple | list) and sample:
                sample = _like(sample, [_call(transform, sample[0], keywords_only), *sample[1:]])
            else:
                sample = _call(transform, sample, keywords_only)
        if self.target_transform is not None:
            first, second, *rest = sample
            sample = _like(sample, [first, self.target_transform(second), *rest])
        return sample


def _call(transform: Callable[..., Any], value: Any, keywords_only: bool) -> Any:
    return transform(image=np.asarray(value))["image"] if keywords_only else transform(value)


def _like(sample: Any, items: list[Any]) -> Any:
    """Put items into a sample of the same type."""
    return type(sample)(*items) if hasattr(sample, "_fields") else type(sample)(items)


def _takes_keywords_only(transform: Callable[..., Any]) -> bool:
    # albumentations' take *args too, to say that they want none.
    if any(c.__module__.partition(".")[0] == "albumentations" for c in type(transform).__mro__):
        return True
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):  # what is written in C takes its argument by place
        return False
    kinds = {parameter.kind for parameter in parameters}
    keyword_kinds = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    return inspect.Parameter.VAR_KEYWORD in kinds and kinds <= keyword_kinds
