"""Exit of this process by Ctrl-C: it dies by SIGINT, as without Ray."""

from __future__ import annotations

import contextlib
import importlib

__all__ = ["die_by_interrupt"]


def die_by_interrupt() -> None:
    """Make an unhandled Ctrl-C end this process by SIGINT; call it after Ray is imported.

    A shell ends its loop only if SIGINT has killed the process.
    """
    # Python forgets the unhandled KeyboardInterrupt if code at exit calls exec(), as dataclasses
    # do. Ray's exit handler imports this module, which defines some.
    with contextlib.suppress(ImportError):
        importlib.import_module("ray.dag.compiled_dag_node")
