"""A dataset of rows in a file or in memory, for the benchmark ``on_node``."""

from pathlib import Path

import numpy as np
from torch.utils.data import Dataset


class Rows(Dataset[float]):
    """Samples that are the mean of a row, so that batches are small.

    Args:
        array: The rows, one per sample.
    """

    def __init__(self, array: "np.ndarray[tuple[int, int], np.dtype[np.float32]]") -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> float:
        return float(self.array[index].mean())


def rows_of(file: str) -> Rows:
    """Return the rows of a file, mapped into memory."""
    return Rows(np.load(file, mmap_mode="r"))


def make_file(folder: Path, rows: int, row_bytes: int) -> Path:
    """Write random rows, which do not compress, unless the file exists; return its path."""
    file = folder / f"{rows}x{row_bytes}.npy"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        array = np.random.default_rng(0).random((rows, row_bytes // 4), dtype=np.float32)
        with file.with_suffix(".part").open("wb") as part:
            np.save(part, array)
        file.with_suffix(".part").rename(file)
    return file
