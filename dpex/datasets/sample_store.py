"""Samples on one node, mapped into the memory of all processes that read them.

An LMDB environment: one writer at a time, readers that never wait, and a transaction that either
happened or did not, whenever a process is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import shutil
import stat
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import xxhash

from dpex.pickling import Pickled, dump_in_band, load

__all__ = ["SampleStore", "forget_memory", "memory_directory", "open_store"]

logger = logging.getLogger("dpex")

_CHECKSUM, _LENGTH, _SECONDS = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct("<d")
# In the order of the numbers.
_INDEX = struct.Struct(">q")
# Address space, not memory: what a transaction needs beside the samples.
_SLACK_BYTES = 64 << 20
_MAX_READERS = 4096
# Whose samples were not used for so long may go when there is no more room.
_STALE_S = 60.0
_TOUCH_S = 10.0
_IN_USE = "in-use"

_open: dict[Path, tuple[int, SampleStore]] = {}


def open_store(directory: Path, max_bytes: int) -> SampleStore:
    """Return this process's store in a directory.

    Raises:
        PermissionError: The directory is another user's, or others can write to it.
    """
    pid, store = _open.get(directory, (0, None))
    if store is None or pid != os.getpid():
        if store is not None:
            store.close()  # the parent's, which a fork must not read
        store = SampleStore(directory, max_bytes)
        _open[directory] = (os.getpid(), store)
    return store


def memory_directory(job: str) -> Path:
    """Return where a job keeps samples in memory, and remove those of jobs that have ended."""
    base = _memory()
    _make_private(base)
    for other in base.iterdir():
        if other.name != job:
            _remove_unused(other)
    return base / job


def forget_memory(job: str) -> None:
    """Remove what a job keeps in memory, unless another process uses it."""
    directory = _memory() / job
    _, own = _open.pop(directory, (0, None))
    if own is not None:
        own.close()
    _remove_unused(directory)


def _memory() -> Path:
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return base / f"dpex-cache-{os.getuid()}"


class SampleStore:
    """Samples by owner and index, in a directory that is this user's alone.

    Args:
        directory: Made if it is missing.
        max_bytes: What the samples may take.

    Raises:
        PermissionError: The directory is another user's, or others can write to it.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        _make_private(directory)
        self._max_bytes = max_bytes
        # Memory does not outlive what could tear it.
        self._lasting = _memory() not in directory.parents
        # Held as long as this process and its forks live, so that nobody removes the directory.
        self._in_use = (directory / _IN_USE).open("w")
        fcntl.flock(self._in_use, fcntl.LOCK_SH)
        self._full: set[bytes] = set()
        self._touched: dict[bytes, float] = {}
        try:
            self._environment = self._opened(directory)
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError):
            # After a power failure, perhaps: what it held can be made again.
            for file in ("data.mdb", "lock.mdb"):
                (directory / file).unlink(missing_ok=True)
            self._environment = self._opened(directory)
        self._environment.reader_check()  # of processes that were killed
        self._samples = self._environment.open_db(b"samples")
        self._last_uses = self._environment.open_db(b"last uses")

    def _opened(self, directory: Path) -> Any:
        return lmdb.open(
            str(directory),
            map_size=self._max_bytes + self._max_bytes // 8 + _SLACK_BYTES,
            max_readers=_MAX_READERS,
            max_dbs=2,
            mode=0o600,
            # A process that dies loses nothing by it; a machine that does, what can be made again.
            sync=False,
            metasync=False,
            readahead=False,
            meminit=False,
        )

    def get(self, owner: bytes, index: Any) -> tuple[bool, Any]:
        """Return whether there is a sample, and the sample, in memory of its own.

        Args:
            owner: Fingerprint of what makes it.
            index: Its dataset index.
        """
        self._touch(owner)
        with self._environment.begin(self._samples, buffers=True) as transaction:
            value = transaction.get(_key(owner, index))
            if value is None or (self._lasting and not _is_whole(value)):
                return False, None
            return True, _decoded(value)

    def put(self, owner: bytes, index: Any, pickled: Pickled) -> None:
        """Keep a sample, if there is room or room can be made."""
        if owner in self._full:
            return
        value = _encoded(pickled)
        reason = f"max_bytes={self._max_bytes:,}"
        try:
            with self._environment.begin(self._samples, write=True) as transaction:
                if self._make_room(transaction, owner, len(value)):
                    transaction.put(_key(owner, index), value)
                    return
        except lmdb.Error as error:  # the disk is full, most likely
            reason = str(error)
        self._full.add(owner)
        logger.warning("the sample cache is full: what is not in it is made anew (%s)", reason)

    def _make_room(self, transaction: Any, owner: bytes, size: int) -> bool:
        """Drop samples that nobody has used lately until there is room; False if there is none."""
        stale: bytes | None = None
        with transaction.cursor() as cursor:
            while self._used_bytes(transaction) + size > self._max_bytes:
                if stale is None or not cursor.set_range(stale) or cursor.key()[:16] != stale:
                    stale = self._stale_owner(transaction, owner)
                    if stale is None or not cursor.set_range(stale):
                        return False
                cursor.delete()
        return True

    def _used_bytes(self, transaction: Any) -> int:
        found = transaction.stat(self._samples)
        pages = found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]
        return int(pages * found["psize"])

    def _stale_owner(self, transaction: Any, owner: bytes) -> bytes | None:
        """Return an owner of samples that were not read for a while, if there is one."""
        now = time.time()
        with transaction.cursor() as cursor:
            found = cursor.first()
            while found:
                other = bytes(cursor.key()[:16])
                last_use = transaction.get(other, db=self._last_uses)
                if other != owner and (
                    last_use is None or now - _SECONDS.unpack(last_use)[0] > _STALE_S
                ):
                    return other
                found = cursor.set_range(other + b"\xff" * 17)
        return None

    def _touch(self, owner: bytes) -> None:
        """Note, from time to time, that an owner's samples are in use."""
        now = time.time()
        if now - self._touched.get(owner, 0.0) > _TOUCH_S:
            self._touched[owner] = now
            writing = self._environment.begin(self._last_uses, write=True)
            with contextlib.suppress(lmdb.Error), writing as transaction:
                transaction.put(owner, _SECONDS.pack(now))

    def close(self) -> None:
        """Let go of the directory; nothing can be read any more."""
        self._environment.close()
        self._in_use.close()

    def size(self) -> tuple[int, int]:
        """Return how many samples it holds, whoever made them, and their bytes."""
        with self._environment.begin() as transaction:
            return int(transaction.stat(self._samples)["entries"]), self._used_bytes(transaction)


