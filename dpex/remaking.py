"""A new ``DpexDataLoader`` from the arguments of another loader."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from dpex.dataloader import DpexDataLoader

__all__ = ["OWN_OPTIONS", "own_options", "remake"]


def _parameters(loader_type: type[DataLoader[Any]]) -> set[str]:
    return set(inspect.signature(loader_type.__init__).parameters) - {"self"}


# Names of dpex's arguments that torch's loader does not have.
OWN_OPTIONS = frozenset(_parameters(DpexDataLoader) - _parameters(DataLoader))
# Arguments of which torch accepts only some combinations.
_SAMPLING = {"batch_sampler", "batch_size", "drop_last", "sampler", "shuffle"}
_SHARED = (_parameters(DpexDataLoader) & _parameters(DataLoader)) - _SAMPLING


def own_options(loader: DpexDataLoader[Any]) -> dict[str, Any]:
    """Return a loader's values of the ``OWN_OPTIONS``, as keyword arguments."""
    return {name: getattr(loader, name) for name in OWN_OPTIONS}


def remake(
    like: DataLoader[Any],
    own: dict[str, Any],
    sampling: dict[str, Any] | None = None,
    *,
    kind: type[DpexDataLoader[Any]] = DpexDataLoader,
) -> DpexDataLoader[Any]:
    """Make a loader with the arguments of another loader.

    Args:
        like: Any torch ``DataLoader``, which gives the arguments that dpex shares with torch.
        own: dpex's own options, as ``own_options`` returns them, and values that replace those of
            ``like``.
        sampling: Values for ``batch_size``, ``sampler``, ``batch_sampler`` and ``drop_last``, in
            place of those of ``like``. If None, ``like`` gives them.
        kind: Class of the result: ``DpexDataLoader``, or a subclass with the same arguments.

    Returns:
        The loader. No process has been started for it.

    Raises:
        TypeError: ``kind`` takes other arguments.
        ValueError: dpex does not accept a value in ``own``.

    Source:
        Every argument of ``torch.utils.data.DataLoader`` is an attribute of the same name.
    """
    if sampling is None:
        # As in the frameworks, a batch sampler replaces batch_size, sampler and drop_last.
        if isinstance(like.dataset, IterableDataset):
            sampling = {"batch_size": like.batch_size, "drop_last": like.drop_last}
        elif like.batch_sampler is None:
            sampling = {"batch_size": None, "sampler": like.sampler}
        else:
            sampling = {"batch_sampler": like.batch_sampler}
    return kind(**{**{name: getattr(like, name) for name in _SHARED}, **sampling, **own})
