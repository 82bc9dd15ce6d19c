"""Whether a loader can resume from a state, and the state in terms of that loader."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from dpex.log import warn
from dpex.training.index_source import IndexSource
from dpex.training.resume_state import ResumeState
from dpex.worker.rng_state import Draws
from dpex.worker.stateful import has_state

__all__ = ["fitted"]

_NEW_EPOCH = "or start a new epoch with load_state_dict({})"


def fitted(state: ResumeState, source: IndexSource) -> ResumeState:
    """Return the state from which a loader resumes.

    Args:
        state: The loaded state.
        source: Source of the loader's indices.

    Returns:
        The state, with this loader's names of generators. If ``num_workers`` has changed between
        two epochs, the state is without the states of the workers' datasets.

    Raises:
        ValueError: The state belongs to another dataset or sampler, or it does not fit the
            arguments of the loader.
    """
    _check_dataset_state(state, source)
    _check_sampler_states(state, source)
    draws = state.before_first and _draws_of(state.before_first, "before_first", source)
    state = replace(
        state,
        before_iter=_draws_of(state.before_iter, "before_iter", source),
        before_first=draws,
    )
    if state.in_progress:
        _check_streams(state, source)
        if state.delivered and not source.streams:
            _check_rest(state, source)
    return _without_lost_streams(state, source)


def _check_dataset_state(state: ResumeState, source: IndexSource) -> None:
    kind = type(source.dataset).__name__
    dataset_states = [state.dataset, *(s and s.dataset for s in state.stream_states or ())]
    if any(each is not None for each in dataset_states) and not has_state(source.dataset):
        raise ValueError(
            f"the state contains dataset state, but {kind} has no state_dict() and "
            f"load_state_dict(). Resume with the dataset class that saved it, {_NEW_EPOCH}"
        )
    if state.dataset is None and source.dataset_state is not None:
        raise ValueError(
            f"the state contains no dataset state, but {kind} has state_dict() and "
            f"load_state_dict(). Resume with the dataset class that saved it, {_NEW_EPOCH}"
        )


def _check_sampler_states(state: ResumeState, source: IndexSource) -> None:
    saved = set(state.samplers or ())
    if saved == {"iterator"}:
        _check_iterator(source.index_sampler)
        return
    known = {name for name, sampler in source.samplers.items() if has_state(sampler)}
    if not set(source.sampler_states(None) or ()) <= saved <= known:
        kinds = ", ".join(type(sampler).__name__ for sampler in source.samplers.values())
        raise ValueError(
            f"the state contains the states of the samplers {sorted(saved)}, but the samplers with "
            f"a state of this loader are {sorted(known)} (of {kinds}; the outermost is 'outer'). "
            f"Resume with the samplers that saved it, {_NEW_EPOCH}"
        )


def _check_iterator(iterated: Any) -> None:
    """Refuse the state of an iterator if its class shows that it has none."""
    if inspect.isgeneratorfunction(type(iterated).__iter__):
        raise ValueError(
            "the state contains the state of an iterator, but the iterator of a "
            f"{type(iterated).__name__} is a generator, which has none. Resume with the class that "
            f"saved it, {_NEW_EPOCH}"
        )


def _draws_of(draws: Draws, name: str, source: IndexSource) -> Draws:
    """Return generator states with this loader's names of its own generators."""
    generators = source.generators
    # Names depend on the samplers around a sampler, but the order from the outside inward does not.
    saved = sorted(draws.own, key=lambda n: (n != "loader", n != "outer", len(n), n))
    if len(saved) != len(generators) or ("loader" in saved) != ("loader" in generators):
        raise ValueError(
            f"the state contains the states of the generators {saved}, but this loader and its "
            f"samplers have the generators {[*generators]}. Pass generator= to the loader and its "
            f"samplers as in the loader that saved the state, {_NEW_EPOCH}"
        )
    own = {}
    for old, (new, generator) in zip(saved, generators.items(), strict=True):
        own[new] = draws.own[old]
        try:
            torch.Generator(device=generator.device).set_state(own[new])
        except RuntimeError as error:
            raise ValueError(
                f"load_state_dict got {name}.own.{old} that is not a state of a generator on "
                f"device {str(generator.device)!r} ({error}). Pass a generator on the device that "
                f"the saved generator had, {_NEW_EPOCH}"
            ) from None
    return replace(draws, own=own)


