"""Authentication token of this process's Ray, which Ray itself reads only once, at import."""

from __future__ import annotations

from collections.abc import Callable

from dpex.compat.private_names import PrivateName, Shortcut

__all__ = ["on_shutdown", "reread"]

_NODE = PrivateName(
    "ray._private.worker:_global_node", "is the node of the Ray that is to be shut down"
)
_END = PrivateName(
    "ray._private.node:Node.kill_all_processes", "is what ray.shutdown() calls in the end"
)
TOKENS = Shortcut(
    "read the token of a local Ray, and forget it",
    "`RAY_AUTH_MODE` and `RAY_AUTH_TOKEN_PATH` stay set. If the program imports Ray before dpex's "
    "first epoch, a local Ray has the token that Ray chooses",
    "ray",
    config=PrivateName("ray._raylet:Config", "reads RAY_AUTH_MODE after the import"),
    loader=PrivateName("ray._raylet:AuthenticationTokenLoader", "reads another token"),
    node=_NODE,
    end=_END,
)


def reread() -> bool:
    """Make Ray read the authentication mode and the token from the environment again.

    Returns:
        Whether Ray has read them. If not, Ray keeps the previous mode and token.
    """
    done = False
    found = TOKENS.find()
    if found is not None:
        with TOKENS.attempt():
            found["config"].initialize("")
            found["loader"].instance().reset_cache()
            done = True
    return done


def on_shutdown(call: Callable[[], object]) -> bool:
    """Register a function to call after this process's Ray has been shut down.

    Returns:
        Whether the function is registered.
    """
    done = False
    found = TOKENS.find()
    if found is not None:
        with TOKENS.attempt():
            node = found["node"]

            def end(*args: object, **kwargs: object) -> None:
                del node.kill_all_processes
                try:
                    node.kill_all_processes(*args, **kwargs)
                finally:
                    call()

            node.kill_all_processes = end
            done = True
    return done
