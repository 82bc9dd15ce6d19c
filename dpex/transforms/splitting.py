"""Split of a chain of transforms before its first random transform."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["flattened", "is_deterministic", "is_random", "split", "split_deterministic"]

# The torchvision transforms (v1, v2 and the presets of its weights) that never draw random numbers.
_DETERMINISTIC = {
    "CenterCrop",
    "ClampBoundingBoxes",
    "ClampKeyPoints",
    "ConvertBoundingBoxFormat",
    "ConvertImageDtype",
    "FiveCrop",
    "Grayscale",
    "Identity",
    "ImageClassification",
    "LinearTransformation",
    "Normalize",
    "ObjectDetection",
    "OpticalFlow",
    "PILToTensor",
    "Pad",
    "RGB",
    "Resize",
    "SanitizeBoundingBoxes",
    "SanitizeKeyPoints",
    "SemanticSegmentation",
    "SetClampingMode",
    "TenCrop",
    "ToDtype",
    "ToImage",
    "ToPILImage",
    "ToPureTensor",
    "ToTensor",
    "UniformTemporalSubsample",
    "VideoClassification",
}
# The torchvision transforms that run other functions, which may or may not draw.
_UNKNOWN = {"Compose", "Lambda", "StandardTransform"}


def split_deterministic(
    transform: Callable[..., Any] | Iterable[Callable[..., Any]], *, at: int | None = None
) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Split a chain into its deterministic beginning and the rest.

    Args:
        transform: A ``Compose`` (torchvision's v1 or v2), an ``nn.Sequential``, a list, or one
            transform. Nested chains are flattened.
        at: Number of transforms in the first part. If None, this part ends before the first
            transform that dpex does not know to be deterministic. dpex knows torchvision's
            deterministic transforms, but not a user's class or a lambda.

    Returns:
        The transforms of both parts, in order.

    Raises:
        IndexError: ``at`` is negative, or the chain has fewer than ``at`` transforms.
        TypeError: An element of the chain cannot be called.
    """
    transforms = flattened(transform)
    if at is None:
        fixed = (place for place, t in enumerate(transforms) if not is_deterministic(t))
        at = next(fixed, len(transforms))
    if not 0 <= at <= len(transforms):
        raise IndexError(f"at must be in [0, {len(transforms)}], the chain's length; got {at}")
    return transforms[:at], transforms[at:]


split = split_deterministic
"""The old name of ``split_deterministic``."""


def flattened(transform: Any) -> list[Callable[..., Any]]:
    """Return the transforms that a chain consists of."""
    if _is_torchvisions(transform) and type(transform).__name__ == "Compose":
        inner: Any = transform.transforms
    elif type(transform) is torch.nn.Sequential:
        inner = transform.children()
    elif isinstance(transform, Iterable) and not (
        callable(transform) or isinstance(transform, str)
    ):
        inner = transform
    elif callable(transform):
        return [transform]
    else:
        raise TypeError(f"a transform must be callable, got {transform!r}")
    return [one for several in inner for one in flattened(several)]


def is_deterministic(transform: Any) -> bool:
    """Return whether torchvision's class of a transform is deterministic; a user's class is not."""
    return _is_torchvisions(transform) and type(transform).__name__ in _DETERMINISTIC


def is_random(transform: Any) -> bool:
    """Return whether a transform is known to draw random numbers."""
    known = _DETERMINISTIC | _UNKNOWN
    return _is_torchvisions(transform) and type(transform).__name__ not in known


def _is_torchvisions(transform: Any) -> bool:
    return type(transform).__module__.startswith("torchvision.transforms.")
