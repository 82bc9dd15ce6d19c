"""torchvision's ``ImageFolder``, which can also read from an object store."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
from torchvision import datasets
from torchvision.datasets.folder import default_loader, has_file_allowed_extension

from dpex.datasets.store import Store
from dpex.worker.seeding import begin_sample

__all__ = ["ImageFolder"]

_Sample: TypeAlias = tuple[str, int]


class ImageFolder(datasets.ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ``ImageFolder``, which can also read from an object store.

    It is a subclass, so everything else is torchvision's: classes, the order of samples, attributes
    and methods to override. The constructor lists the store once; the worker processes read the
    images. The worker processes of a node share one copy of the paths.

    Args:
        root: The folder that contains a folder for each class. It is a path or a URI such as
            ``s3://bucket/path``; ``docs/datasets.md`` lists the schemes.
        transform: Transform of the image.
        target_transform: Transform of the class number.
        loader: Function that returns the image. Its argument is the path of a local file, or a
            file's content in memory (``io.BytesIO``) from a store.
        is_valid_file: Function that returns whether a file is an image. Its argument is ``root``
            with the path below it. If None, the file's extension decides.
        allow_empty: Whether a class may have no images.
        filesystem: A filesystem of pyarrow or fsspec, if the environment does not configure the
            store.

    Raises:
        FileNotFoundError: ``root`` does not exist or contains no folders, or a folder contains no
            images and ``allow_empty`` is False.
        OSError: The store refuses access, or does not answer after several tries.
        ValueError: The store has a key that cannot be read as a path.

    Source:
        ``torchvision.datasets.ImageFolder``.
    """

    def __init__(
        self,
        root: str | Path,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        loader: Callable[[Any], Any] = default_loader,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        *,
        filesystem: Any = None,
    ) -> None:
        self._store = store = Store(root, filesystem)
        if store.local_path is None:
            self._files, self._folders = store.listing()
            root, loader = store.uri, _StoreLoader(store, loader)
        elif "://" in str(root):
            root = store.local_path
        super().__init__(root, transform, target_transform, loader, is_valid_file, allow_empty)
        if store.local_path is None:
            del self._files, self._folders

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the names of the class folders, and the number of each class."""
        if self._store.local_path is not None:
            found: tuple[list[str], dict[str, int]] = super().find_classes(directory)
            return found
        below = (path for path in self._files if "/" in path)
        classes = sorted({path.partition("/")[0] for path in (*below, *self._folders)})
        if not classes:
            raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
        return classes, {name: number for number, name in enumerate(classes)}

    # torchvision's method is static, but the constructor calls it on the object.
    def make_dataset(
        self,
        directory: str | Path,
        class_to_idx: dict[str, int],
        extensions: tuple[str, ...] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> list[_Sample]:
        """Return path and class number of every image, in torchvision's order."""
        if self._store.local_path is not None:
            found: list[_Sample] = datasets.ImageFolder.make_dataset(
                directory, class_to_idx, extensions, is_valid_file, allow_empty
            )
            return found
        if is_valid_file is None:
            is_valid_file = functools.partial(has_file_allowed_extension, extensions=extensions)
        samples = []
        empty = set(class_to_idx)
        for path in sorted(self._files, key=_torchvision_order):
            name, slash, _ = path.partition("/")
            if slash and name in class_to_idx and is_valid_file(f"{directory}/{path}"):
                samples.append((f"{directory}/{path}", class_to_idx[name]))
                empty.discard(name)
        if empty and not allow_empty:
            raise FileNotFoundError(
                f"Found no valid file for the classes {', '.join(sorted(empty))}."
            )
        return samples

    def __len__(self) -> int:
        return len(self.samples if self._packed is None else self._packed.numbers)

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        """Return a sample's image and class number, transformed."""
        path, target = self.samples[index] if self._packed is None else self._packed[index]
        try:
            picture = self.loader(path)
            if self.transform is not None:
                picture = self.transform(picture)
            if self.target_transform is not None:
                target = self.target_transform(target)
        except Exception as error:  # PIL may not know the file's name
            error.add_note(f"{path} was being read")
            raise
        return picture, target

    @property
    def paths(self) -> list[str]:
        """Path of every sample's file below ``root``."""
        if self._store.local_path is not None:
            return [os.path.relpath(path, self.root) for path, _ in self.samples]
        return [path.removeprefix(f"{self.root}/") for path, _ in self.samples]

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]] | None:
        """Function that reads the files of a batch concurrently, or None for local files."""
        # A subclass that overrides __getitem__ needs it called for every sample.
        own = type(self).__getitem__ is ImageFolder.__getitem__
        return self._samples if own and isinstance(self.loader, _StoreLoader) else None

    def _samples(self, indices: list[Any]) -> list[Any]:
        samples = []
        known = self.samples if self._packed is None else self._packed
        with self.loader.ahead(known[index][0] for index in indices):
            for place, index in enumerate(indices):
                begin_sample(place, 0)
                samples.append(self[index])
        return samples

    # --- copies -----------------------------------------------------------------------------------

    # A list of a million tuples takes 150 MB in every process. So pickles have the lists as arrays,
    # which the worker processes of a node share. A copy makes a list again when it is first used.
    _packed: _Packed | None = None
    _targets: np.ndarray[Any, Any] | None = None

    def __copy__(self) -> ImageFolder:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        samples, targets = state.pop("samples", None), state.pop("targets", None)
        imgs = state.pop("imgs", samples)
        packed = state.pop("_packed", None) or _Packed.of(samples)
        numbers = state.pop("_targets", None)
        if numbers is None and set(map(type, targets or ())) == {int}:
            numbers = np.array(targets, np.int64)
        # Always in this order: a copy that has made its lists, but not changed them, has the same
        # pickle as before.
        state |= {"_packed": packed, "_targets": numbers}
        if packed is None:
            state["samples"] = samples
        if imgs is not samples:
            state["imgs"] = imgs
        if numbers is None:
            state["targets"] = targets
        return state

    def __getattr__(self, name: str) -> Any:
        if name == "samples" and self._packed is not None:
            packed, self._packed = self._packed, None
            value: Any = [packed[place] for place in range(len(packed.numbers))]
        elif name == "imgs" and (self._packed is not None or "samples" in self.__dict__):
            value = self.samples
        elif name == "targets" and self._targets is not None:
            value, self._targets = self._targets.tolist(), None
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        setattr(self, name, value)
        return value


