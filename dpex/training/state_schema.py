"""Schema of the dict that ``state_dict`` returns: fields, their types and ranges, and relations.

``load_state`` checks a dict as a whole, whether or not it has a checksum. ``state_fit`` then checks
whether a loader can resume from the state.

Versions:
    1: Without ``resized`` and ``checksum``.
    2: The current version.
"""

from __future__ import annotations

import base64
import copy
import math
import random
import reprlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch

from dpex.training.resume_state import ResumeState
from dpex.training.state_checksum import state_checksum
from dpex.worker.rng_state import Draws
from dpex.worker.stateful import StreamState

__all__ = ["REMEDY", "dump_state", "load_state"]

REMEDY = "Pass the result of state_dict() unchanged, or start a new epoch with load_state_dict({})"
"""What to do about a state that is not as ``state_dict`` returned it."""

_VERSION = 2
_SINCE = {"resized": 2, "checksum": 2}
"""Versions that added fields."""


def dump_state(state: ResumeState) -> dict[str, Any]:
    """Return a state as strings, numbers, lists and dicts.

    The states that samplers, datasets and iterators returned keep their types.
    """
    plain = {"version": _VERSION, **_dump_fields(_STATE, vars(state))}
    return {**plain, "checksum": state_checksum(plain)}


def load_state(plain: Any) -> ResumeState:
    """Return the state from the result of ``dump_state``, of this or an earlier version.

    Raises:
        TypeError: The state or a field has a type that ``dump_state`` does not write.
        ValueError: A field is missing or unknown, or has a value that ``dump_state`` does not
            write. Or fields contradict each other, or the checksum does not match. Or this version
            of dpex does not read the state.
    """
    if not isinstance(plain, Mapping):
        raise TypeError(
            f"load_state_dict takes a dict that state_dict() returned, got {_short(plain)} of type "
            f"{type(plain).__name__}. To start a new epoch, call load_state_dict({{}})"
        )
    # Accelerate adds keys that begin with an underscore.
    own = {key: value for key, value in plain.items() if not str(key).startswith("_")}
    version = _version_of(own, plain)
    known = {name: field for name, field in _FIELDS.items() if _SINCE.get(name, 1) <= version}
    found = _load_fields(known, "", own)
    state = ResumeState(**{name: found[name] for name in known.keys() & _STATE.keys()})
    for relation in _RELATIONS:
        if not relation.holds(state):
            value = getattr(state, relation.field)
            raise _wrong_value(relation.field, value, relation.must.format(state=state))
    if "checksum" in known:
        _check_checksum(own)
    return state


def _version_of(own: Mapping[Any, Any], plain: Mapping[Any, Any]) -> int:
    """Return the version of a state, if this dpex reads it."""
    version = own.get("version")
    if version is not None:
        if _VERSIONED.load("version", version) <= _VERSION:
            return int(version)
        if "checksum" in own:
            _check_checksum(own)  # later versions have the same checksum
    raise ValueError(
        f"load_state_dict got a state of version {version!r}, but this dpex reads versions 1 to "
        f"{_VERSION}. Pass a state that state_dict() of a DpexDataLoader returned, or start a new "
        f"epoch with load_state_dict({{}}). The keys of this state: {sorted(map(str, plain))}"
    )


def _check_checksum(own: Mapping[Any, Any]) -> None:
    found = state_checksum({key: value for key, value in own.items() if key != "checksum"})
    if own["checksum"] != found:
        raise ValueError(
            f"load_state_dict got a state with checksum={_short(own['checksum'])}, but its content "
            f"has the checksum {found}. The state or its file was altered or is incomplete. Load "
            "an earlier checkpoint, or start a new epoch with load_state_dict({})"
        )


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _wrong_type(name: str, value: Any, must: str) -> TypeError:
    return TypeError(
        f"load_state_dict got {name}={_short(value)} of type {type(value).__name__}, but it must "
        f"be {must}. {REMEDY}"
    )


def _wrong_value(name: str, value: Any, must: str) -> ValueError:
    return ValueError(
        f"load_state_dict got {name}={_short(value)}, but it must be {must}. {REMEDY}"
    )


