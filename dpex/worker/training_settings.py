"""Settings that a worker process takes from the training process when an iteration starts.

torch forks its workers at ``iter()``, so they have the training process's settings of that moment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["InheritedSettings", "Settings"]


@dataclass(frozen=True)
class Settings:
    """Settings of the training process.

    Attributes:
        working_directory: Working directory, also of the worker processes if their node has it.
        default_dtype: torch's default dtype.
        grad_enabled: Whether autograd records operations.
        inference_mode: Whether ``torch.inference_mode()`` is enabled.
    """

    working_directory: str
    default_dtype: torch.dtype
    grad_enabled: bool = True
    inference_mode: bool = False

    @classmethod
    def now(cls) -> Settings:
        """Return the settings of this thread and this process."""
        return cls(
            working_directory=str(Path.cwd()),
            default_dtype=torch.get_default_dtype(),
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
        )

    def take_over(self) -> None:
        """Apply the settings to this process, except autograd's, which are per thread."""
        if torch.get_default_dtype() is not self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        with contextlib.suppress(OSError):  # this node does not have the directory
            os.chdir(self.working_directory)

    def gradients(self) -> AbstractContextManager[None]:
        """Apply autograd's settings to this thread inside the block."""
        modes = self.grad_enabled, self.inference_mode
        if modes == (torch.is_grad_enabled(), torch.is_inference_mode_enabled()):
            return contextlib.nullcontext()  # true for nearly every batch
        return self._other_gradients()

    @contextlib.contextmanager
    def _other_gradients(self) -> Iterator[None]:
        with torch.inference_mode(self.inference_mode), torch.set_grad_enabled(self.grad_enabled):
            yield


@dataclass(frozen=True)
class InheritedSettings:
    """The settings of a worker process that the training process has started itself.

    It has inherited them as torch's workers do, and keeps them.
    """

    def take_over(self) -> None:
        """Change nothing."""

    def gradients(self) -> AbstractContextManager[None]:
        """Change nothing."""
        return contextlib.nullcontext()
