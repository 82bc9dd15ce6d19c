"""Imports of the user's modules in a worker process, as the training process has them.

The user may edit a file while an epoch runs. A worker process that imports it afterwards still gets
the version of the training process, as do the worker processes that have imported it before.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType

__all__ = ["import_from"]


def import_from(sources: Mapping[str, tuple[str, bytes]]) -> None:
    """Import modules from these sources from now on, if their files have other contents.

    Args:
        sources: For each module, its file in the training process, and the source.
    """
    _FINDER.sources.update(sources)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.sources: dict[str, tuple[str, bytes]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if fullname not in self.sources:
            return None
        file, source = self.sources[fullname]
        found = PathFinder.find_spec(fullname, path)
        if found is not None and found.has_location and found.origin:
            file = found.origin  # another path on another node
        try:
            if Path(file).read_bytes() == source:
                return None
        except OSError:  # the file is gone
            pass
        return importlib.util.spec_from_file_location(
            fullname, file, loader=_Loader(fullname, file, source)
        )


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._source, self.path)
        return code


_FINDER = _Finder()
