"""Samples on one node, mapped into the memory of all processes that read them.

An LMDB environment: one writer at a time, readers that never wait, and a transaction that either
happened or did not, whenever a process is killed.
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

from dpex.datasets.node_memory import claim, forget, make_private, memory, one_at_a_time
from dpex.wire.pickling import Pickled, dump_in_band, load

__all__ = ["MEMORY", "SampleStore", "forget_memory", "keep_for_good", "open_store"]

MEMORY = "cache"
"""What a job's samples are called among what it keeps in a node's memory."""

logger = logging.getLogger("dpex")

# Of the values; with another one come other files.
_FORMAT = 1
_LENGTH = struct.Struct("<I")
# In the order of the numbers.
_INDEX = struct.Struct(">q")
# Address space, not memory: what a transaction needs beside the samples.
_SLACK_BYTES = 64 << 20
_MAX_READERS = 4096
# Whose samples were not used for so long may go when there is no more room; and what was refused
# is tried again.
_STALE_S = 60.0
_TOUCH_S = 10.0
_SYNC_S = 5.0
# The number of the last transaction where there was none.
_NOTHING = "0"

_open: dict[Path, tuple[int, SampleStore]] = {}


def open_store(directory: Path, max_bytes: int) -> SampleStore:
    """Return this process's store in a directory.

    Raises:
        PermissionError: The directory is another user's, or others can write to it.
    """
    directory = directory.resolve()
    pid, store = _open.get(directory, (0, None))
    if store is None or pid != os.getpid():
        if store is not None:
            store.close()  # the parent's, which a fork must not read
        store = SampleStore(directory, max_bytes)
        _open[directory] = (os.getpid(), store)
    store.grow(max_bytes)
    return store


def forget_memory(job: str) -> None:
    """Remove what a job keeps in memory, unless another process goes on using it."""
    _, own = _open.pop((memory(MEMORY) / job).resolve(), (0, None))
    if own is not None:
        own.close()
    forget(MEMORY, job)


def keep_for_good(directory: Path) -> None:
    """Have what lies in a directory on the disk, whoever wrote it; nothing where there is none."""
    if (directory / f"v{_FORMAT}").is_dir():
        with contextlib.suppress(OSError, lmdb.Error):
            open_store(directory, max_bytes=1)._sync()


class SampleStore:
    """Samples by owner and index, in a directory that is this user's alone.

    Args:
        directory: On a disk of this host; made if it is missing.
        max_bytes: What the samples may take.

    Raises:
        PermissionError: The directory is another user's, or others can write to it.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        # What lies in memory does not outlive the machine, so it need not be written to a disk.
        self._lasting = memory(MEMORY).resolve() not in directory.parents
        self._in_use = claim(directory)
        self._refused_at: dict[bytes, float] = {}
        self._touched: dict[bytes, float] = {}
        self._wrote_at: float | None = None
        with one_at_a_time(directory):
            try:
                self._environment = self._opened()
                if self._lasting and self._may_be_damaged():
                    self._environment.close()
                    self._begin_anew()
            except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError):
                self._begin_anew()
        self._environment.reader_check()  # of processes that were killed
        self._samples = self._environment.open_db(b"samples")

    def _begin_anew(self) -> None:
        shutil.rmtree(self._directory / f"v{_FORMAT}", ignore_errors=True)
        self._environment = self._opened()

    def _opened(self) -> Any:
        files = self._directory / f"v{_FORMAT}"
        make_private(files)
        files.chmod(0o700)  # its user may have made the directory around it, for all to read
        return lmdb.open(
            str(files),
            map_size=self._map_bytes,
            max_readers=_MAX_READERS,
            max_dbs=1,
            mode=0o600,
            # A process that dies loses nothing by it; for a machine that does, see _sync().
            sync=False,
            metasync=False,
            readahead=False,
            meminit=False,
        )

    @property
    def _map_bytes(self) -> int:
        return self._max_bytes + self._max_bytes // 8 + _SLACK_BYTES

    def _may_be_damaged(self) -> bool:
        """Tell whether the machine may have died before all was on its disk."""
        boot, last = _boot_id(), str(self._environment.info()["last_txnid"])
        try:
            noted_boot, noted = self._note.read_text().split()
        except (OSError, ValueError):
            noted_boot = noted = _NOTHING
        if noted_boot == boot:
            return False
        self._write_note(boot, last if noted == last else _NOTHING)
        return noted != last

    def _sync(self) -> None:
        """Have all that was written on the disk, and note how far that is."""
        self._wrote_at = None
        if self._lasting:
            last = self._environment.info()["last_txnid"]
            self._environment.sync(True)
            self._write_note(_boot_id(), str(last))

    @property
    def _note(self) -> Path:
        """The file that says in which run of the machine, and how far, all was on its disk."""
        return self._directory / "synced"

    def _write_note(self, boot: str, last: str) -> None:
        aside = self._directory / f"synced.{os.getpid()}.{threading.get_ident()}"
        with contextlib.suppress(OSError):  # a full disk; what is not noted is not believed
            aside.write_text(f"{boot} {last}")
            aside.replace(self._note)

    def grow(self, max_bytes: int) -> None:
        """Let the samples take as much as the loader that allows most."""
        if max_bytes > self._max_bytes:
            self._max_bytes = max_bytes
            self._environment.set_mapsize(self._map_bytes)

    def get(self, owner: bytes, index: Any) -> tuple[bool, Any]:
        """Return whether there is a sample, and the sample, in memory of its own.

        Args:
            owner: Fingerprint of what makes it.
            index: Its dataset index.
        """
        self._touch(owner)
        if self._wrote_at is not None and time.monotonic() - self._wrote_at > _SYNC_S:
            self._sync()
        try:
            with self._transaction(buffers=True) as transaction:
                value = transaction.get(_key(owner, index))
                return (False, None) if value is None else (True, _decoded(value))
        except Exception as error:  # in doubt it is made anew
            logger.warning("a cached sample cannot be read: %s: %s", type(error).__name__, error)
            return False, None

    def _transaction(self, **options: bool) -> Any:
        try:
            return self._environment.begin(self._samples, **options)
        except lmdb.MapResizedError:  # by a process that may keep more
            self._environment.set_mapsize(0)
            return self._environment.begin(self._samples, **options)

    def put(self, owner: bytes, index: Any, pickled: Pickled) -> None:
        """Keep a sample, if there is room or room can be made."""
        now = time.monotonic()
        if now - self._refused_at.get(owner, -_STALE_S) < _STALE_S:
            return
        value = _encoded(pickled)
        if len(value) > self._max_bytes:
            return  # it would drive all others out
        reason = f"max_bytes={self._max_bytes:,}"
        try:
            with self._transaction(write=True) as transaction:
                if self._make_room(transaction, owner, len(value)):
                    transaction.put(_key(owner, index), value)
                    self._wrote_at = now
                    return
        except (lmdb.Error, OSError) as error:  # the disk is full, most likely
            reason = str(error)
        self._refused_at[owner] = now
        logger.warning("the sample cache is full: what is not in it is made anew (%s)", reason)

    def _make_room(self, transaction: Any, owner: bytes, size: int) -> bool:
        """Drop samples that nobody has used lately until there is room; False if there is none."""
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
            # Ray's object store, and other jobs, need the memory too.
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
        """Return an owner of samples that were not read for a while, if there is one."""
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
        """Return the file whose time is that of an owner's last use."""
        return self._directory / f"used-{owner.hex()}"

    def _touch(self, owner: bytes) -> None:
        """Note, from time to time, that an owner's samples are in use."""
        now = time.monotonic()
        if now - self._touched.get(owner, -_TOUCH_S) >= _TOUCH_S:
            self._touched[owner] = now
            with contextlib.suppress(OSError):  # a full disk
                self._mark(owner).touch()

    def close(self) -> None:
        """Let go of the directory; nothing can be read any more."""
        self._environment.close()
        self._in_use.close()

    def size(self) -> tuple[int, int]:
        """Return how many samples it holds, whoever made them, and their bytes."""
        with self._transaction() as transaction:
            return int(transaction.stat(self._samples)["entries"]), self._used_bytes(transaction)


def _key(owner: bytes, index: Any) -> bytes:
    whole = isinstance(index, int | np.integer) or (
        isinstance(index, torch.Tensor | np.ndarray) and not index.shape
    )
    with contextlib.suppress(struct.error):
        if whole:
            return owner + _INDEX.pack(int(index))
    # Whatever else a sampler may yield.
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


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
