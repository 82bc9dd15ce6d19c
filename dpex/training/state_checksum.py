"""Checksum of a resume state, which shows that a state or its file was altered.

The checksum is the SHA-256 of the state's content, so two states with equal content have equal
checksums. The content stays the same if a state is copied, pickled, saved by ``torch.save``, or
written as JSON:

- The order of a dict's keys does not count, and a key counts as the text that JSON makes of it.
- Lists and tuples are equal, and so are a number and a numpy scalar of its value.
- Tensors and numpy arrays count with dtype, shape and elements, wherever a tensor is stored.
- Of any other object, which only a sampler or a dataset can have put into the state, only the name
  of its class counts. Its pickle may change from one copy to the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["state_checksum"]


def state_checksum(state: Any) -> str:
    """Return the checksum of a state, as 64 hexadecimal digits."""
    return _digest(state, ()).hex()


def _digest(value: Any, outer: tuple[int, ...]) -> bytes:
    """Return the SHA-256 of one value.

    Args:
        value: The value.
        outer: Identities of the containers around the value, which a cycle would meet again.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if id(value) in outer:
        return _hashed("cycle")
    inner = (*outer, id(value))
    if value is None or isinstance(value, bool):
        return _hashed("constant", _key(value))
    if isinstance(value, int):
        return _hashed("int", f"{int(value):x}".encode())
    if isinstance(value, float):
        return _hashed("float", float.hex(value).encode())
    if isinstance(value, str):
        return _hashed("str", _key(value))
    if isinstance(value, bytes | bytearray):
        return _hashed("bytes", value)
    if isinstance(value, Mapping):
        items = sorted((_key(key), _digest(each, inner)) for key, each in value.items())
        return _hashed("dict", *(part for item in items for part in item))
    if isinstance(value, list | tuple):
        return _hashed("list", *(_digest(each, inner) for each in value))
    if isinstance(value, set | frozenset):
        return _hashed("set", *sorted(_digest(each, inner) for each in value))
    if type(value) is np.ndarray:
        head = str((value.dtype.str, value.shape)).encode()
        content = _digest(value.tolist(), inner) if value.dtype.hasobject else value.tobytes()
        return _hashed("array", head, content)
    if _is_plain_tensor(value):
        resolved = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        elements = resolved.reshape(-1).view(torch.uint8).numpy()
        return _hashed("tensor", str((value.dtype, tuple(value.shape))).encode(), elements.data)
    return _hashed("object", type(value).__qualname__.encode())


def _is_plain_tensor(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta)
    )


def _key(key: Any) -> bytes:
    """Return the text that JSON makes of a dict's key."""
    if isinstance(key, str):
        return str.encode(key, "utf-8", "surrogatepass")
    if key is None or isinstance(key, bool):
        return {None: b"null", True: b"true", False: b"false"}[key]
    if isinstance(key, int):
        return int.__repr__(key).encode()
    if isinstance(key, float):
        return float.__repr__(key).encode()
    return _digest(key, ())


def _hashed(kind: str, *parts: bytes | bytearray | memoryview) -> bytes:
    found = hashlib.sha256(kind.encode())
    for part in parts:
        found.update(b"%d:" % len(part))
        found.update(part)
    return found.digest()
