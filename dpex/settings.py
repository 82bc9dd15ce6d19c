"""What a worker process takes over from the training process when an iteration begins.

torch forks its workers at ``iter()``, so they see what the training process has set by then.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Settings", "remember_environment"]

# Ray's own variables, and ours, are not the user's. Each process has its own.
_OURS = ("RAY_", "DPEX_")
_UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)

# In the training process: the environment that the processes of its Ray have inherited.
_inherited: dict[str, str] | None = None
# In a worker process: what the variables were that an iteration has changed.
_original: dict[str, str | None] = {}


def remember_environment() -> None:
    """Note that processes start now which inherit this process's environment."""
    global _inherited
    _inherited = dict(os.environ)


@dataclass(frozen=True)
class Settings:
    """Settings of the training process.

    Attributes:
        working_directory: The workers', too, where they have it.
        default_dtype: torch's.
        grad_enabled: Whether operations are recorded for autograd.
        inference_mode: Whether ``torch.inference_mode()`` holds.
        environment: Variables that have changed since Ray was started; None of one that has gone.
        umask: The mode bits that new files do not get; None where the system does not say.
    """

    working_directory: str
    default_dtype: torch.dtype
    grad_enabled: bool = True
    inference_mode: bool = False
    environment: tuple[tuple[str, str | None], ...] = ()
    umask: int | None = None

    @classmethod
    def now(cls) -> Settings:
        """Return this thread's and this process's."""
        return cls(
            working_directory=str(Path.cwd()),
            default_dtype=torch.get_default_dtype(),
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            environment=_changes(),
            umask=_umask() if _inherited is not None else None,
        )

    def take_over(self) -> None:
        """Give them to this process, but for those that ``gradients`` gives to its thread."""
        if torch.get_default_dtype() is not self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        with contextlib.suppress(OSError):  # a node without that directory
            os.chdir(self.working_directory)
        if self.umask is not None:
            os.umask(self.umask)
        if self.environment or _original:
            changed = dict(self.environment)
            for name in {*changed, *_original}:
                _original.setdefault(name, os.environ.get(name))
                _set(name, changed[name] if name in changed else _original[name])

    def gradients(self) -> AbstractContextManager[None]:
        """Record operations for autograd as the training process does."""
        modes = self.grad_enabled, self.inference_mode
        if modes == (torch.is_grad_enabled(), torch.is_inference_mode_enabled()):
            return contextlib.nullcontext()  # as for nearly every batch
        return self._other_gradients()

    @contextlib.contextmanager
    def _other_gradients(self) -> Iterator[None]:
        with torch.inference_mode(self.inference_mode), torch.set_grad_enabled(self.grad_enabled):
            yield


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _changes() -> tuple[tuple[str, str | None], ...]:
    if _inherited is None:
        return ()
    names = {n for n in {*_inherited, *os.environ} if _inherited.get(n) != os.environ.get(n)}
    return tuple((n, os.environ.get(n)) for n in sorted(names) if not n.startswith(_OURS))


def _umask() -> int | None:
    with contextlib.suppress(OSError):
        found = _UMASK.search(Path("/proc/self/status").read_text())
        return int(found[1], 8) if found else None
    return None
