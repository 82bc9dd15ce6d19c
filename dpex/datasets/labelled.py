"""Base class of image datasets with a class number and torchvision's transforms for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

__all__ = ["LabelledPictures"]


class LabelledPictures(Dataset[tuple[Any, Any]]):
    """Base of datasets whose samples are an image and its class number.

    Args:
        transform: Transform of the image.
        target_transform: Transform of the class number.
    """

    def __init__(
        self,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[int], Any] | None,
    ) -> None:
        self.transform = transform
        self.target_transform = target_transform
        self.transforms = None

    def _picture(self, index: Any) -> Any:
        """Return a sample's image, a PIL image."""
        raise NotImplementedError

    def _number(self, index: Any) -> int:
        """Return a sample's class number."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        """Return a sample's image and class number, transformed."""
        return self._transformed(self._picture(index), self._number(index))

    def _transformed(self, picture: Any, target: int) -> tuple[Any, Any]:
        if self.transform is not None:
            picture = self.transform(picture)
        if self.target_transform is not None:
            return picture, self.target_transform(target)
        return picture, target
