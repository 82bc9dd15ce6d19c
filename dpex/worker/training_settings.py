"""Settings that a worker process of a Ray takes from the training process at ``iter()``.

torch forks its workers at ``iter()``, so they have the training process's settings of that moment.
Processes that the training process starts itself have inherited them too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Settings", "gradients"]


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


@contextlib.contextmanager
def gradients(settings: Settings | None) -> Iterator[None]:
    """Apply autograd's settings to this thread inside the block; None changes nothing."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if settings is None or modes == (settings.grad_enabled, settings.inference_mode):
        yield  # for nearly every batch
        return
    with (
        torch.inference_mode(settings.inference_mode),
        torch.set_grad_enabled(settings.grad_enabled),
    ):
        yield
