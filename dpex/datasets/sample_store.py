"""Store of samples on one node, mapped into the memory of all processes that read it.

The store is an LMDB environment: one writer at a time, and readers that never wait. A transaction
is atomic, even if a process is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import struct
import threading
import time
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
import xxhash

from dpex.datasets.locks import lock_for
from dpex.datasets.node_memory import memory, one_at_a_time
from dpex.private_directory import check_way, make_private
from dpex.wire.machine import boot_id
from dpex.wire.pickling import Pickled, dump_in_band, load

__all__ = ["MEMORY", "SampleStore", "keep_for_good", "open_store"]

MEMORY = "cache"
"""The ``kind`` of a job's samples in ``node_memory``."""

logger = logging.getLogger("dpex")

# Version of the format of the values; each version has its own files.
_FORMAT = 1
_LENGTH = struct.Struct("<I")
# Big-endian: keys sort by index.
_INDEX = struct.Struct(">q")
# Space for transactions beside the samples; this is address space, not memory.
_SLACK_BYTES = 64 << 20
_MAX_READERS = 4096
# A full store evicts the samples of an owner that was not used for this long. If it cannot make
# space, it refuses further samples of the owner for the same time.
_STALE_S = 60.0
_TOUCH_S = 10.0
_SYNC_S = 5.0
# Number of the last transaction if nothing has been written.
_NOTHING = "0"

# LMDB allows one environment for a directory in a process, and none that a fork inherits.
_open: dict[Path, SampleStore] = {}
os.register_at_fork(after_in_child=_open.clear)


def open_store(directory: Path, max_bytes: int) -> SampleStore:
    """Return this process's store for a directory.

    Raises:
        PermissionError: The directory belongs to another user, or others can write to it.
    """
    check_way(directory)
    directory = directory.resolve()
    with lock_for(directory):
        if directory not in _open:
            _open[directory] = SampleStore(directory, max_bytes)
        store = _open[directory]
        store.grow(max_bytes)
    return store


def keep_for_good(directory: Path) -> None:
    """Flush a directory's samples to disk, whichever process wrote them, if there are any."""
    if (directory / f"v{_FORMAT}").is_dir():
        with contextlib.suppress(OSError, lmdb.Error):
            open_store(directory, max_bytes=1)._sync()


