"""Private names of other packages, and the shortcuts that need them."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

__all__ = ["PUBLIC_ONLY", "PrivateName", "Shortcut", "private_ray_allowed", "replaced"]

logger = logging.getLogger("dpex")

PUBLIC_ONLY = "DPEX_PUBLIC_RAY_ONLY"
"""Name of the environment variable that disables all shortcuts of Ray if it is ``1``."""


def private_ray_allowed() -> bool:
    """Return whether dpex may use private names of Ray in this process."""
    return os.environ.get(PUBLIC_ONLY) != "1"


@dataclass(frozen=True)
class PrivateName:
    """A private name.

    Attributes:
        path: ``"module:attribute"``; dots separate nested attributes.
        purpose: The name's purpose, in words that follow "dpex uses it because it".
        check: How dpex detects that the name has another meaning.
        of_instances: Whether only instances have the attribute, so dpex cannot look it up in
            advance.
    """

    path: str
    purpose: str
    check: str = "an exception"
    of_instances: bool = False

    @property
    def attribute(self) -> str:
        """The last attribute of the path."""
        return self.path.rpartition(":")[2].rpartition(".")[2]

    def owner(self) -> Any:
        """Return the module or class that has the attribute.

        Raises:
            ImportError, AttributeError: The module or class does not exist.
        """
        module, _, attributes = self.path.partition(":")
        classes = attributes.split(".")[:-1]
        return functools.reduce(getattr, classes, importlib.import_module(module))

    def find(self) -> Any:
        """Return the value of the name.

        Raises:
            ImportError, AttributeError: The name does not exist.
        """
        return getattr(self.owner(), self.attribute)

    def set(self, value: Any) -> None:
        """Replace the value of the name for the rest of the process.

        Raises:
            ImportError, AttributeError: The module or class does not exist.
        """
        setattr(self.owner(), self.attribute, value)


class Shortcut:
    """A use of private names that is faster or more isolated than the public API.

    Invariant: after a failure in a process, that process uses the public API.

    Args:
        title: The shortcut's effect, as a verb phrase.
        without: The effect of using the public API instead.
        package: The package that has the names, ``"ray"`` or ``"torch"``.
        **names: The names. ``find`` returns their values by the same keys.
    """

    def __init__(self, title: str, without: str, package: str, **names: PrivateName) -> None:
        self.title = title
        self.without = without
        self.package = package
        self.names = names
        self.failed = False

    @property
    def usable(self) -> bool:
        """Whether the shortcut is allowed and has not failed so far in this process."""
        return not self.failed and (self.package != "ray" or private_ray_allowed())

    def find(self) -> dict[str, Any] | None:
        """Return the values of the names by key, or None if dpex must use the public API."""
        if not self.usable:
            return None
        found = {}
        for key, name in self.names.items():
            if not name.of_instances:
                try:
                    found[key] = name.find()
                except Exception as error:
                    self.fail(error)
                    return None
        return found

    def find_checked(self, **checks: Callable[[Any], bool]) -> dict[str, Any] | None:
        """Return the values of the names, as ``find`` does, if they pass all checks.

        Args:
            **checks: By key, a function that returns whether a value has the expected meaning.
        """
        found = self.find()
        if found is None:
            return None
        for key, check in checks.items():
            if not check(found[key]):
                self.fail(TypeError(f"{self.names[key].path} is {found[key]!r}"))
                return None
        return found

    def fail(self, error: BaseException) -> None:
        """Make this process use the public API from now on, and warn once."""
        if self.failed:
            return
        self.failed = True
        message = (
            f"{self.package} {version(self.package)} has changed what dpex uses to {self.title} "
            f"({type(error).__name__}: {error}). dpex uses the public API instead: {self.without}. "
            f"A newer dpex may support this version of {self.package}"
        )
        if threading.current_thread() is threading.main_thread():
            warnings.warn(f"dpex: {message}", RuntimeWarning, stacklevel=3)
        else:  # if a filter turned the warning into an error, no user code would see the error
            logger.warning("%s", message)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Suppress an exception inside the context, and count it as a failure of the shortcut."""
        try:
            yield
        except Exception as error:
            self.fail(error)


@contextmanager
def replaced(replacements: Mapping[PrivateName, Any]) -> Iterator[None]:
    """Replace the values of names inside the context.

    Raises:
        ImportError, AttributeError: A name does not exist.
    """
    owners = {name: name.owner() for name in replacements}
    originals = {name: getattr(owner, name.attribute) for name, owner in owners.items()}
    for name, replacement in replacements.items():
        setattr(owners[name], name.attribute, replacement)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owners[name], name.attribute, original)
