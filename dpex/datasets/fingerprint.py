"""What stands for a dataset and the code that makes its samples: in doubt, it differs."""

from __future__ import annotations

import pickletools
import platform
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import xxhash

from dpex.datasets.code_behind import code_behind, imports_in
from dpex.datasets.node_memory import job_name
from dpex.wire.pickling import Pickled, dump

__all__ = ["fingerprint"]

# Names a string in a pickle's stream.
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "GLOBAL"}


def fingerprint(obj: Any, version: str) -> bytes:
    """Return 16 bytes that stand for an object's contents and its code.

    The contents are those of its pickle. The code is that of every module that the pickle names,
    and of what those import; ``code_behind`` tells how.

    Args:
        obj: Whatever can be pickled.
        version: Anything else that matters.
    """
    pickled = dump(obj, "dataset")
    digest = xxhash.xxh3_128(f"{platform.python_version()} {torch.__version__} {version}".encode())
    digest.update(Pickled(_without_names(pickled.head), pickled.buffers).digest.encode())
    for name, code in code_behind(_modules_named_in(pickled.head)):
        digest.update(f"{name} {len(code)} ".encode())
        digest.update(code)
    return digest.digest()


def _without_names(stream: bytes) -> bytes:
    """Take out what is another name in every job, all of the same length.

    That is this job's own, and the ids that cloudpickle gives to classes it pickles by value.
    """
    # Where it keeps them elsewhere one day, such a class is another one in every process: a miss.
    classes = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", ())
    for name in (job_name(), *classes):
        stream = stream.replace(name.encode(), b"")
    return stream


def _modules_named_in(stream: bytes) -> set[str]:
    names = {
        str(argument).partition(" ")[0]
        for opcode, argument, _ in pickletools.genops(stream)
        if opcode.name in _STRINGS
    }
    # A function of the script's, which is pickled by value, may import when it is called.
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    module = getattr(getattr(main, "__spec__", None), "name", "__main__")  # python -m
    late = imports_in(Path(script), module) if script else set()
    # Such a function has the names as it says them: one by one, or without the package's.
    late = {name for name in late if name in names or name.rpartition(".")[2] in names}
    return (names & sys.modules.keys()) | late
