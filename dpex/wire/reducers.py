"""Reductions of objects that a fork copies but pickle refuses: caches, locks, thread-local data.

As after a fork, each process has a separate object. An unpickled cache is empty, and an unpickled
lock is free.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType
from typing import Any, cast

import cloudpickle

__all__ = ["reduce"]

# Attributes that every cache has. The pickle holds only the attributes that the user added.
_NOT_SENT = {"cached", "cache_parameters", *functools.WRAPPER_ASSIGNMENTS, "__wrapped__"}
_SINGLE_DISPATCH = cast(FunctionType, functools.singledispatch(lambda _: None)).__code__


def reduce(obj: Any) -> Any:
    """Return an object's reduction as ``__reduce__`` does, or None if pickle needs no help.

    None is the result for functions that the reader can import, because pickle sends their names.
    """
    reducer = _REDUCERS.get(type(obj))
    return None if reducer is None else reducer(obj)


def _goes_by_value(function: Any) -> bool:
    """Return whether a function is pickled by value, because the reader may lack its module."""
    module = getattr(function, "__module__", None) or "__main__"
    parents = module.split(".")
    names = {".".join(parents[: n + 1]) for n in range(len(parents))}
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    return "<locals>" in function.__qualname__ or not by_value.isdisjoint(names)


# --- caches: created empty, then filled, because a function may refer to its own cache -----------


class _Empty:
    """Holder of the function that a cache calls, which is unpickled after the cache."""

    function: Callable[..., Any]


def _empty_cache(parameters: dict[str, Any]) -> Any:
    cached = _Empty()

    def call(*args: Any, **kwargs: Any) -> Any:
        return cached.function(*args, **kwargs)

    cache: Any = functools.lru_cache(**parameters)(call)
    cache.cached = cached
    return cache


def _fill_cache(cache: Any, state: tuple[Callable[..., Any], dict[str, Any]]) -> None:
    function, attributes = state
    cache.cached.function = function
    functools.update_wrapper(cache, function)
    vars(cache).update(attributes)


def _reduce_cache(cache: Any) -> Any:
    if not _goes_by_value(cache):
        return None
    state = (cache.__wrapped__, {n: v for n, v in vars(cache).items() if n not in _NOT_SENT})
    return _empty_cache, (cache.cache_parameters(),), state, None, None, _fill_cache


def _empty_dispatch() -> Any:
    return functools.singledispatch(lambda _: None)


def _fill_dispatch(
    dispatch: Any, state: tuple[Callable[..., Any], dict[type, Callable[..., Any]]]
) -> None:
    function, registry = state
    functools.update_wrapper(dispatch, function)
    for kind, implementation in registry.items():
        dispatch.register(kind, implementation)


def _reduce_function(function: Any) -> Any:
    if function.__code__ is not _SINGLE_DISPATCH or not _goes_by_value(function):
        return None
    state = (function.__wrapped__, dict(function.registry))
    return _empty_dispatch, (), state, None, None, _fill_dispatch


def _cached_property(function: Callable[[Any], Any], name: str | None) -> Any:
    found: Any = functools.cached_property(function)
    found.attrname = name
    return found


def _reduce_cached_property(found: Any) -> Any:
    return _cached_property, (found.func, found.attrname)


# --- objects that belong to one process or thread ------------------------------------------------


def _reduce_local(local: Any) -> Any:
    return threading.local, (), vars(local) or None


def _context_var(name: str, *value: Any) -> ContextVar[Any]:
    return ContextVar(name, default=value[0]) if value else ContextVar(name)


def _reduce_context_var(variable: ContextVar[Any]) -> Any:
    try:
        return _context_var, (variable.name, variable.get())
    except LookupError:
        return _context_var, (variable.name,)


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(functools.lru_cache(lambda: None)): _reduce_cache,
    FunctionType: _reduce_function,
    functools.cached_property: _reduce_cached_property,
    type(threading.Lock()): lambda _: (threading.Lock, ()),
    type(threading.RLock()): lambda _: (threading.RLock, ()),
    threading.local: _reduce_local,
    ContextVar: _reduce_context_var,
}
