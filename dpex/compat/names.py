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
"""Environment variable: ``1`` turns every shortcut through Ray off."""


def private_ray_allowed() -> bool:
    """Return whether dpex may use private names of Ray in this process."""
    return os.environ.get(PUBLIC_ONLY) != "1"


@dataclass(frozen=True)
class PrivateName:
    """One private name.

    Attributes:
        path: ``"module:attribute"``; dots lead to attributes of attributes.
        purpose: What dpex uses it for.
        check: How dpex notices that the name has another meaning.
        of_instances: Whether only instances have it, so that it cannot be looked up beforehand.
    """

    path: str
    purpose: str
    check: str = "an exception"
    of_instances: bool = False

    @property
    def attribute(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(":")[2].rpartition(".")[2]

    def owner(self) -> Any:
        """Return the module or class that has the name.

        Raises:
            ImportError, AttributeError: The module or class does not exist.
        """
        module, _, attributes = self.path.partition(":")
        classes = attributes.split(".")[:-1]
        return functools.reduce(getattr, classes, importlib.import_module(module))

    def find(self) -> Any:
        """Return what the name stands for.

        Raises:
            ImportError, AttributeError: It does not exist.
        """
        return getattr(self.owner(), self.attribute)

    def set(self, value: Any) -> None:
        """Put something in its place, for good.

        Raises:
            ImportError, AttributeError: The module or class does not exist.
        """
        setattr(self.owner(), self.attribute, value)


class Shortcut:
    """A faster or more secluded way that needs private names.

    Invariant: once it has failed in a process, that process takes the public way.

    Args:
        title: What the shortcut does.
        without: What the public way costs.
        package: The package that has the names.
        **names: The names, by the key that ``find`` returns them under.
    """

    def __init__(self, title: str, without: str, package: str, **names: PrivateName) -> None:
        self.title = title
        self.without = without
        self.package = package
        self.names = names
        self.failed = False

    @property
    def usable(self) -> bool:
        """Whether it may be taken, as far as is known."""
        return not self.failed and (self.package != "ray" or private_ray_allowed())

    def find(self) -> dict[str, Any] | None:
        """Return what the names stand for, by key; None if the public way is to be taken."""
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
        """Return what the names stand for, as ``find``, if each passes its check.

        Args:
            **checks: By key, whether a value has the expected meaning.
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
        """Take the public way in this process from now on, and warn once."""
        if self.failed:
            return
        self.failed = True
        message = (
            f"{self.package} {version(self.package)} has changed what dpex uses to {self.title} "
            f"({type(error).__name__}: {error}). dpex goes the public way: {self.without}. A newer "
            f"dpex may support this version of {self.package}"
        )
        if threading.current_thread() is threading.main_thread():
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        else:  # the user's filters may make the warning an error, which no code of theirs would see
            logger.warning("%s", message)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Take an exception inside the block for a failure of the shortcut, and swallow it."""
        try:
            yield
        except Exception as error:
            self.fail(error)


@contextmanager
def replaced(replacements: Mapping[PrivateName, Any]) -> Iterator[None]:
    """Replace what names stand for, inside the block.

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
