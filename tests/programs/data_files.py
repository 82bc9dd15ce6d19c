"""Files of all kinds of datasets."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
from idx_files import write_idx

# Neither a store's listing nor sorted() gives this order.
PICTURES = ["b/z.png", "b/a/x.PNG", "b/a.png", "b-c/1.png", "a/10.png", "a/9.jpeg", "a/a/a/1.bmp"]
ROWS = 210


def write_data_files(folder: Path) -> None:
    """Write pictures, FashionMNIST's files, plain and zipped, and Parquet files into folders."""
    for number, name in enumerate(PICTURES):
        file = folder / "pictures" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (9, 8, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(file)
    (folder / "pictures" / "a" / "notes.txt").write_text("no picture")
    (folder / "pictures" / "above.png").write_bytes(b"in no folder")
    write_idx(folder / "digits", "FashionMNIST")
    (folder / "zipped").mkdir()
    for file in (folder / "digits" / "FashionMNIST" / "raw").iterdir():
        (folder / "zipped" / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    (folder / "spark.parquet").mkdir()
    pq.write_table(rows(5, 3), folder / "spark.parquet" / "part-0.parquet")
    (folder / "rows").mkdir()
    for number in range(3):
        pq.write_table(rows(100 * number, ROWS // 3), folder / "rows" / f"{number}.parquet", 30)


def rows(start: int, count: int) -> pa.Table:
    """Return rows that differ in their numbers."""
    numbers = np.arange(start, start + count)
    return pa.table(
        {
            "number": numbers,
            "share": numbers / 7,
            "name": [f"row {n}" for n in numbers],
            "tokens": [list(range(n % 5)) for n in numbers],
            "bytes": [bytes([n % 256]) for n in numbers],
        }
    )
