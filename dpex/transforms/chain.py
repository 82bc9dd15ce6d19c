"""A sequence of transforms for one sample or one batch."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpex.wire.timings import spent
from dpex.worker.seeding import own_seed

__all__ = ["Chain"]


class Chain:
    """A sequence of transforms.

    As in torchvision's datasets, a sample is a tuple or a list whose first item is the input. Any
    other sample is the input itself, and remains so if a transform such as ``FiveCrop`` returns a
    tuple. If ``joint``, the items of such a tuple are the arguments of the next transform.

    Args:
        transforms: Transforms, called in order. Each gets the input, or, if ``joint``, all items
            as separate arguments. An albumentations transform, or another that takes only
            keyword arguments, gets ``image=`` and returns a mapping with ``"image"``. If the
            sample is a mapping, such a transform gets its items as keywords and returns the new
            sample. A transform with ``set_random_seed(seed)``, such as albumentations', has its
            own generator, which is seeded from torch's generator before every call.
        joint: Whether the transforms get all items and return all items.

    Attributes:
        target_transform: Gets the second item, after the other transforms, as in torchvision's
            datasets; None if the second item stays as it is.
        continues: Whether another chain continues with the samples.
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]], *, joint: bool = False) -> None:
        self.transforms = tuple(transforms)
        self.joint = joint
        self.target_transform: Callable[[Any], Any] | None = None
        self.continues = False
        self._keywords_only = tuple(map(_takes_keywords_only, self.transforms))

    def __call__(self, sample: Any) -> Any:
        """Return the transformed sample, with the same structure unless a transform changes it."""
        started = time.perf_counter()
        try:
            return self._apply(sample)
        finally:
            spent("transform_s", started)

    def _apply(self, sample: Any) -> Any:
        alone = isinstance(sample, _LoneInput)
        sample = sample.value if alone else sample
        # Invariant: the sample that enters the first chain decides, not the result of a transform.
        several = not alone and isinstance(sample, tuple | list) and bool(sample)
        for transform, keywords_only in zip(self.transforms, self._keywords_only, strict=True):
            # All copies of a transform start with the same generator state, in torch's workers too.
            if hasattr(transform, "set_random_seed"):
                transform.set_random_seed(own_seed())
            if keywords_only and isinstance(sample, Mapping):
                sample = transform(**sample)
            elif self.joint and isinstance(sample, tuple | list):
                try:
                    sample = transform(*sample)
                except TypeError as error:
                    error.add_note(
                        f"joint_transforms= calls a transform with all {len(sample)} items of a "
                        "sample. For a transform of the first item alone, use transform="
                    )
                    raise
            elif several and not self.joint:
                sample = _like(sample, [_call(transform, sample[0], keywords_only), *sample[1:]])
            else:
                sample = _call(transform, sample, keywords_only)
        if self.target_transform is not None:
            first, second, *rest = sample
            sample = _like(sample, [first, self.target_transform(second), *rest])
        if self.continues and isinstance(sample, tuple | list) and not (several or self.joint):
            return _LoneInput(sample)
        return sample


@dataclass(frozen=True)
class _LoneInput:
    """An input without other items, on its way to the next chain.

    Attributes:
        value: The input: a tuple or a list.
    """

    value: Any


def _call(transform: Callable[..., Any], value: Any, keywords_only: bool) -> Any:
    return transform(image=np.asarray(value))["image"] if keywords_only else transform(value)


def _like(sample: Any, items: list[Any]) -> Any:
    """Return a sample of the same type with these items."""
    return type(sample)(*items) if hasattr(sample, "_fields") else type(sample)(items)


def _takes_keywords_only(transform: Callable[..., Any]) -> bool:
    # albumentations' transforms accept *args, but only to raise an error for them.
    if any(c.__module__.partition(".")[0] == "albumentations" for c in type(transform).__mro__):
        return True
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):  # a C function without a signature: its argument is positional
        return False
    kinds = {parameter.kind for parameter in parameters}
    keyword_kinds = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    return inspect.Parameter.VAR_KEYWORD in kinds and kinds <= keyword_kinds