# --- fields ---------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """How one field is checked and written.

    Attributes:
        load: Takes the field's name and plain value. Returns the value, or raises.
        dump: Returns the plain value.
    """

    load: Callable[[str, Any], Any]
    dump: Callable[[Any], Any] = lambda value: value


def _whole(low: int, high: int = 2**63 - 1) -> _Field:
    """Return the field of an ``int``. A bool, a float and an integer of numpy are none."""

    def load(name: str, value: Any) -> int:
        if type(value) is not int:
            raise _wrong_type(name, value, "an int")
        if not low <= value <= high:
            raise _wrong_value(name, value, f"in [{low}, {high}]")
        return value

    return _Field(load)


def _of_type(kind: type, must: str) -> _Field:
    def load(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise _wrong_type(name, value, must)
        return value

    return _Field(load)


def _optional(field: _Field) -> _Field:
    return _Field(
        lambda name, value: None if value is None else field.load(name, value),
        lambda value: None if value is None else field.dump(value),
    )


def _listed(field: _Field, *, length: int | None = None) -> _Field:
    def load(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _wrong_type(name, value, "a list")
        if length is not None and len(value) != length:
            raise _wrong_value(name, value, f"a list of {length} items")
        return tuple(field.load(f"{name}[{at}]", each) for at, each in enumerate(value))

    return _Field(load, lambda value: [field.dump(each) for each in value])


def _load_fields(schema: Mapping[str, _Field], name: str, plain: Any) -> dict[str, Any]:
    """Return the fields of a dict, which must have all of them and no other."""
    if not isinstance(plain, Mapping):
        raise _wrong_type(name, plain, "a dict")
    where = f"{name}." if name else ""
    for missing in sorted(schema.keys() - plain.keys()):
        raise ValueError(f"load_state_dict got a state without {where}{missing}. {REMEDY}")
    for unknown in sorted(plain.keys() - schema.keys(), key=str):
        raise ValueError(
            f"load_state_dict got a state with the unknown field {where}{unknown}="
            f"{_short(plain[unknown])}. {REMEDY}"
        )
    return {key: field.load(where + key, plain[key]) for key, field in schema.items()}


def _dump_fields(schema: Mapping[str, _Field], values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: field.dump(values[key]) for key, field in schema.items()}


_BOOLEAN = _of_type(bool, "a bool")
_TEXT = _of_type(str, "a str")
_COUNT = _whole(0)
_OPAQUE = _Field(lambda _, value: copy.deepcopy(value), copy.deepcopy)
"""A state that a sampler, a dataset or an iterator returned."""


def _load_float(name: str, value: Any) -> float:
    found: float = _of_type(float, "a float").load(name, value)
    if not math.isfinite(found):
        raise _wrong_value(name, value, "finite")
    return found


def _load_bytes(name: str, value: Any, size: int | None = None) -> bytes:
    text: str = _TEXT.load(name, value)
    try:
        found = base64.b64decode(text, validate=True)
    except ValueError:
        raise _wrong_value(name, value, "base64 text") from None
    if size is not None and len(found) != size:
        raise _wrong_value(name, value, f"base64 text of {size} bytes")
    return found


def _dump_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _load_tensor(name: str, value: Any) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(_load_bytes(name, value)), np.uint8))


def _load_torch(name: str, value: Any) -> torch.Tensor:
    state = _load_tensor(name, value)
    try:
        torch.Generator().set_state(state)
    except RuntimeError as error:
        must = f"a state of torch's CPU generator ({error})"
        raise _wrong_value(name, value, must) from None
    return state


def _load_numpy(name: str, value: Any) -> tuple[Any, ...]:
    keys, place, has_gauss, gauss = _listed(_OPAQUE, length=4).load(name, value)
    words = np.frombuffer(_load_bytes(f"{name}[0]", keys, 4 * _WORDS), np.uint32)
    return (
        "MT19937",
        words,
        _whole(0, _WORDS).load(f"{name}[1]", place),
        _whole(0, 1).load(f"{name}[2]", has_gauss),
        _load_float(f"{name}[3]", gauss),
    )


def _dump_numpy(value: Any) -> list[Any]:
    _, keys, place, has_gauss, gauss = value
    return [_dump_bytes(keys.tobytes()), int(place), int(has_gauss), float(gauss)]


def _load_python(name: str, value: Any) -> tuple[Any, ...]:
    version, words, gauss = _listed(_OPAQUE, length=3).load(name, value)
    state = (
        _whole(3, 3).load(f"{name}[0]", version),
        tuple(array("I", _load_bytes(f"{name}[1]", words, 4 * (_WORDS + 1)))),
        _optional(_Field(_load_float)).load(f"{name}[2]", gauss),
    )
    try:
        random.Random().setstate(state)
    except ValueError as error:
        raise _wrong_value(name, value, f"a state of Python's random ({error})") from None
    return state


def _dump_python(value: Any) -> list[Any]:
    version, words, gauss = value
    return [version, _dump_bytes(array("I", words).tobytes()), gauss]


def _by_name(field: _Field) -> _Field:
    """Return the field of a dict whose keys are any names."""

    def load(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _wrong_type(name, value, "a dict")
        for key in value:
            _TEXT.load(f"a key of {name}", key)
        return {key: field.load(f"{name}.{key}", each) for key, each in value.items()}

    return _Field(load, lambda value: {key: field.dump(each) for key, each in value.items()})


_WORDS = 624
"""Number of 32-bit words in the state of a Mersenne Twister."""

_GENERATORS = {
    "torch": _Field(_load_torch, lambda value: _dump_bytes(value.numpy().tobytes())),
    "numpy": _Field(_load_numpy, _dump_numpy),
    "python": _Field(_load_python, _dump_python),
    "own": _by_name(_Field(_load_tensor, lambda value: _dump_bytes(value.numpy().tobytes()))),
}
_DRAWS = _Field(
    lambda name, value: Draws(*_load_fields(_GENERATORS, name, value).values()),
    lambda draws: _dump_fields(
        _GENERATORS, dict(zip(_GENERATORS, vars(draws).values(), strict=True))
    ),
)
_STREAM = {
    "batches": _COUNT,
    "dataset": _OPAQUE,
    "iterator": _OPAQUE,
    "ended": _BOOLEAN,
    "generators": _DRAWS,
    "epoch_over": _BOOLEAN,
}
_STREAM_STATE = _Field(
    lambda name, value: StreamState(**_load_fields(_STREAM, name, value)),
    lambda state: _dump_fields(_STREAM, vars(state)),
)
_STATE = {
    "in_progress": _BOOLEAN,
    "before_iter": _DRAWS,
    "batches": _COUNT,
    "samples": _COUNT,
    "ahead": _listed(_COUNT),
    "base_seed": _optional(_COUNT),  # torch draws it from [0, 2**63 - 1]
    "iteration": _whole(-1),
    "offset": _COUNT,
    "place": _COUNT,
    "batch_size": _optional(_whole(1)),
    "resized": _optional(_listed(_COUNT, length=2)),
    "workers": _optional(_whole(1)),
    "world_size": _optional(_whole(1)),
    "sampler_epoch": _optional(_whole(-(2**63))),  # set_epoch takes any number
    "length": _optional(_COUNT),
    "before_first": _optional(_DRAWS),
    "samplers": _optional(_by_name(_OPAQUE)),
    "streams": _optional(_listed(_COUNT)),
    "stream_states": _optional(_listed(_optional(_STREAM_STATE))),
    "dataset": _OPAQUE,
}
_VERSIONED = _whole(1)
_FIELDS = {"version": _VERSIONED, **_STATE, "checksum": _TEXT}

# --- relations ------------------------------------------------------------------------------------


class _Relation(NamedTuple):
    """A relation of a field to the other fields.

    Attributes:
        field: The field that an error names.
        must: What an error says of the field, as a format of ``state``.
        holds: Returns whether the relation holds.
    """

    field: str
    must: str
    holds: Callable[[ResumeState], bool]


_DEFAULTS = {field.name: field.default for field in fields(ResumeState)}


def _default_between_epochs(name: str) -> _Relation:
    default = _DEFAULTS[name]
    return _Relation(
        name,
        f"{default!r} in a state between two epochs (in_progress=False)",
        lambda state: state.in_progress or getattr(state, name) == default,
    )


def _for_maps(name: str) -> _Relation:
    default = _DEFAULTS[name]
    return _Relation(
        name,
        f"{default!r} in the state of an IterableDataset (workers={{state.workers}})",
        lambda state: state.workers is None or getattr(state, name) == default,
    )


def _for_streams(name: str) -> _Relation:
    return _Relation(
        name,
        "None in the state of a map-style dataset (workers=None)",
        lambda state: (
            not state.in_progress or state.workers is not None or getattr(state, name) is None
        ),
    )


def _sizes_fit(state: ResumeState) -> bool:
    """Return whether ``samples`` is the number of samples in ``batches``."""
    batches, samples = state.resized or (0, 0)
    batches, samples = state.batches - batches, state.samples - samples
    if batches < 0 or samples < 0 or (samples and not batches):
        return False
    size = state.batch_size
    if state.workers is not None:
        most = batches * (size or 1)
        # Only the training process counts the samples of streams that it or torch's workers read.
        counted = state.streams is None and state.stream_states is None
        return samples == most if counted else samples <= most
    return size is None or not batches or 0 < samples - (batches - 1) * size <= size


def _stream_states_fit(state: ResumeState) -> bool:
    """Return whether every stream's state is from before its first undelivered batch."""
    known = state.stream_states or ()
    streams = state.streams or (state.batches,)
    if not len(known) == len(streams) == state.workers:
        return False
    pairs = [(each, delivered) for each, delivered in zip(known, streams, strict=True) if each]
    if state.streams is None:  # the training process reads the stream, and reports its state now
        return all(each.batches == delivered for each, delivered in pairs)
    return all(each.batches <= (0 if each.epoch_over else delivered) for each, delivered in pairs)


