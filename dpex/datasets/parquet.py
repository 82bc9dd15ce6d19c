"""Rows of Parquet files, read by row group, on a disk or in an object store."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from dpex.datasets.store import Store
from dpex.recent import Recent

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Parquet"]

_FOOTERS_AT_ONCE = 16
_DEFAULT_KEPT_GROUPS = 4


class Parquet(Dataset[dict[str, Any]]):
    """Rows of Parquet files, each a dict of its columns.

    A process reads a row with its whole row group, and reads each row group once per batch. If
    reading takes most of the time, shuffle by row groups, or raise ``kept_groups`` to the number of
    row groups that a batch uses.

    Args:
        uri: A file, or a folder of ``*.parquet`` files. It is a path or a URI such as
            ``s3://bucket/path``; ``docs/datasets.md`` lists the schemes. In a folder, names that
            begin with "." or "_" are left out.
        columns: Names of the columns to read, or None for all.
        kept_groups: Number of row groups that a process keeps in memory.
        filesystem: A filesystem of pyarrow or fsspec, if the environment does not configure the
            store.

    Attributes:
        columns: Names of the columns, in the order of the files.

    Raises:
        FileNotFoundError: ``uri`` does not exist, or the folder contains no ``*.parquet`` files.
        OSError: The store refuses access, or does not answer after several tries.
        TypeError: ``columns`` is a string, not a list of strings.
        ValueError: ``columns`` is empty or names an unknown column, the files have different
            columns, or ``kept_groups`` is not a positive integer.
    """

    def __init__(
        self,
        uri: str | Path,
        columns: Sequence[str] | None = None,
        *,
        kept_groups: int = _DEFAULT_KEPT_GROUPS,
        filesystem: Any = None,
    ) -> None:
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list of names, got {columns!r}. Pass [{columns!r}]")
        columns = None if columns is None else list(columns)
        if columns is not None and not columns:
            raise ValueError("columns must contain at least one name, got []")
        if isinstance(kept_groups, bool) or not isinstance(kept_groups, int) or kept_groups < 1:
            raise ValueError(f"kept_groups must be an integer >= 1, got {kept_groups!r}")
        self._store = Store(uri, filesystem)
        self._kept_groups = kept_groups
        if self._store.is_file():
            self._files = [""]
        else:
            self._files = [f for f in self._store.listing()[0] if _is_data(f)]
        if not self._files:
            raise FileNotFoundError(f"{self._store.uri} contains no *.parquet file")
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            footers = list(pool.map(self._footer, self._files))
        names = footers[0][0]
        for file, (others, _) in zip(self._files, footers, strict=True):
            if others != names:
                raise ValueError(
                    f"all files must have the same columns, but {file} has columns {others}, and "
                    f"{self._files[0]} has {names}"
                )
        unknown = sorted(set(columns or ()) - set(names))
        if unknown:
            raise ValueError(f"columns {unknown} do not exist. The files have {names}")
        self.columns = [name for name in names if columns is None or name in columns]
        groups = [(f, g, rows) for f, (_, s) in enumerate(footers) for g, rows in enumerate(s)]
        self._groups = [(f, g) for f, g, _ in groups]
        self._ends = list(accumulate(rows for _, _, rows in groups))
        self._read: Recent[int, pa.Table] = Recent(kept_groups)

    def _footer(self, file: str) -> tuple[list[str], list[int]]:
        import pyarrow.parquet as pq

        with self._store.reading(file), self._store.open(file) as source:
            found = pq.read_metadata(source)
        rows = [found.row_group(group).num_rows for group in range(found.num_row_groups)]
        return list(found.schema.to_arrow_schema().names), rows

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the row groups that this process has read."""
        return {**self.__dict__, "_read": Recent(self._kept_groups)}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Return one row."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[dict[str, Any]]:
        """Return rows in the order of their indices, reading each row group once."""
        places: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            row = operator.index(index)
            row += len(self) if row < 0 else 0
            if not 0 <= row < len(self):
                raise IndexError(f"index {index} is out of range for {len(self):,} rows")
            group = bisect_right(self._ends, row)
            first = self._ends[group - 1] if group else 0
            places.setdefault(group, []).append((place, row - first))
        rows: list[dict[str, Any]] = [{}] * len(indices)
        for group, wanted in places.items():
            table = self._group(group)
            taken = [row for _, row in wanted]
            columns = {name: _values(table.column(name), taken) for name in self.columns}
            for number, (place, _) in enumerate(wanted):
                rows[place] = {name: values[number] for name, values in columns.items()}
        return rows

    def _group(self, number: int) -> pa.Table:
        import pyarrow.parquet as pq

        if number not in self._read:
            file, group = self._groups[number]
            path = self._files[file]
            with self._store.reading(path), self._store.open(path) as source:
                parquet = pq.ParquetFile(source)
                self._read[number] = parquet.read_row_group(group, columns=self.columns)
        self._read.move_to_end(number)
        return self._read[number]


def _is_data(path: str) -> bool:
    """Return whether a file holds rows; a leading "." or "_" marks hidden or metadata files."""
    return path.endswith(".parquet") and not any(p[0] in "._" for p in path.split("/"))


def _array(values: pa.Array) -> Any:
    # numpy has no missing integers, so a list with nulls stays a list.
    return values.to_pylist() if values.null_count else np.array(values.to_numpy())


def _values(column: pa.ChunkedArray, rows: Sequence[int]) -> list[Any]:
    """Return values of a column: numpy arrays for lists of numbers, else Python objects.

    A list with a null stays a Python list. Arrow's ``take`` is not used: it joins chunks, even
    beyond 2 GiB, and does not support view types.

    Args:
        column: A column of a row group.
        rows: Numbers of the rows to return.
    """
    import pyarrow.types as types

    kind = column.type
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if listed and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        found = (column[row].values for row in rows)
        return [None if v is None else _array(v) for v in found]
    return [column[row].as_py() for row in rows]
