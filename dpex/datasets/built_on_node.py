"""A dataset that each process builds when it first reads it, from the constructor's arguments."""

from __future__ import annotations

import functools
import inspect
import os
import re
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from dpex.datasets.locks import lock_for
from dpex.datasets.node_memory import job_name, use_until_exit
from dpex.datasets.shared_arrays import MEMORY, share_arrays
from dpex.errors import NodeDataError
from dpex.recent import Recent
from dpex.worker.batched_reads import reads_batches

__all__ = ["KEY_PREFIX", "OnNode", "on_node"]

KEY_PREFIX = "on_node-"
"""The text before the 32 hexadecimal digits of a random key."""

# Maximum number of built datasets in a process. Each part of a large dataset may count as one.
_MAX_BUILT = 64
# Arguments whose text `repr` may show. Other arguments may be or contain secrets.
_SHOWN = {
    *("data_dir", "dir", "directory", "file", "filename", "folder", "path", "root"),
    *("image_set", "mode", "name", "split", "train", "year"),
}

# Keyed by process: a fork must not read from files that its parent opened.
_built: Recent[tuple[int, str], Any] = Recent(_MAX_BUILT)


def on_node(
    make: Callable[..., Any],
    *args: Any,
    length: int | None = None,
    arrays_in_common: bool = False,
    **kwargs: Any,
) -> OnNode:
    """Return a dataset that every worker process builds when it first reads a sample.

    Only ``make`` and its arguments are pickled, so each node reads its own files or a store. Each
    call returns a new dataset, which every process builds separately.

    Args:
        make: The dataset's class, or a function that returns a map-style dataset.
        *args: Arguments of ``make``.
        length: Number of samples. If None, this process builds the dataset once to get its length.
            Required if this process cannot build the dataset.
        arrays_in_common: Whether the processes of a node share one copy of large arrays. These are
            numpy arrays and CPU tensors in attributes of the dataset, or of datasets in its
            attributes. Each is replaced with an equal array after ``make`` returns, so nothing
            else may refer to it. Writes stay private to a process.
        **kwargs: Keyword arguments of ``make``.

    Raises:
        NodeDataError: ``length`` is None, and this process cannot build the dataset.
        TypeError: ``make`` is not callable, ``length`` is not an integer >= 0, or ``length`` or
            ``arrays_in_common`` is given and also names a parameter of ``make``.

    Source:
        The factory datasets that torch's documentation recommends for objects that cannot be
        pickled.
    """
    if not callable(make):
        raise TypeError(
            f"make must be a class or a function, got {make!r}. Pass FashionMNIST, root=..., not "
            "FashionMNIST(root=...)"
        )
    for name, given in (("length", length), ("arrays_in_common", arrays_in_common or None)):
        if given is not None and _has_parameter(make, name):
            raise TypeError(
                f"{name}={given!r} is ambiguous: on_node and {_name(make)} both have this "
                f"parameter. To pass it to {_name(make)}, pass functools.partial({_name(make)}, "
                f"{name}=...) as make"
            )
    whole = isinstance(length, int) and not isinstance(length, bool)
    if length is not None and (not whole or length < 0):
        raise TypeError(f"length must be an integer >= 0 or None, got {length!r}")
    dataset = OnNode(make, args, kwargs, arrays_in_common=arrays_in_common)
    if length is None:
        try:
            length = len(dataset.built)
        except Exception as error:
            raise NodeDataError(
                f"{dataset!r} cannot be built in this process ({type(error).__name__}: {error}). "
                "dpex builds it here to get its length. If only the nodes can build it, pass "
                "length="
            ) from error
    dataset.length = length
    return dataset


class OnNode(Dataset[Any]):
    """A dataset that each process builds when it first reads it; ``on_node`` returns it.

    Attributes:
        length: Number of samples, or None while it is unknown.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        arrays_in_common: bool,
    ) -> None:
        self._make = make
        self._args = args
        self._kwargs = kwargs
        # All pickled copies have this key, so a process builds the dataset once for all of them.
        self._key = KEY_PREFIX + uuid.uuid4().hex
        forget = weakref.finalize(self, _built.pop, (os.getpid(), self._key), None)
        forget.atexit = False
        self._sharing_job = job_name() if arrays_in_common else None
        if self._sharing_job:
            use_until_exit(MEMORY, self._sharing_job)
        self.length: int | None = None

    @property
    def built(self) -> Any:
        """The dataset that ``make`` returned in this process.

        Raises:
            NodeDataError: The dataset's length on this node differs from ``length``.
        """
        key = (os.getpid(), self._key)
        with lock_for(key):
            dataset = _built.pop(key, None)
            if dataset is None:
                dataset = self._build()
            _built[key] = dataset  # the last one
        return dataset

    def _build(self) -> Any:
        try:
            dataset = self._make(*self._args, **self._kwargs)
        except Exception as error:
            error.add_note(f"{self!r} was being built where it is read")
            raise
        sized = self.length is not None and hasattr(dataset, "__len__")
        if sized and len(dataset) != self.length:
            raise NodeDataError(
                f"{self!r} has {len(dataset):,} samples on this node, but {self.length:,} in "
                "the training process (or by length=). All nodes must have the same files"
            )
        if self._sharing_job:
            share_arrays(dataset, self._sharing_job)
        return dataset

    def __len__(self) -> int:
        return len(self.built) if self.length is None else self.length

    def __getitem__(self, index: Any) -> Any:
        return self.built[index]

    @property
    def __getitems__(self) -> Callable[[list[Any]], Any] | None:
        """The built dataset's ``__getitems__``, or None if it does not read whole batches."""
        return self.built.__getitems__ if reads_batches(self.built) else None

    def __repr__(self) -> str:
        """Return the call, with "…" for arguments that may be secret."""
        try:
            bound = inspect.signature(self._make).bind(*self._args, **self._kwargs)
            named = list(bound.arguments.items())
        except (TypeError, ValueError):
            named = [("", value) for value in self._args] + list(self._kwargs.items())
        shown = [f"{name}={_shown(name, value)}" for name, value in named]
        return f"on_node({', '.join([_name(self._make), *shown])})"


def _name(make: Callable[..., Any]) -> str:
    return str(getattr(make, "__qualname__", type(make).__qualname__))


def _has_parameter(make: Callable[..., Any], name: str) -> bool:
    try:
        parameter = inspect.signature(make).parameters.get(name)
    except (TypeError, ValueError):  # a callable written in C may have no signature
        return False
    # A parameter that partial() binds already has its value.
    bound = isinstance(make, functools.partial) and name in make.keywords
    return parameter is not None and not bound


def _shown(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if name not in _SHOWN or not isinstance(value, str | Path):
        return "…"
    # Hide the user and password before "@", and the query of a URI.
    return repr(re.sub(r"//.*@|[?].*", "…", str(value)))
