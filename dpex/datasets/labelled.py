"""Pictures with their classes, and transforms for both, as torchvision's datasets have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

__all__ = ["LabelledPictures"]


class LabelledPictures(Dataset[tuple[Any, Any]]):
    """Base of datasets whose samples are a picture and the number of its class.

    Args:
        transform: For the picture.
        target_transform: For the number.
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
        """Return an image of PIL's."""
        raise NotImplementedError

    def _number(self, index: Any) -> int:
        """Return the number of its class."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        """Return the picture, and the number of its class."""
        return self._transformed(self._picture(index), self._number(index))

    def _transformed(self, picture: Any, target: int) -> tuple[Any, Any]:
        if self.transform is not None:
            picture = self.transform(picture)
        if self.target_transform is not None:
            return picture, self.target_transform(target)
        return picture, target