class _StoreLoader:
    """A ``loader`` that reads a file from a store and gives its content to another loader.

    Args:
        store: The store.
        loader: Takes an open file; torchvision's own loader returns an RGB image of PIL.
    """

    def __init__(self, store: Store, loader: Callable[[Any], Any]) -> None:
        self._store = store
        self._loader = _rgb if loader is default_loader else loader
        self._ahead: Iterator[bytes] | None = None

    def __call__(self, path: str) -> Any:
        """Return the image of a file, given its URI."""
        content = next(self._ahead) if self._ahead else self._store.read(self._below(path))
        return self._loader(io.BytesIO(content))

    @contextlib.contextmanager
    def ahead(self, paths: Iterable[str]) -> Iterator[None]:
        """Read several files concurrently. Inside the context, calls must ask for them in order."""
        self._ahead = self._store.read_all([self._below(path) for path in paths])
        try:
            yield
        finally:
            self._ahead = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None}

    def _below(self, path: str) -> str:
        below = path.removeprefix(f"{self._store.uri}/")
        if below == path:
            raise ValueError(f"{path} is not in {self._store.uri}")
        return below


def _rgb(file: Any) -> Any:
    from PIL import Image

    with Image.open(file) as image:
        return image.convert("RGB")


def _torchvision_order(path: str) -> tuple[str, str, str]:
    """Sort by class, folder and name, as torchvision does with ``os.walk``."""
    return path.partition("/")[0], str(PurePosixPath(path).parent), PurePosixPath(path).name


class _Packed:
    """Samples in three arrays.

    Args:
        paths: Path of each sample.
        numbers: Class number of each sample.
    """

    def __init__(self, paths: Iterable[str], numbers: Iterable[int]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._text = np.frombuffer(bytearray().join(encoded), np.uint8)  # writable, as a copy is
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self.numbers = np.fromiter(numbers, np.int64)

    @classmethod
    def of(cls, samples: Any) -> _Packed | None:
        """Pack a list in which each sample is a path and an int; return None for anything else."""
        if type(samples) is not list or set(map(type, samples)) != {tuple}:
            return None
        if set(map(len, samples)) != {2}:
            return None
        paths, numbers = zip(*samples, strict=True)
        plain = set(map(type, paths)) == {str} and set(map(type, numbers)) == {int}
        return cls(paths, numbers) if plain else None

    def __getitem__(self, index: Any) -> _Sample:
        place = range(len(self.numbers))[index]
        start = self._ends[place - 1] if place else 0
        path = self._text[start : self._ends[place]].tobytes()
        return os.fsdecode(path), int(self.numbers[place])
