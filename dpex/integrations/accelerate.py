"""Accelerate: prepared loaders whose batches dpex makes.

Accelerate wraps every loader, and the loader inside of the wrapper is a new one of torch's. Here it
is one of dpex's; the wrapper, which places batches, synchronises generators and counts, is
Accelerate's own.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeGuard

import accelerate
from accelerate.data_loader import DataLoaderAdapter
from torch.utils.data import IterableDataset

from dpex.dataloader import DpexDataLoader
from dpex.integrations.remaking import own_options, remake

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["distribute", "prepare", "skip_first_batches"]


def prepare(
    accelerator: accelerate.Accelerator,
    *objects: Any,
    device_placement: list[bool] | None = None,
) -> Any:
    """Do what ``accelerator.prepare(*objects)`` does, and keep dpex in every ``DpexDataLoader``.

    Args:
        accelerator: Yours.
        objects: Loaders, models, optimizers, schedulers: all that ``prepare`` takes, in any order.
        device_placement: As in ``Accelerator.prepare``.

    Returns:
        What ``accelerator.prepare`` returns. The ``base_dataloader`` of a loader in it has the
        options of the ``DpexDataLoader`` that was given, and this rank's share of its indices.

    Source:
        ``Accelerator.prepare``, Accelerate 1.15.
    """
    loaders = [each for each in objects if _is_ours(each)]
    for loader in loaders:
        if accelerator.num_processes > 1 and loader._source.distributed is not None:
            warnings.warn(
                f"the loader has a DistributedSampler, and Accelerate deals what that leaves for "
                f"this rank out to {accelerator.num_processes} ranks once more: samples are left "
                "out. Give the loader shuffle=True or a sampler of the whole dataset",
                stacklevel=2,
            )
        loader._is_accelerate_prepared = False  # said, and so not asked: no warning
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
    """Return a loader that begins later; of what it skips only the indices are drawn.

    Args:
        loader: A ``DpexDataLoader``, or what ``prepare`` made of one; others are Accelerate's, as
            are those of an ``IterableDataset``, which has no indices to skip.
        num_batches: How many of this rank's batches to skip.

    Returns:
        What ``accelerate.skip_first_batches`` returns, but for the batches being made by dpex.
        It is a loader beside the given one: use it for one epoch.

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
    """Have dpex make the batches of a loader that Accelerate has prepared already.

    Args:
        prepared: What ``accelerator.prepare`` returned for a loader of any class.
        options: dpex's own: ``distribute_mode``, ``head_address``, ``worker_options`` and so on.

    Returns:
        The same object.

    Raises:
        TypeError: Accelerate has not prepared it, or ``options`` has one that dpex does not know.

    Source:
        ``accelerate.data_loader.DataLoaderAdapter``, Accelerate 1.15.
    """
    if not isinstance(prepared, DataLoaderAdapter):
        raise TypeError(
            f"distribute() takes a loader that Accelerate has prepared, got "
            f"{type(prepared).__name__}. Call prepare(accelerator, loader) with one that it has not"
        )
    if isinstance(prepared.base_dataloader, DpexDataLoader):
        return prepared
    return _put_in(prepared, options, DpexDataLoader)


def _is_ours(loader: Any) -> TypeGuard[DpexDataLoader[Any]]:
    # Not isinstance(): a wrapper says that its class is that of the loader in it.
    return issubclass(type(loader), DpexDataLoader)


def _put_in(
    prepared: DataLoaderAdapter, options: dict[str, Any], kind: type[DpexDataLoader[Any]]
) -> DataLoaderAdapter:
    """Replace the loader in a wrapper."""
    loader = remake(prepared.base_dataloader, options, kind=kind)
    # Accelerate notes it before every batch, for it reads one batch ahead of the training loop.
    prepared.dl_state_dict = loader.state_dict()
    prepared.base_dataloader = loader
    return prepared
