"""What stands for a dataset and the code that makes its samples: in doubt, it differs."""

from __future__ import annotations

import functools
import os
import pickletools
import platform
import re
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import xxhash

from dpex.pickling import Pickled, dump

__all__ = ["fingerprint"]

# Names a string in a pickle's stream.
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "GLOBAL"}


def fingerprint(obj: Any, version: str) -> bytes:
    """Return 16 bytes that stand for an object's contents and its code.

    The contents are those of its pickle. The code is the source of every module that the pickle
    names; what those modules import in turn is not looked at. One that was written to since this
    process began is another one every time.

    Args:
        obj: Whatever can be pickled.
        version: Anything else that matters.
    """
    pickled = dump(obj, "dataset")
    digest = xxhash.xxh3_128(f"{platform.python_version()} {torch.__version__} {version}".encode())
    digest.update(Pickled(_without_class_ids(pickled.head), pickled.buffers).digest.encode())
    for name in sorted(_modules_named_in(pickled.head)):
        digest.update(name.encode())
        digest.update(_code(name))
    return digest.digest()


def _without_class_ids(stream: bytes) -> bytes:
    """Take out the random ids that cloudpickle gives to classes it pickles by value."""
    # Where it keeps them elsewhere one day, such a class is another one in every process: a miss.
    for name in list(getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", ())):
        stream = stream.replace(name.encode(), b"")
    return stream


def _modules_named_in(stream: bytes) -> set[str]:
    names = {
        str(argument).partition(" ")[0]
        for opcode, argument, _ in pickletools.genops(stream)
        if opcode.name in _STRINGS
    }
    return names & sys.modules.keys()


@functools.cache
def _process_start() -> float:
    """Return when this process began, in seconds since the epoch."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = re.search(r"^btime (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)
        assert boot is not None
        return int(boot[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AssertionError):  # not Linux: as far as we know
        return time.time()


def _code(module: str) -> bytes:
    file = getattr(sys.modules[module], "__file__", None)
    if file is None or module == "__main__":  # built in; or pickled by value
        return b""
    path = Path(file)
    try:
        status = path.stat()
        if status.st_mtime > _process_start():
            # What was imported may be what it was before.
            return uuid.uuid4().bytes
        return path.read_bytes() if path.suffix == ".py" else str(status.st_size).encode()
    except OSError:  # inside an archive
        return str(getattr(sys.modules[module], "__version__", "")).encode()
