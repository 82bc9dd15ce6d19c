"""Exit of this process by Ctrl-C: it dies by SIGINT, as without Ray."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import signal
import sys
import threading
import weakref

from dpex import tuning

__all__ = ["die_at_once", "die_by_interrupt", "importing"]

importing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that import modules, for which an exit by Ctrl-C waits."""


def die_by_interrupt() -> None:
    """Make an unhandled Ctrl-C end this process by SIGINT; call it before Ray is imported.

    A shell ends its loop only if SIGINT has killed the process. Handlers at exit run in the
    reverse order of their registration, and this one must run after Ray's.
    """
    atexit.unregister(_restore_interrupt)
    atexit.register(_restore_interrupt)
    if "ray" in sys.modules:
        # Ray's handler runs later, and imports this module. So import it now.
        with contextlib.suppress(ImportError):
            importlib.import_module("ray.dag.compiled_dag_node")


def die_at_once() -> None:
    """Make a further Ctrl-C at exit kill the process; call it after the last ``atexit.register``.

    A KeyboardInterrupt in an exit handler would only end that handler, with a traceback.
    """
    atexit.unregister(_take_default_action)
    atexit.register(_take_default_action)


def _restore_interrupt() -> None:
    """Tell Python again that a KeyboardInterrupt ends it.

    Source:
        ``run_eval_code_obj`` of CPython. Python forgets the interrupt when code runs in ``exec``,
        as at many imports, and notes it when such code raises it.
    """
    is_interactive = sys.flags.interactive or hasattr(sys, "ps1")
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not is_interactive:
        for thread in list(importing):
            thread.join(tuning.EXIT_S)
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _take_default_action() -> None:
    """Restore the default action of SIGINT, unless the user has a handler for it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
