"""torchvision's ``ImageFolder``, which can also read from an object store."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from torchvision import datasets
from torchvision.datasets.folder import default_loader, has_file_allowed_extension

from dpex.datasets.store import Store
from dpex.worker.seeding import begin_sample

__all__ = ["ImageFolder"]


class _Paths:
    """The attribute ``ImageFolder.paths``, which a subclass may replace."""

    def __get__(self, dataset: ImageFolder | None, owner: type[ImageFolder]) -> Any:
        if dataset is None:
            return self
        paths = [path for path, _ in dataset.samples]
        if dataset._dpex_store is None:
            return [os.path.relpath(path, dataset.root) for path in paths]
        return [path.removeprefix(f"{dataset.root}/") for path in paths]


class ImageFolder(datasets.ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ``ImageFolder``, which can also read from an object store.

    It is a subclass, so everything else is torchvision's: classes, the order of samples, attributes
    and methods to override. The constructor lists the store once; the worker processes read the
    images.

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

    Attributes:
        paths: Path of every sample's file below ``root``.

    Raises:
        FileNotFoundError: ``root`` does not exist or contains no folders, or a folder contains no
            images and ``allow_empty`` is False.
        OSError: The store refuses access, or does not answer after several tries.
        ValueError: The store has a key that cannot be read as a path.

    Source:
        ``torchvision.datasets.ImageFolder``.
    """

    paths = _Paths()
    # None for a local folder, which torchvision's code lists and reads.
    _dpex_store: Store | None = None

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
        store = Store(root, filesystem)
        if store.local_path is None:
            self._dpex_store = store
            self._dpex_listing = store.listing()
            loader = _StoreLoader(store, loader)
            if type(self).make_dataset is datasets.ImageFolder.make_dataset:
                self.__dict__["make_dataset"] = self._dpex_samples
        root = store.root(root)
        super().__init__(root, transform, target_transform, loader, is_valid_file, allow_empty)
        for name in ("_dpex_listing", "make_dataset"):  # used only by the constructor
            self.__dict__.pop(name, None)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the names of the class folders, and the number of each class."""
        if self._dpex_store is None:
            found: tuple[list[str], dict[str, int]] = super().find_classes(directory)
            return found
        files, folders = vars(self).get("_dpex_listing") or self._dpex_store.listing()
        below = (path for path in files if "/" in path)
        classes = sorted({path.partition("/")[0] for path in (*below, *folders)})
        if not classes:
            raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
        return classes, {name: number for number, name in enumerate(classes)}

    def _dpex_samples(
        self,
        directory: str,
        class_to_idx: dict[str, int],
        extensions: tuple[str, ...] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> list[tuple[str, int]]:
        """Return what torchvision's ``make_dataset`` returns for a local folder."""
        if not class_to_idx:
            raise ValueError("find_classes must return at least one class")
        if is_valid_file is None:
            is_valid_file = functools.partial(has_file_allowed_extension, extensions=extensions)
        samples = []
        empty = set(class_to_idx)
        for path in sorted(self._dpex_listing[0], key=_torchvision_order):
            name, slash, _ = path.partition("/")
            if slash and name in class_to_idx and is_valid_file(f"{directory}/{path}"):
                samples.append((f"{directory}/{path}", class_to_idx[name]))
                empty.discard(name)
        if empty and not allow_empty:
            names = ", ".join(sorted(empty))
            raise FileNotFoundError(f"Found no valid file for the classes {names}.")
        return samples

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        """Return a sample's image and class number, transformed."""
        path, target = self.samples[index]
        return self._dpex_made(path, target, functools.partial(self.loader, path))

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]]:
        """Function that reads the files of a batch concurrently; a local folder has none."""
        # A subclass that overrides __getitem__ needs it called for every sample.
        own = type(self).__getitem__ is ImageFolder.__getitem__
        if not (own and isinstance(self.loader, _StoreLoader)):
            raise AttributeError("__getitems__")
        return self._dpex_batch

    def _dpex_batch(self, indices: list[Any]) -> list[Any]:
        known = [self.samples[index] for index in indices]
        contents = self.loader.contents([path for path, _ in known])
        samples = []
        for place, ((path, target), content) in enumerate(zip(known, contents, strict=True)):
            begin_sample(place, 0)
            decode = functools.partial(self.loader.decode, content)
            samples.append(self._dpex_made(path, target, decode))
        return samples

    def _dpex_made(self, path: str, target: Any, load: Callable[[], Any]) -> tuple[Any, Any]:
        try:
            picture = load()
            if self.transform is not None:
                picture = self.transform(picture)
            if self.target_transform is not None:
                target = self.target_transform(target)
        except Exception as error:  # PIL may not know the file's name
            error.add_note(f"{path} was being read")
            raise
        return picture, target


class _StoreLoader:
    """A ``loader`` that reads a file from a store and gives its content to another loader.

    Args:
        store: The store.
        loader: Takes an open file; torchvision's own loader returns an RGB image of PIL.
    """

    def __init__(self, store: Store, loader: Callable[[Any], Any]) -> None:
        self._store = store
        self._loader = _rgb if loader is default_loader else loader

    def __call__(self, path: str) -> Any:
        """Return the image of a file, given its URI."""
        return self.decode(self._store.read(self._below(path)))

    def decode(self, content: bytes) -> Any:
        """Return the image in a file's content."""
        return self._loader(io.BytesIO(content))

    def contents(self, paths: list[str]) -> Any:
        """Return an iterator over the contents of files, which reads several concurrently."""
        return self._store.read_all([self._below(path) for path in paths])

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
