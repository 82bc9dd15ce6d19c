"""Accelerate: prepared loaders whose batches dpex makes.

Accelerate makes a new torch ``DataLoader`` from every loader, and puts a wrapper around it. This
module replaces the ``DataLoader`` in the wrapper by a ``DpexDataLoader``. The wrapper remains
Accelerate's: it places batches on devices, synchronises generators and counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import accelerate
from accelerate.data_loader import DataLoaderAdapter
from torch.utils.data import IterableDataset

from dpex.dataloader import DpexDataLoader
from dpex.log import warn
from dpex.remaking import own_options, remake

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["distribute", "prepare", "skip_first_batches"]


def prepare(
    accelerator: accelerate.Accelerator,
    *objects: Any,
    device_placement: list[bool] | None = None,
) -> Any:
    """Call ``accelerator.prepare(*objects)``, and keep dpex in every ``DpexDataLoader``.

    Args:
        accelerator: The ``Accelerator``.
        objects: Loaders, models, optimizers, schedulers: all that ``prepare`` takes, in any order.
        device_placement: As in ``Accelerator.prepare``.

    Returns:
        The result of ``accelerator.prepare``. The ``base_dataloader`` of each loader has the
        options of the given ``DpexDataLoader``, and this rank's share of its indices.

    Source:
        ``Accelerator.prepare``, Accelerate 1.15.
    """
    ranks = accelerator.num_processes
    loaders = [each for each in objects if _is_ours(each)]
    for loader in loaders:
        if ranks > 1 and loader._source.distributed is not None:
            warn(
                f"the loader has a DistributedSampler, and Accelerate divides its indices among "
                f"the {ranks} ranks once more. Together the ranks read only 1/{ranks} of the "
                "samples. Pass shuffle=True or a sampler of the whole dataset instead",
            )
        loader._is_accelerate_prepared = False  # the property warns only while this is None
    try:
        result = accelerator.prepare(*objects, device_placement=device_placement)
    finally:
        for loader in loaders:
            loader._is_accelerate_prepared = None
    for given, prepared in zip(objects, result if len(objects) > 1 else [result], strict=True):
        if _is_ours(given) and isinstance(prepared, DataLoaderAdapter):
            _put_in(prepared, own_options(given), type(given))
    return result


def skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> Any:
    """Return a loader that skips batches: it draws their indices, but does not make them.

    Args:
        loader: A ``DpexDataLoader``, or the result of ``prepare`` for such a loader. For any other
            loader, Accelerate's result is returned. The same applies to an ``IterableDataset``,
            which has no indices to skip.
        num_batches: How many of this rank's batches to skip.

    Returns:
        The result of ``accelerate.skip_first_batches``, with batches made by dpex. It is separate
        from the given loader: use it for one epoch.

    Source:
        ``accelerate.skip_first_batches``, Accelerate 1.15.
    """
    skipped = accelerate.skip_first_batches(loader, num_batches)
    inner = loader.base_dataloader if isinstance(loader, DataLoaderAdapter) else loader
    if not _is_ours(inner) or isinstance(inner.dataset, IterableDataset):
        return skipped
    if isinstance(skipped, DataLoaderAdapter):
        return _put_in(skipped, own_options(inner), type(inner))
    return remake(skipped, own_options(inner), kind=type(inner))


def distribute(prepared: Any, **options: Any) -> Any:
    """Put a ``DpexDataLoader`` into a loader that Accelerate has already prepared.

    Args:
        prepared: The result of ``accelerator.prepare`` for a loader of any class.
        options: dpex's options: ``distribute_mode``, ``head_address``, ``worker_options``, etc. If
            dpex makes the batches already, they replace its earlier options.

    Returns:
        The same object, whose batches dpex makes.

    Raises:
        TypeError: Accelerate has not prepared the loader, or dpex does not know an option.

    Source:
        ``accelerate.data_loader.DataLoaderAdapter``, Accelerate 1.15.
    """
    if not isinstance(prepared, DataLoaderAdapter):
        raise TypeError(
            f"distribute() takes a loader that Accelerate has prepared, got "
            f"{type(prepared).__name__}. For any other loader, call prepare(accelerator, loader)"
        )
    inner = prepared.base_dataloader
    if not _is_ours(inner):
        return _put_in(prepared, options, DpexDataLoader)
    if options:
        _put_in(prepared, {**own_options(inner), **options}, type(inner))
    return prepared


def _is_ours(loader: Any) -> TypeGuard[DpexDataLoader[Any]]:
    # Not isinstance(): the __class__ of Accelerate's wrapper is the class of the loader in it.
    return issubclass(type(loader), DpexDataLoader)


def _put_in(
    prepared: DataLoaderAdapter, options: dict[str, Any], kind: type[DpexDataLoader[Any]]
) -> DataLoaderAdapter:
    """Replace the loader in a wrapper."""
    loader = remake(prepared.base_dataloader, options, kind=kind)
    # The wrapper's state_dict() returns this value. Accelerate updates it before every batch,
    # because it reads one batch ahead of the training loop.
    prepared.dl_state_dict = loader.state_dict()
    prepared.base_dataloader = loader
    return prepared