def _check_streams(state: ResumeState, source: IndexSource) -> None:
    if (state.workers is None) == source.streams:
        kinds = ("an IterableDataset", "a map-style dataset")
        raise ValueError(
            f"the state was saved with {kinds[state.workers is None]}, but "
            f"{type(source.dataset).__name__} is {kinds[not source.streams]}. Resume with the same "
            f"dataset, {_NEW_EPOCH}"
        )
    if any(s and not s.epoch_over and s.iterator is not None for s in state.stream_states or ()):
        _check_iterator(source.dataset)
    if not (source.streams and state.batches):
        return
    if (state.workers, state.batch_size) != (source.workers, source.batch_size):
        raise ValueError(
            f"the state of an IterableDataset was saved with num_workers={state.workers} and "
            f"batch_size={state.batch_size}, but this loader has "
            f"num_workers={source.num_workers} and batch_size={source.batch_size}. Keep both until "
            "the end of the epoch"
        )
    if source.distribute_mode and state.streams is None:
        raise ValueError(
            f"the state of an IterableDataset was saved without distribute_mode. It does not "
            f"say how many of its {state.batches} batches each worker made. Finish this epoch "
            "without distribute_mode"
        )


def _check_rest(state: ResumeState, source: IndexSource) -> None:
    """Check that the rest of an epoch of a map-style dataset can be redrawn."""
    if state.length != source.length:
        raise ValueError(
            f"the state was saved with a dataset of length {state.length}, but this dataset "
            f"has length {source.length}. Resume with the same dataset, {_NEW_EPOCH}"
        )
    if state.ahead and state.batch_size != source.batch_size:
        raise ValueError(
            f"the state was saved with in_order=False and batch_size={state.batch_size}, but "
            f"this loader has batch_size={source.batch_size}. Keep it until the end of the epoch"
        )
    _check_ranks(state, source)
    if not state.samplers:
        _check_samples(state, source)


def _check_ranks(state: ResumeState, source: IndexSource) -> None:
    if state.sampler_epoch is None and source.distributed is not None:
        raise ValueError(
            "the state was saved with a sampler without set_epoch, but this loader has a "
            f"DistributedSampler. Resume with the same sampler, {_NEW_EPOCH}"
        )
    if state.world_size == source.world_size and not state.offset:
        return
    by_torch = _is_torchs(source.distributed) and source.by_samples
    if state.world_size is None or not by_torch or state.ahead:
        raise ValueError(
            f"the state was saved with {_ranks(state.world_size)}, and this loader has "
            f"{_ranks(source.world_size)}. An epoch can resume with another number of ranks only "
            "with in_order=True, torch's DistributedSampler, and torch's BatchSampler or none. "
            "Finish the epoch with the same ranks and samplers"
        )


def _check_samples(state: ResumeState, source: IndexSource) -> None:
    """Check that the sampler yields as many indices as the delivered batches have."""
    batches, samples = state.resized or (0, 0)
    batches, samples = state.batches - batches, state.samples - samples
    if state.batch_size is None and not source.batched and batches != samples:
        raise ValueError(
            f"load_state_dict got batches={state.batches} and samples={state.samples}, but each "
            "batch of this loader is one sample (batch_size=None). Resume with the sampler that "
            f"saved the state, {_NEW_EPOCH}"
        )
    share = _share(state, source)
    if share is None:
        return
    least, most = share
    at_end = least <= state.samples
    if state.samples > most or (state.batch_size and samples % state.batch_size and not at_end):
        raise ValueError(
            f"load_state_dict got samples={state.samples} and batch_size={state.batch_size}, but "
            f"the sampler of this loader yields {most} indices, and only the last batch may be "
            f"smaller. Resume with the same sampler, {_NEW_EPOCH}"
        )


def _share(state: ResumeState, source: IndexSource) -> tuple[int, int] | None:
    """Return how many samples of an epoch a rank reads, at least and at most.

    None for samplers of other classes than torch's, whose ``len()`` torch does not need.
    """
    if not source.by_samples:
        return None
    if (ranks := source.distributed) is not None:
        if not _is_torchs(ranks):
            return None
        rest = max(0, len(ranks.dataset) - state.offset)  # type: ignore[arg-type]
        return rest // (state.world_size or 1), math.ceil(rest / (state.world_size or 1))
    sampler: Any = source.index_sampler.sampler if source.batched else source.index_sampler
    if type(sampler).__module__ != "torch.utils.data.sampler":
        return None
    try:
        return len(sampler), len(sampler)
    except Exception:  # torch needs no len() of a sampler's data source
        return None


def _is_torchs(sampler: DistributedSampler[Any] | None) -> bool:
    return sampler is not None and type(sampler).__iter__ is DistributedSampler.__iter__


def _ranks(world_size: int | None) -> str:
    return "no DistributedSampler" if world_size is None else f"world size {world_size}"


def _without_lost_streams(state: ResumeState, source: IndexSource) -> ResumeState:
    """Return the state, without the workers' datasets' states if ``num_workers`` has changed."""
    known = state.stream_states
    if known is None or state.batches or len(known) == source.workers:
        return state
    warn(
        f"the state contains the datasets' states of {len(known)} persistent workers, but "
        f"num_workers is {source.num_workers}. The datasets start without these states. To keep "
        f"them, pass num_workers={len(known)}",
    )
    return replace(state, stream_states=None)
