"""What a worker process takes over from the training process when an iteration begins.

torch forks its workers at ``iter()``, so they see what the training process has set by then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from dpex.worker import environment, module_settings

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """Settings of the training process.

    Attributes:
        working_directory: The workers', too, where they have it.
        default_dtype: torch's.
        grad_enabled: Whether operations are recorded for autograd.
        inference_mode: Whether ``torch.inference_mode()`` holds.
        changes: What has changed in its environment since Ray was started.
        modules: Values in modules that have changed since workers were forked from it.
    """

    working_directory: str
    default_dtype: torch.dtype
    grad_enabled: bool = True
    inference_mode: bool = False
    changes: environment.Changes = ((), None)
    modules: module_settings.Changes = ()

    @classmethod
    def now(cls, *, forks: bool) -> Settings:
        """Return this thread's and this process's.

        Args:
            forks: Whether torch's workers would be forks of this process.
        """
        return cls(
            working_directory=str(Path.cwd()),
            default_dtype=torch.get_default_dtype(),
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            changes=environment.changes(),
            modules=module_settings.changes() if forks else (),
        )

    def take_over(self) -> None:
        """Set them in this process. Those of autograd belong to a thread: see ``gradients``."""
        if torch.get_default_dtype() is not self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        with contextlib.suppress(OSError):  # a node without that directory
            os.chdir(self.working_directory)
        environment.take_over(self.changes)
        module_settings.take_over(self.modules)

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
