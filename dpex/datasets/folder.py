"""Images in one folder per class, on a disk or in an object store."""

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
    """torchvision's ``ImageFolder``, which can also read from an object store.

    Classes and the order of samples are the same as in torchvision. The constructor lists the store
    once; the worker processes read the images.

    Args:
        root: The folder that contains a folder for each class. It is a path or a URI such as
            ``s3://bucket/path``; ``docs/datasets.md`` lists the schemes.
        transform: Transform of the image, an RGB image of PIL.
        target_transform: Transform of the class number.
        is_valid_file: Function that returns whether a file is an image. Its argument is ``root``
            with the path below it. If None, the file's extension decides.
        allow_empty: Whether a class may have no images.
        filesystem: A filesystem of pyarrow or fsspec, if the environment does not configure the
            store.

    Attributes:
        classes: Names of the classes, in order.
        class_to_idx: Number of each class.
        targets: Class number of every sample, int64 (N,).
        paths: Path of every sample's file below ``root``.

    Raises:
        FileNotFoundError: ``root`` does not exist or contains no folders, or a folder contains no
            images and ``allow_empty`` is False.
        OSError: The store refuses access, or does not answer after several tries.

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
        # The order of torchvision, which uses os.walk(): sorted folders of a class, then files.
        paths.sort(key=_by_class_and_folder)
        classes = sorted(names)
        self.classes = classes
        self.class_to_idx = {name: number for number, name in enumerate(classes)}
        numbers = [self.class_to_idx[path.partition("/")[0]] for path in paths]
        self.targets = np.array(numbers, dtype=np.int64)
        # An array, which the worker processes of a node share; each would copy a list of strings.
        self.paths = np.array(paths, dtype=np.str_)

    @property
    def samples(self) -> list[tuple[str, int]]:
        """File and class number of every sample, as a new list at each access."""
        targets: list[int] = self.targets.tolist()
        files = [f"{self._store.uri}/{path}" for path in self.paths]
        return list(zip(files, targets, strict=True))

    imgs = samples

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]] | None:
        """Function that reads the files of a batch concurrently, or None for local files."""
        # A subclass that overrides __getitem__ needs it called for every sample.
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
        except Exception as error:  # PIL does not know the file's name
            error.add_note(f"{self._store.uri}/{self.paths[index]} was being read")
            raise

    def _number(self, index: Any) -> int:
        return int(self.targets[index])


def _by_class_and_folder(path: str) -> tuple[str, str, str]:
    return path.partition("/")[0], str(PurePosixPath(path).parent), PurePosixPath(path).name
