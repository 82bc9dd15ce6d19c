"""Exit of this process by Ctrl-C: it dies by SIGINT, as without Ray."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import signal

__all__ = ["die_by_interrupt"]


def die_by_interrupt() -> None:
    """Make an unhandled Ctrl-C end this process by SIGINT; call it after Ray is imported.

    A shell ends its loop only if SIGINT has killed the process. A further Ctrl-C at exit kills the
    process at once. The call after the last ``atexit.register`` is the one that counts. A fork
    server must not call it: the import draws ids of Ray, which all forks would share.
    """
    # Python forgets the unhandled KeyboardInterrupt if code at exit calls exec(), as dataclasses
    # do. Ray's exit handler imports this module, which defines some.
    with contextlib.suppress(ImportError):
        importlib.import_module("ray.dag.compiled_dag_node")
    atexit.unregister(_take_default_action)
    atexit.register(_take_default_action)


def _take_default_action() -> None:
    """Restore the default action of SIGINT, unless the user has a handler for it.

    A KeyboardInterrupt in an exit handler would only end that handler, with a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
