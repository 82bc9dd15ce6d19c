"""Descriptors for semaphores, so that processes that are not forks can map them.

Under the start method ``fork``, multiprocessing unlinks a semaphore when it creates it. Children
inherit the memory, and no other process can open it. As long as no other process maps the memory,
this module can replace it with the memory of a file that has a descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
from pathlib import Path

from dpex.wire.memory_map import Span, spans

__all__ = ["move_to_memory_file"]

# From mman.h of Linux.
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
# Longer than the critical section takes.
_NO_SWITCH_S = 60.0


def move_to_memory_file(span: Span) -> int | None:
    """Replace the memory of a semaphore with the memory of an unnamed file.

    The address does not change, so all references in this process stay valid.

    Args:
        span: The mapping that the semaphore is in.

    Returns:
        A descriptor of the file, which the caller owns. None if the memory cannot be replaced.
        That is so if a thread waits for the semaphore or another process maps it. It is also so
        if dpex does not know a semaphore's layout for this Python and its C library.
    """
    size = span.end - span.start
    if not _layout_is_known() or size != mmap.PAGESIZE or not span.shared or _others_map(span):
        return None
    # Functions that are called through PyDLL keep the GIL.
    libc = ctypes.PyDLL(None)
    for function, arguments in (
        (libc.mmap, (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)),
        (libc.mremap, (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)),
    ):
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *arguments]
    descriptor = os.memfd_create("dpex-semaphore")
    moved = False
    interval = sys.getswitchinterval()
    try:
        os.ftruncate(descriptor, size)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        # A second mapping of the old page.
        old = libc.mremap(span.start, 0, size, _MREMAP_MAYMOVE, None)
        if old in {None, _FAILED}:
            return None
        with mmap.mmap(descriptor, size) as new:
            # Another Python thread hardly ever runs before the memory is replaced. The comparison
            # below detects its changes. The semaphore counts threads that wait without the GIL.
            sys.setswitchinterval(_NO_SWITCH_S)
            content = ctypes.string_at(span.start, size)
            if not _waiters(content):
                new[:] = content
                flags = mmap.MAP_SHARED | _MAP_FIXED
                exchanged = libc.mmap(span.start, size, protection, flags, descriptor, 0)
                moved = exchanged == span.start and ctypes.string_at(old, size) == content
                if exchanged == span.start and not moved:
                    # A thread has started to wait: restore the page that it waits on.
                    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
                    libc.mremap(old, size, size, flags, span.start)
                    old = None
        if old is not None:
            libc.munmap(ctypes.c_void_p(old), ctypes.c_size_t(size))
        return descriptor if moved else None
    finally:
        sys.setswitchinterval(interval)
        if not moved:
            os.close(descriptor)


def _layout_is_known() -> bool:
    """Return whether this is glibc with 64-bit semaphores, and Python with the GIL."""
    has_gil: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
    wide = sys.maxsize > 1 << 32 and sys.byteorder == "little"
    return has_gil and wide and platform.libc_ver()[0] == "glibc"


def _waiters(content: bytes) -> int:
    """Return the number of waiting threads, as a semaphore of glibc counts them."""
    return int.from_bytes(content[4:8], sys.byteorder)


def _others_map(span: Span) -> bool:
    """Return whether another process maps the same memory, or its mappings cannot be read.

    Only forks of this process can map it. They start later, and belong to the same user.
    """
    own = Path("/proc/self").resolve()
    born = _start_time(own)
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or directory == own:
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if directory.stat().st_uid != os.getuid() or _start_time(directory) < born:
                continue
            try:
                if any(s.file == span.file for s in spans(int(directory.name))):
                    return True
            except PermissionError:
                return True
    return False


def _start_time(process: Path) -> int:
    """Return the start time of a process, in clock ticks since the machine booted."""
    # "pid (name) state ...": the name may contain spaces and brackets.
    return int((process / "stat").read_text().rpartition(")")[2].split()[19])