class SampleStore:
    """Samples by owner and index, in a directory that only this user can write to.

    Args:
        directory: A directory on a local disk or in memory, created if it does not exist.
        max_bytes: Maximum size of the samples.

    Raises:
        PermissionError: The directory belongs to another user, or others can write to it.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        # Samples in memory do not survive a reboot, so they need not be flushed to disk.
        self._lasting = memory(MEMORY).resolve() not in directory.parents
        make_private(directory, readable=True)
        self._refused_at: dict[bytes, float] = {}
        self._touched: dict[bytes, float] = {}
        self._wrote_at: float | None = None
        with one_at_a_time(directory):
            try:
                self._environment = self._opened()
                if self._lasting and self._may_be_damaged():
                    self._environment.close()
                    self._restart()
            except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError):
                self._restart()
        self._environment.reader_check()  # frees the reader slots of killed processes
        self._samples = self._environment.open_db(b"samples")

    def _restart(self) -> None:
        shutil.rmtree(self._directory / f"v{_FORMAT}", ignore_errors=True)
        self._environment = self._opened()

    def _opened(self) -> Any:
        files = self._directory / f"v{_FORMAT}"
        make_private(files, readable=True)
        files.chmod(0o700)  # all users may be able to read the parent directory
        return lmdb.open(
            str(files),
            map_size=self._map_bytes,
            max_readers=_MAX_READERS,
            max_dbs=1,
            mode=0o600,
            # Safe if a process dies. _sync() covers the failure of the machine.
            sync=False,
            metasync=False,
            readahead=False,
            meminit=False,
        )

    @property
    def _map_bytes(self) -> int:
        return self._max_bytes + self._max_bytes // 8 + _SLACK_BYTES

    def _may_be_damaged(self) -> bool:
        """Return whether the machine may have failed before all samples were on its disk."""
        boot, last = boot_id() or "unknown", str(self._environment.info()["last_txnid"])
        try:
            noted_boot, noted = self._note.read_text().split()
        except (OSError, ValueError):
            noted_boot = noted = _NOTHING
        if noted_boot == boot:
            return False
        self._write_note(boot, last if noted == last else _NOTHING)
        return noted != last

    def _sync(self) -> None:
        """Flush the store to disk, unless it is in memory, and record the last transaction."""
        self._wrote_at = None
        if self._lasting:
            last = self._environment.info()["last_txnid"]
            self._environment.sync(True)
            self._write_note(boot_id() or "unknown", str(last))

    @property
    def _note(self) -> Path:
        """File with the machine's boot id and the last transaction that is on disk."""
        return self._directory / "synced"

    def _write_note(self, boot: str, last: str) -> None:
        aside = self._directory / f"synced.{os.getpid()}.{threading.get_ident()}"
        with contextlib.suppress(OSError):  # full disk: the next reboot discards the samples
            aside.write_text(f"{boot} {last}")
            aside.replace(self._note)

    def grow(self, max_bytes: int) -> None:
        """Raise the maximum size to ``max_bytes`` if that is larger: the largest limit applies."""
        if max_bytes > self._max_bytes:
            self._max_bytes = max_bytes
            self._environment.set_mapsize(self._map_bytes)

    def get(self, owner: bytes, index: Any) -> tuple[bool, Any]:
        """Return whether the store has a sample, and a copy of the sample or None.

        Args:
            owner: Fingerprint of the dataset that makes the sample.
            index: Index of the sample in the dataset.
        """
        self._touch(owner)
        if self._wrote_at is not None and time.monotonic() - self._wrote_at > _SYNC_S:
            self._sync()
        try:
            with self._transaction(buffers=True) as transaction:
                value = transaction.get(_key(owner, index))
                return (False, None) if value is None else (True, _decoded(value))
        except Exception as error:  # an unreadable sample is a cache miss
            logger.warning(
                "a cached sample cannot be read, so dpex recomputes it: %s: %s",
                type(error).__name__,
                error,
            )
            return False, None

    def _transaction(self, **options: bool) -> Any:
        try:
            return self._environment.begin(self._samples, **options)
        except lmdb.MapResizedError:  # a process with a larger limit resized the map
            self._environment.set_mapsize(0)
            return self._environment.begin(self._samples, **options)

    def put(self, owner: bytes, index: Any, pickled: Pickled) -> None:
        """Store a sample, if there is space or if evicting others makes space."""
        now = time.monotonic()
        if now - self._refused_at.get(owner, -_STALE_S) < _STALE_S:
            return
        value = _encoded(pickled)
        if len(value) > self._max_bytes:
            return  # it would evict all other samples
        reason = f"max_bytes={self._max_bytes:,}"
        try:
            with self._transaction(write=True) as transaction:
                if self._make_space(transaction, owner, len(value)):
                    transaction.put(_key(owner, index), value)
                    self._wrote_at = now
                    return
        except (lmdb.Error, OSError) as error:  # most likely, the disk is full
            reason = str(error)
        self._refused_at[owner] = now
        logger.warning(
            "the sample cache is full (%s). It keeps its samples, and dpex recomputes the others. "
            "Raise max_bytes, or cache in a directory with more space",
            reason,
        )

    def _make_space(self, transaction: Any, owner: bytes, size: int) -> bool:
        """Evict samples of stale owners until there is space; return whether there is."""
        stale: bytes | None = None
        with transaction.cursor() as cursor:
            while not self._fits(self._used_bytes(transaction), size):
                if stale is None or not cursor.set_range(stale) or cursor.key()[:16] != stale:
                    stale = self._stale_owner(transaction, owner)
                    if stale is None or not cursor.set_range(stale):
                        return False
                cursor.delete()
        return True

    def _fits(self, used: int, size: int) -> bool:
        if not self._lasting:
            # Use at most half of the free memory: Ray's object store and other jobs need it too.
            disk = os.statvfs(self._directory)
            free = disk.f_bavail * disk.f_frsize
            if used + size > (used + free) // 2:
                return False
        return used + size <= self._max_bytes

    def _used_bytes(self, transaction: Any) -> int:
        found = transaction.stat(self._samples)
        pages = found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]
        return int(pages * found["psize"])

    def _stale_owner(self, transaction: Any, owner: bytes) -> bytes | None:
        """Return another owner that was not used for ``_STALE_S``, or None."""
        now = time.time()
        with transaction.cursor() as cursor:
            found = cursor.first()
            while found:
                other = bytes(cursor.key()[:16])
                try:
                    idle_s = now - self._mark(other).stat().st_mtime
                except OSError:
                    idle_s = float("inf")
                if other != owner and idle_s > _STALE_S:
                    return other
                found = cursor.set_range(other + b"\xff" * 17)
        return None

    def _mark(self, owner: bytes) -> Path:
        """Return the file whose modification time is the time of an owner's last use."""
        return self._directory / f"used-{owner.hex()}"

    def _touch(self, owner: bytes) -> None:
        """Record that an owner is in use, at most once in ``_TOUCH_S``."""
        now = time.monotonic()
        if now - self._touched.get(owner, -_TOUCH_S) >= _TOUCH_S:
            self._touched[owner] = now
            with contextlib.suppress(OSError):  # a full disk
                self._mark(owner).touch()

    def size(self) -> tuple[int, int]:
        """Return the number of samples of all processes, and their size in bytes."""
        with self._transaction() as transaction:
            return int(transaction.stat(self._samples)["entries"]), self._used_bytes(transaction)


def _key(owner: bytes, index: Any) -> bytes:
    scalar = isinstance(index, torch.Tensor | np.ndarray) and not index.shape
    number = index.item() if scalar else index
    with contextlib.suppress(struct.error):
        if isinstance(number, int | np.integer) and not isinstance(number, bool):
            return owner + _INDEX.pack(number)
    # Any other index that a sampler yields.
    return owner + xxhash.xxh3_128_digest(dump_in_band(index, "index"))


def _encoded(pickled: Pickled) -> bytes:
    """Pack a sample: length of the header, header, buffers."""
    sizes = [buffer.nbytes for buffer in pickled.buffers]
    header = pickle.dumps((pickled.head, sizes, pickled.slots), protocol=5)
    return b"".join([_LENGTH.pack(len(header)), header, *(b.data for b in pickled.buffers)])


def _decoded(value: memoryview) -> Any:
    """Unpack a sample."""
    start = _LENGTH.size + _LENGTH.unpack_from(value)[0]
    head, sizes, slots = pickle.loads(value[_LENGTH.size : start])
    buffers = []
    for size in sizes:
        buffers.append(np.frombuffer(value, np.uint8, size, start))
        start += size
    return load(Pickled(head, buffers, *slots))
