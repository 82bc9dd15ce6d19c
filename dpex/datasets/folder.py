"""Pictures in folders, one for each class, wherever they lie."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dpex.datasets.labelled import LabelledPictures
from dpex.datasets.store import Store
from dpex.worker.seeding import begin_sample

__all__ = ["ImageFolder"]

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder(LabelledPictures):
    """torchvision's ``ImageFolder``, from a store too: the same classes and the same order.

    The store is listed once, here; pictures are read in the worker.

    Args:
        root: The folder with a folder for each class: a path, ``s3://bucket/path`` and so on;
            ``docs/datasets.md`` lists them.
        transform: For the picture, an RGB image of PIL's.
        target_transform: For the class's number.
        is_valid_file: Which files are pictures, asked with ``root`` and the path below it; those
            with a picture's extension if None.
        allow_empty: Whether a class may have no pictures.
        filesystem: Of pyarrow's or fsspec's, if the environment does not say enough.

    Attributes:
        classes: Their names, in order.
        class_to_idx: Their numbers.
        targets: The number of every sample's class, int64 (N,).
        paths: The path of every sample's file below ``root``.

    Raises:
        FileNotFoundError: The folder is not there, has no folders, or (unless ``allow_empty``) one
            without pictures.
        OSError: The store refuses, or does not answer in several tries.

    Source:
        ``torchvision.datasets.ImageFolder``.
    """

    def __init__(
        self,
        root: str | Path,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        *,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        filesystem: Any = None,
    ) -> None:
        super().__init__(transform, target_transform)
        self._store = Store(root, filesystem)
        wanted = is_valid_file or (lambda path: path.lower().endswith(_EXTENSIONS))
        files, folders = self._store.listing()
        paths = [path for path in files if "/" in path and wanted(f"{self._store.uri}/{path}")]
        names = {path.partition("/")[0] for path in paths}
        empty = sorted({path.partition("/")[0] for path in folders} - names)
        if allow_empty and empty:
            names.update(empty)
        elif empty or not paths:
            raise FileNotFoundError(
                f"{self._store.uri} has no pictures in "
                + (f"its folders {empty}" if paths else "folders, one for each class")
            )
        # As os.walk() meets them: the folders of a class in order, and the files in each.
        paths.sort(key=_by_class_and_folder)
        classes = sorted(names)
        self.classes = classes
        self.class_to_idx = {name: number for number, name in enumerate(classes)}
        numbers = [self.class_to_idx[path.partition("/")[0]] for path in paths]
        self.targets = np.array(numbers, dtype=np.int64)
        # One array, which all workers of a node share; a million strings would be copied.
        self.paths = np.array(paths, dtype=np.str_)

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Every sample's file, and the number of its class; made anew each time."""
        targets: list[int] = self.targets.tolist()
        files = [f"{self._store.uri}/{path}" for path in self.paths]
        return list(zip(files, targets, strict=True))

    imgs = samples

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]] | None:
        """What reads a batch's files at the same time, where each has to be waited for."""
        # Who has replaced __getitem__ means that for every sample.
        own = type(self).__getitem__ is LabelledPictures.__getitem__
        return self._samples if own and self._store.is_far else None

    def _samples(self, indices: list[Any]) -> list[Any]:
        contents = self._store.read_all([str(self.paths[index]) for index in indices])
        samples = []
        for place, (index, content) in enumerate(zip(indices, contents, strict=True)):
            begin_sample(place, 0)
            samples.append(self._transformed(self._decoded(index, content), self._number(index)))
        return samples

    def _picture(self, index: Any) -> Any:
        return self._decoded(index, self._store.read(str(self.paths[index])))

    def _decoded(self, index: Any, content: bytes) -> Any:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(content)) as file:
                return file.convert("RGB")
        except Exception as error:  # which does not know the file's name
            error.add_note(f"{self._store.uri}/{self.paths[index]} was being read")
            raise

    def _number(self, index: Any) -> int:
        return int(self.targets[index])


def _by_class_and_folder(path: str) -> tuple[str, str, str]:
    return path.partition("/")[0], str(PurePosixPath(path).parent), PurePosixPath(path).name