def _key(owner: bytes, index: Any) -> bytes:
    try:
        return owner + _INDEX.pack(index)
    except struct.error:  # whatever else a sampler may yield
        return owner + xxhash.xxh3_128_digest(dump_in_band(index, "index"))


def _encoded(pickled: Pickled) -> bytes:
    """Pack a sample: checksum, length of the header, header, buffers."""
    sizes = [buffer.nbytes for buffer in pickled.buffers]
    slots = pickled.tensor_slots, pickled.image_slots
    header = pickle.dumps((pickled.head, sizes, slots), protocol=5)
    content = b"".join([_LENGTH.pack(len(header)), header, *(b.data for b in pickled.buffers)])
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content)) + content


def _is_whole(value: memoryview) -> bool:
    """Tell whether a sample is as it was packed."""
    content = value[_CHECKSUM.size :]
    return bool(xxhash.xxh3_64_intdigest(content) == _CHECKSUM.unpack_from(value)[0])


def _decoded(value: memoryview) -> Any:
    """Unpack a sample."""
    content = value[_CHECKSUM.size :]
    start = _LENGTH.size + _LENGTH.unpack_from(content)[0]
    head, sizes, slots = pickle.loads(content[_LENGTH.size : start])
    buffers = []
    for size in sizes:
        buffers.append(np.frombuffer(content, np.uint8, size, start))
        start += size
    return load(Pickled(head, buffers, *slots))


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"the sample cache {directory} must be a directory of this user alone: what lies in it "
            "is unpickled"
        )


def _remove_unused(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / _IN_USE).open("w") as in_use:
        fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
