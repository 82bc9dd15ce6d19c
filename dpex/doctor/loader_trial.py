"""Epochs of several loaders, read in turns, and their speeds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from dpex.dataloader import DpexDataLoader
from dpex.remaking import own_options, remake

__all__ = ["Epoch", "Speed", "loaders_like", "speeds", "take_turns"]

_TURNS = 3
# An epoch whose batches arrive too slowly for a rate is read for this many times its limit.
_PATIENCE = 3


@dataclass(frozen=True)
class Epoch:
    """One epoch, or its beginning.

    Attributes:
        whole: Whether it was read to its end.
        first_batch_s: Time from ``iter()`` to the first batch.
        seconds: Time from ``iter()`` to the last batch.
        samples: Number of samples.
        steady_s: Time from the first ``num_workers`` batches to the last batch but one.
        steady_samples: Mean number of samples in that time.
        encode_s: Time in which worker processes of dpex pickled batches.
        receive_s: Time in which the training process fetched and unpacked batches of dpex.
    """

    whole: bool
    first_batch_s: float
    seconds: float
    samples: int
    steady_s: float
    steady_samples: float
    encode_s: float
    receive_s: float


@dataclass(frozen=True)
class Speed:
    """The speed of a loader.

    Attributes:
        samples_per_s: Samples per second, without the loader's first turn.
        counts: ``"epochs"`` if the rate is of whole epochs. ``"steady"`` if it leaves out the first
            ``num_workers`` batches of each ``iter()``. ``"all"`` if there were too few batches.
        first_batch_s: Time to the first batch of the first ``iter()``.
        later_first_batch_s: Median time to the first batch of the other calls; None without any.
        epoch_s: Mean time of a whole epoch; None unless the rate is of whole epochs.
        samples: Number of samples read in total.
        encode_s: Worker time per sample to pickle batches; dpex alone.
        receive_s: Time per sample to fetch and unpack batches; dpex alone.
    """

    samples_per_s: float
    counts: str
    first_batch_s: float
    later_first_batch_s: float | None
    epoch_s: float | None
    samples: int
    encode_s: float
    receive_s: float


def loaders_like(
    given: DataLoader[Any], *, num_workers: int, head_address: str | None
) -> dict[str, DpexDataLoader[Any]]:
    """Make the loaders to compare, with the arguments of the user's loader.

    Args:
        given: The user's loader.
        num_workers: Number of workers. If it is not the user's, the user's is compared as well.
        head_address: What runs dpex's workers; if None, the user's loader gives it.

    Returns:
        ``"torch"`` with torch's own workers, ``"dpex"``, and ``"given"`` with ``num_workers=0``.
    """
    own = own_options(given) if isinstance(given, DpexDataLoader) else {}
    if head_address is not None:
        own["head_address"] = head_address
    plain = {"distribute_mode": False}
    loaders = {} if given.num_workers == num_workers else {"given": remake(given, plain)}
    loaders["torch"] = remake(given, {**plain, "num_workers": num_workers})
    options = {**own, "distribute_mode": True, "num_workers": num_workers}
    loaders["dpex"] = remake(given, options)
    return loaders


def take_turns(
    loaders: Mapping[str, DpexDataLoader[Any]], *, total_s: float
) -> tuple[dict[str, list[list[Epoch]]], dict[str, Exception]]:
    """Read from each loader in turn, several times, so that all meet the same machine.

    Args:
        loaders: The loaders. Each reads whole epochs until its turn ends.
        total_s: Length of all turns, but for a second part of dpex's first turn, in which Ray may
            start further worker processes. A turn begins with its first batch, and its last epoch
            is cut off.

    Returns:
        The epochs of each turn of each loader. The errors of loaders that raised one, and had no
        further turn.
    """
    turns: dict[str, list[list[Epoch]]] = {name: [] for name in loaders}
    errors: dict[str, Exception] = {}
    turn_s = total_s / (_TURNS * len(loaders))
    for turn in range(_TURNS):
        for name, loader in loaders.items():
            if name in errors:
                continue
            try:
                turns[name].append(_turn(loader, turn_s))
                if turn == 0 and loader.distribute_mode:
                    # Ray starts worker processes after the first batch, but not in later turns.
                    turns[name][0] += _turn(loader, turn_s)
            except Exception as error:
                errors[name] = error
                loader.close()
    return turns, errors


def _turn(loader: DpexDataLoader[Any], turn_s: float) -> list[Epoch]:
    started = time.perf_counter()
    epochs = [_read(loader, turn_s)]
    until = started + epochs[0].first_batch_s + turn_s
    while epochs[-1].samples and time.perf_counter() < until:
        epochs.append(_read(loader, until - time.perf_counter()))
    return epochs


def _read(loader: DpexDataLoader[Any], limit_s: float) -> Epoch:
    """Read an epoch, for at most ``limit_s`` from its first batch if that suffices for a rate."""
    workers = max(1, loader.num_workers)
    started = time.perf_counter()
    first = steady_since = previous = now = started
    steady_from = number = 0
    whole = True
    for number, _ in enumerate(loader, 1):
        previous, now = now, time.perf_counter()
        if number == 1:
            first = now
        if number == workers:
            steady_since, steady_from = now, loader.stats().samples
        waited = (now - first) / max(limit_s, 1e-3)
        if waited >= _PATIENCE or (waited >= 1 and number > 2 * workers):
            whole = False
            break
    stats = loader.stats()
    # dpex's batches arrive in groups, a chunk of each worker. The limit mostly ends a wait for such
    # a group, and the first batch of the group would count the whole wait.
    steady_batches = max(0, number - 1 - workers)
    steady_samples = (stats.samples - steady_from) * steady_batches / max(1, number - workers)
    if not whole and not loader.distribute_mode:
        loader.close()  # torch's persistent workers would continue with the rest of the epoch
    return Epoch(
        whole=whole,
        first_batch_s=first - started,
        seconds=now - started,
        samples=stats.samples,
        steady_s=previous - steady_since if steady_batches else 0.0,
        steady_samples=steady_samples,
        encode_s=stats.encode_s,
        receive_s=stats.transfer_s + stats.decode_s,
    )


def speeds(turns: Mapping[str, Sequence[Sequence[Epoch]]]) -> dict[str, Speed]:
    """Return the speeds of loaders, all counted in the same way.

    Args:
        turns: The epochs of each turn of each loader. The first turn, in which Ray and worker
            processes start, counts only for ``first_batch_s``.
    """
    later = {name: [e for turn in own[1:] for e in turn] for name, own in turns.items()}
    if all(any(epoch.whole for epoch in own) for own in later.values()):
        counts = "epochs"
    elif all(any(epoch.steady_samples for epoch in own) for own in later.values()):
        counts = "steady"
    else:
        counts = "all"
    return {name: _speed(turns[name], own, counts) for name, own in later.items()}


def _speed(turns: Sequence[Sequence[Epoch]], later: Sequence[Epoch], counts: str) -> Speed:
    if counts == "steady":
        parts = [(epoch.steady_samples, epoch.steady_s) for epoch in later]
    else:
        counted = [epoch for epoch in later if epoch.whole or counts == "all"]
        parts = [(float(epoch.samples), epoch.seconds) for epoch in counted]
    samples, seconds = (sum(column) for column in zip(*parts, strict=True))
    first, *others = [epoch for turn in turns for epoch in turn]
    total = sum(epoch.samples for epoch in (first, *others))
    return Speed(
        samples_per_s=samples / seconds if seconds else 0.0,
        counts=counts,
        first_batch_s=first.first_batch_s,
        later_first_batch_s=(
            statistics.median(epoch.first_batch_s for epoch in others) if others else None
        ),
        epoch_s=seconds / len(parts) if counts == "epochs" else None,
        samples=total,
        encode_s=sum(epoch.encode_s for epoch in (first, *others)) / max(1, total),
        receive_s=sum(epoch.receive_s for epoch in (first, *others)) / max(1, total),
    )
