"""Functions of dpex that ``torch.compile`` does not trace, as it does not trace torch's loader.

``torch.compiler.disable`` would do the same. But it imports ``torch._dynamo``, which takes seconds,
and most programs compile nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from dpex.compat.private_names import PrivateName, Shortcut

__all__ = ["UNTRACED", "untraced", "untraced_alone"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_FRAMES = "torch._C:_dynamo.eval_frame."
_CHECK = "a test counts the frames of a compiled training step"
UNTRACED = Shortcut(
    "keep `torch.compile` out of dpex's functions",
    "`torch.compile` also traces dpex's functions in a compiled training step. That takes longer, "
    "and the batches are the same",
    "torch",
    set_strategy=PrivateName(
        _FRAMES + "set_code_exec_strategy", "marks the code of a function", _CHECK
    ),
    strategy=PrivateName(
        _FRAMES + "_FrameExecStrategy", "skips the function and all that it calls", _CHECK
    ),
    action=PrivateName(_FRAMES + "_FrameAction", "names the action that skips", _CHECK),
)


def untraced(function: FunctionT) -> FunctionT:
    """Make ``torch.compile`` run a function, and all that it calls, without tracing it."""
    return _skip(function, and_calls=True)


def untraced_alone(function: FunctionT) -> FunctionT:
    """Make ``torch.compile`` run a function without tracing it, but trace what it calls.

    torch's loader treats the user's code in the same way.
    """
    return _skip(function, and_calls=False)


def _skip(function: FunctionT, *, and_calls: bool) -> FunctionT:
    plain = cast(FunctionType, function)
    # dynamo looks for this attribute before it inlines a function that compiled code calls.
    plain._torchdynamo_disable = True  # type: ignore[attr-defined]
    # torch 2.6 does not have the names. No warning: only compilation takes longer.
    with contextlib.suppress(Exception):
        names = {key: name.find() for key, name in UNTRACED.names.items()}
        action = names["action"]
        strategy = names["strategy"](action.SKIP, action.SKIP if and_calls else action.DEFAULT)
        names["set_strategy"](plain.__code__, strategy)
    return function
