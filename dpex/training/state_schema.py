"""The dict that ``state_dict`` returns: strings, numbers, lists and dicts, with a checksum.

The checksum shows whether a dict is as ``dump_state`` returned it. Its fields need no other check.
``state_fit`` then checks whether a loader can resume from the state.
"""

from __future__ import annotations

import base64
import copy
import reprlib
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dpex.training.resume_state import ResumeState
from dpex.training.state_checksum import state_checksum
from dpex.worker.rng_state import Draws
from dpex.worker.stateful import StreamState

__all__ = ["dump_state", "load_state"]

_VERSION = 2


def dump_state(state: ResumeState) -> dict[str, Any]:
    """Return a state as strings, numbers, lists and dicts.

    The states that samplers, datasets and iterators returned keep their types.
    """
    streams = state.stream_states
    plain = {
        "version": _VERSION,
        **vars(state),
        "before_iter": _dump_draws(state.before_iter),
        "before_first": state.before_first and _dump_draws(state.before_first),
        "ahead": list(state.ahead),
        "resized": state.resized and list(state.resized),
        "streams": state.streams and list(state.streams),
        "stream_states": streams and [each and _dump_stream(each) for each in streams],
    }
    return {**copy.deepcopy(plain), "checksum": state_checksum(plain)}


def load_state(plain: Any) -> ResumeState:
    """Return the state from the result of ``dump_state``.

    Raises:
        TypeError: The state is not a dict.
        ValueError: The state is not as ``dump_state`` returned it, or of another version.
    """
    if not isinstance(plain, Mapping):
        raise TypeError(
            f"load_state_dict takes a dict that state_dict() returned, got {_short(plain)} of type "
            f"{type(plain).__name__}. To start a new epoch, call load_state_dict({{}})"
        )
    # Accelerate adds keys that begin with an underscore.
    own = {key: value for key, value in plain.items() if not str(key).startswith("_")}
    version = own.get("version")
    if version == _VERSION or "checksum" in own:  # all versions have the same checksum
        _check_checksum(own)
    if version != _VERSION:
        raise ValueError(
            f"load_state_dict got a state of version {version!r}, but this dpex reads version "
            f"{_VERSION}. Pass a state that state_dict() of a DpexDataLoader returned, or start a "
            "new epoch with load_state_dict({}). The keys of this state: "
            f"{sorted(map(str, plain))}"
        )
    found = {key: _item(value) for key, value in copy.deepcopy(own).items()}
    del found["version"], found["checksum"]
    streams = found["stream_states"]
    found |= {
        "before_iter": _load_draws(found["before_iter"]),
        "before_first": found["before_first"] and _load_draws(found["before_first"]),
        "ahead": _numbers(found["ahead"]),
        "resized": found["resized"] and _numbers(found["resized"]),
        "streams": found["streams"] and _numbers(found["streams"]),
        "stream_states": streams and tuple(each and _load_stream(each) for each in streams),
    }
    return ResumeState(**found)


def _check_checksum(own: Mapping[Any, Any]) -> None:
    found = state_checksum({key: value for key, value in own.items() if key != "checksum"})
    if own.get("checksum") != found:
        raise ValueError(
            f"load_state_dict got a state with checksum={_short(own.get('checksum'))}, but its "
            f"content has the checksum {found}. The state or its file was altered or is "
            "incomplete. Load an earlier checkpoint, or start a new epoch with load_state_dict({})"
        )


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _item(value: Any) -> Any:
    """Return a scalar of numpy as a number: both have the same checksum."""
    return value.item() if isinstance(value, np.generic) else value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(_item, values))


def _dump_draws(draws: Draws) -> dict[str, Any]:
    _, keys, place, has_gauss, gauss = draws.numpys
    version, words, python_gauss = draws.pythons
    return {
        "torch": _dump_tensor(draws.torchs),
        "numpy": [_dump_bytes(keys.tobytes()), int(place), int(has_gauss), float(gauss)],
        "python": [version, _dump_bytes(array("I", words).tobytes()), python_gauss],
        "own": {name: _dump_tensor(state) for name, state in draws.own.items()},
    }


def _load_draws(plain: Mapping[str, Any]) -> Draws:
    keys, *place_and_gauss = plain["numpy"]
    version, words, gauss = plain["python"]
    return Draws(
        _load_tensor(plain["torch"]),
        ("MT19937", np.frombuffer(_load_bytes(keys), np.uint32), *place_and_gauss),
        (version, tuple(array("I", _load_bytes(words))), gauss),
        {name: _load_tensor(state) for name, state in plain["own"].items()},
    )


def _dump_stream(state: StreamState) -> dict[str, Any]:
    return {**vars(state), "generators": _dump_draws(state.generators)}


def _load_stream(plain: Mapping[str, Any]) -> StreamState:
    found = {key: _item(value) for key, value in plain.items()}
    return StreamState(**{**found, "generators": _load_draws(plain["generators"])})


def _dump_tensor(state: torch.Tensor) -> str:
    return _dump_bytes(state.numpy().tobytes())


def _load_tensor(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(_load_bytes(text)), np.uint8))


def _dump_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _load_bytes(text: str) -> bytes:
    return base64.b64decode(text)
