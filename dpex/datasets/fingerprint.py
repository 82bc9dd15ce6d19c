"""Fingerprint of a dataset and of the code that makes its samples.

If dpex cannot tell whether two datasets are the same, their fingerprints differ.
"""

from __future__ import annotations

import pickletools
import platform
import re
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import xxhash

from dpex.datasets.built_on_node import KEY_PREFIX
from dpex.datasets.code_behind import code_behind, imports_in
from dpex.datasets.node_memory import job_name
from dpex.wire.classes_by_value import class_keys
from dpex.wire.pickling import Pickled, dump

__all__ = ["fingerprint"]

# Pickle opcodes whose argument is a string, which may be the name of a module.
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "GLOBAL"}


def fingerprint(obj: Any, version: str) -> bytes:
    """Return a digest of an object's contents and its code, in 16 bytes.

    The contents are the object's pickle. The code is the code of every module that the pickle names
    and of the modules that they import; see ``code_behind``.

    Args:
        obj: An object that can be pickled.
        version: A string that distinguishes objects with the same contents and code.
    """
    pickled = dump(obj, "dataset")
    digest = xxhash.xxh3_128(f"{platform.python_version()} {torch.__version__} {version}".encode())
    digest.update(Pickled(_without_names(pickled.head), pickled.buffers).digest.encode())
    for name, code in code_behind(_modules_named_in(pickled.head)):
        digest.update(f"{name} {len(code)} ".encode())
        digest.update(code)
    return digest.digest()


def _without_names(stream: bytes) -> bytes:
    """Remove the names that differ from job to job from a pickle.

    These are the job's name, the keys of ``on_node``, and the ids that cloudpickle and dpex give to
    classes that they pickle by value. Names of a kind have the same length, so the lengths in the
    pickle do not change.
    """
    # If a later cloudpickle renames this dict, such a class differs in every process: a cache miss.
    classes = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", ())
    for name in (job_name(), *classes, *class_keys()):
        stream = stream.replace(name.encode(), b"")
    return re.sub(KEY_PREFIX.encode() + b"[0-9a-f]{32}", b"", stream)


def _modules_named_in(stream: bytes) -> set[str]:
    names = {
        str(argument).partition(" ")[0]
        for opcode, argument, _ in pickletools.genops(stream)
        if opcode.name in _STRINGS
    }
    # A function of the script is pickled by value, and may import modules when it is called.
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    module = getattr(getattr(main, "__spec__", None), "name", "__main__")  # set by python -m
    late = imports_in(Path(script), module) if script else set()
    # Its pickle has the names of its import statements: dotted, in parts, or without the package.
    late = {name for name in late if name in names or name.rpartition(".")[2] in names}
    return (names & sys.modules.keys()) | late
