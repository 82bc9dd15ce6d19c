"""Exceptions of samples, on their way from a worker process to the training loop.

``training/distributed_iterator.py`` raises them again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dpex.compat.torch_names import ExceptionWrapper
from dpex.errors import SerializationError
from dpex.wire.pickling import dump

if TYPE_CHECKING:
    from dpex.wire.pickling import Pickled

__all__ = ["At", "wrap_error"]


class At:
    """The index or indices being processed, for error messages."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.set(name, value)

    def set(self, name: str, value: Any) -> None:
        """Replace the name and the value."""
        self.name = name
        self.value = value

    def __str__(self) -> str:
        text = repr(self.value)
        return f"{self.name} {text if len(text) <= 200 else text[:200] + ' …'}"


def _exit_text(code: object) -> str:
    text = f"code in a worker process called sys.exit({code!r}), as the traceback shows. "
    if code == 2:  # argparse's exit code for arguments that it cannot parse
        return text + "The likely cause is argparse: parse arguments in the training process only"
    return text + "Raise an exception instead"


def _base_text(error: BaseException | None) -> str:
    return (
        f"code in a worker process raised {type(error).__name__}({error}), as the traceback shows. "
        "It is not a subclass of Exception. Raise a subclass of Exception instead"
    )


def wrap_error(worker_id: int, place: str) -> Pickled:
    """Pickle the exception being handled, wrapped as torch wraps it, with its origin.

    Args:
        worker_id: The logical worker.
        place: Where the exception was raised: the batch, and the node and process.
    """
    kind, error, traceback = sys.exc_info()
    assert kind is not None
    if not isinstance(error, Exception):
        # The training process must not exit, or cancel what it does, because a sample did.
        text = _exit_text(error.code) if isinstance(error, SystemExit) else _base_text(error)
        kind, error = RuntimeError, RuntimeError(text)
    where = f"in DataLoader worker process {worker_id} ({place})"
    wrapper = ExceptionWrapper((kind, error, traceback), where=where)
    try:
        return dump(wrapper, "error")
    except SerializationError:
        wrapper.exc_type = RuntimeError
        return dump(wrapper, "error")