_RELATIONS = (
    *map(
        _default_between_epochs,
        (
            "batches",
            "samples",
            "ahead",
            "offset",
            "place",
            "batch_size",
            "resized",
            "workers",
            "world_size",
            "sampler_epoch",
            "before_first",
            "streams",
        ),
    ),
    *map(
        _for_maps,
        ("ahead", "offset", "place", "resized", "world_size", "sampler_epoch", "length"),
    ),
    *map(_for_streams, ("streams", "stream_states")),
    _Relation(
        "iteration",
        "-1 if and only if base_seed ({state.base_seed}) is None",
        lambda state: (
            (state.base_seed is None) == (state.iteration == -1)
            or not (state.in_progress or state.base_seed is not None)
        ),
    ),
    _Relation(
        "streams",
        "{state.workers} numbers whose sum is batches ({state.batches})",
        lambda state: (
            state.streams is None
            or (len(state.streams) == state.workers and sum(state.streams) == state.batches)
        ),
    ),
    _Relation(
        "base_seed",
        "an int if streams or stream_states between two epochs are given",
        lambda state: (
            state.base_seed is not None
            or (state.streams is None and (state.in_progress or state.stream_states is None))
        ),
    ),
    _Relation(
        "stream_states",
        "states of the {state.workers} streams, taken before their first undelivered batches",
        lambda state: (
            not state.in_progress or state.stream_states is None or _stream_states_fit(state)
        ),
    ),
    _Relation(
        "stream_states",
        "states that a dataset or its iterator returned, or None",
        lambda state: all(
            each is None or each.dataset is not None or each.iterator is not None
            for each in state.stream_states or ()
        ),
    ),
    _Relation(
        "stream_states",
        "states of streams that have ended, because the epoch has",
        lambda state: (
            state.in_progress
            or all(s is None or (s.epoch_over and not s.batches) for s in state.stream_states or ())
        ),
    ),
    _Relation(
        "samples",
        "the number of samples in {state.batches} batches of batch_size={state.batch_size} "
        "(resized={state.resized})",
        _sizes_fit,
    ),
    _Relation(
        "ahead",
        "ascending numbers of batches after batches ({state.batches})",
        lambda state: all(
            one < other
            for one, other in zip((state.batches, *state.ahead), state.ahead, strict=False)
        ),
    ),
    _Relation(
        "offset",
        "0 if and only if place ({state.place}) is 0, at least place, and 0 if world_size "
        "({state.world_size}) is None",
        lambda state: (
            (state.offset > 0) == (state.place > 0)
            and state.offset >= state.place
            and (state.world_size is not None or not state.offset)
        ),
    ),
    _Relation(
        "before_first",
        "given, because batches were delivered",
        lambda state: (
            state.before_first is not None or state.workers is not None or not state.delivered
        ),
    ),
    _Relation(
        "dataset",
        "None in the middle of an epoch of an IterableDataset (workers={state.workers})",
        lambda state: state.workers is None or state.dataset is None,
    ),
    _Relation(
        "samplers",
        "without the iterator's state until a batch was delivered",
        lambda state: state.delivered or "iterator" not in (state.samplers or ()),
    ),
)
