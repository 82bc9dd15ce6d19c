"""Where a chain of transforms begins to be random."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["flattened", "is_deterministic", "is_random", "split"]

# Of torchvision's transforms, v1, v2 and the presets of its weights. Any other may draw.
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
# They do what somebody else's function does.
_UNKNOWN = {"Compose", "Lambda", "StandardTransform"}


def split(
    transform: Callable[..., Any] | Iterable[Callable[..., Any]], *, at: int | None = None
) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Divide a chain into its deterministic beginning and the rest.

    Args:
        transform: A ``Compose`` (torchvision's v1 or v2), an ``nn.Sequential``, a list, or one
            transform. Those in one another are taken apart.
        at: How many transforms the first part has. If None, it ends before the first one that is
            not known to be deterministic: torchvision's own are, an own class or a lambda is not.

    Returns:
        The transforms of either part, in order.

    Raises:
        IndexError: There are fewer than ``at`` transforms.
        TypeError: Something in the chain cannot be called.
    """
    transforms = flattened(transform)
    if at is None:
        fixed = (place for place, t in enumerate(transforms) if not is_deterministic(t))
        at = next(fixed, len(transforms))
    if not 0 <= at <= len(transforms):
        raise IndexError(f"at must be in [0, {len(transforms)}], the chain's length; got {at}")
    return transforms[:at], transforms[at:]


def flattened(transform: Any) -> list[Callable[..., Any]]:
    """Return the transforms that a chain consists of."""
    if _is_torchvisions(transform) and type(transform).__name__ == "Compose":
        inner: Any = transform.transforms
    elif type(transform) is torch.nn.Sequential:
        inner = transform.children()
    elif isinstance(transform, Iterable) and not callable(transform):
        inner = transform
    elif callable(transform):
        return [transform]
    else:
        raise TypeError(f"a transform must be callable, got {transform!r}")
    return [one for several in inner for one in flattened(several)]


def is_deterministic(transform: Any) -> bool:
    """Tell whether a transform is known to draw nothing; a subclass of a known one is not."""
    return _is_torchvisions(transform) and type(transform).__name__ in _DETERMINISTIC


def is_random(transform: Any) -> bool:
    """Tell whether a transform is known to draw."""
    known = _DETERMINISTIC | _UNKNOWN
    return _is_torchvisions(transform) and type(transform).__name__ not in known


def _is_torchvisions(transform: Any) -> bool:
    return type(transform).__module__.startswith("torchvision.transforms.")
