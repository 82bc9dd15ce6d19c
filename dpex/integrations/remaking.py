"""A ``DpexDataLoader`` in the place of a loader that it cannot become itself."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from dpex.dataloader import DpexDataLoader

__all__ = ["OWN_OPTIONS", "own_options", "remake"]


def _parameters(loader_type: type[DataLoader[Any]]) -> set[str]:
    return set(inspect.signature(loader_type.__init__).parameters) - {"self"}


# The names of dpex's arguments that torch's loader does not have.
OWN_OPTIONS = frozenset(_parameters(DpexDataLoader) - _parameters(DataLoader))
# Which of these may be given depends on which others are.
_SAMPLING = {"batch_sampler", "batch_size", "drop_last", "sampler", "shuffle"}
_SHARED = (_parameters(DpexDataLoader) & _parameters(DataLoader)) - _SAMPLING


def own_options(loader: DpexDataLoader[Any]) -> dict[str, Any]:
    """Return what a loader was given beyond torch's arguments, as keywords."""
    return {name: getattr(loader, name) for name in OWN_OPTIONS}


def remake(
    like: DataLoader[Any],
    own: dict[str, Any],
    sampling: dict[str, Any] | None = None,
    *,
    kind: type[DpexDataLoader[Any]] = DpexDataLoader,
) -> DpexDataLoader[Any]:
    """Make a loader with the arguments of another one.

    Args:
        like: Any loader of torch's; what it has in common with dpex is taken from it.
        own: dpex's own options, as ``own_options`` returns them.
        sampling: Which of ``batch_size``, ``sampler``, ``batch_sampler``, ``drop_last``, where not
            what ``like`` has.
        kind: What to make: ``DpexDataLoader``, or a subclass with the same arguments.

    Returns:
        The loader; nothing has been started for it.

    Raises:
        TypeError: ``kind`` takes other arguments.
        ValueError: A value in ``own`` is one that dpex does not know.

    Source:
        Every argument of ``torch.utils.data.DataLoader`` is an attribute of the same name.
    """
    if sampling is None:
        # As frameworks do: a batch sampler stands for batch_size, sampler and drop_last.
        if isinstance(like.dataset, IterableDataset):
            sampling = {"batch_size": like.batch_size, "drop_last": like.drop_last}
        elif like.batch_sampler is None:
            sampling = {"batch_size": None, "sampler": like.sampler}
        else:
            sampling = {"batch_sampler": like.batch_sampler}
    return kind(**{name: getattr(like, name) for name in _SHARED}, **sampling, **own)
