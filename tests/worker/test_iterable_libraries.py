"""Tests of the streams of WebDataset and ``datasets``, compared with torch's loader."""

from __future__ import annotations

import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import webdataset
from PIL import Image
from samples import seed_everything
from torch.utils.data import DataLoader, IterableDataset

from dpex import DpexDataLoader

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("shared_ray")]

OURS = {"distribute_mode": True, "head_address": "local"}
SAMPLES = 60
SHARDS = 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write tar files of images with a label for WebDataset, and return their paths."""
    directory = tmp_path_factory.mktemp("shards")
    generator = np.random.default_rng(0)
    paths = [directory / f"{shard}.tar" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        with webdataset.TarWriter(str(path)) as tar:
            for index in range(shard, SAMPLES, SHARDS):
                picture = io.BytesIO()
                pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(picture, "png")
                tar.write({"__key__": f"{index:04}", "png": picture.getvalue(), "cls": index})
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write several files of JSON lines, and return their paths."""
    directory = tmp_path_factory.mktemp("lines")
    paths = [directory / f"{shard}.jsonl" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        rows = ({"index": i, "text": "word " * (i % 7)} for i in range(shard, SAMPLES, SHARDS))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path) for path in paths]


def pictures(shards: list[str]) -> IterableDataset[Any]:
    dataset: IterableDataset[Any] = (
        webdataset.WebDataset(shards, shardshuffle=SHARDS, seed=1)
        .shuffle(10, rng=random.Random(2))  # else seeded by time and process
        .decode("torchrgb")
        .to_tuple("png", "cls")
    )
    return dataset


def rows(lines: list[str]) -> datasets.IterableDataset:
    dataset = datasets.load_dataset("json", data_files=lines, split="train", streaming=True)
    return dataset.map(with_length).shuffle(seed=3, buffer_size=10).with_format("torch")


def with_length(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "length": len(row["text"])}


def epochs_of(loader_type: Any, dataset: Any, **options: Any) -> list[str]:
    seed_everything()
    loader = loader_type(dataset, 4, num_workers=2, **options)
    return [str(batch) for _ in range(2) for batch in loader]


def test_webdataset(shards: list[str]) -> None:
    ours = epochs_of(DpexDataLoader, pictures(shards), **OURS)
    assert ours == epochs_of(DataLoader, pictures(shards))
    assert len(ours) == 2 * 2 * -(-SAMPLES // 2 // 4)


def test_webdataset_s_own_batches(shards: list[str]) -> None:
    def labels(loader_type: Any, **options: Any) -> list[list[int]]:
        seed_everything()
        dataset = pictures(shards).batched(7, partial=True)
        loader = loader_type(dataset, batch_size=None, num_workers=2, **options)
        return [cls.tolist() for _, cls in loader]

    ours = labels(DpexDataLoader, **OURS)
    assert ours == labels(DataLoader)
    assert sorted(itertools.chain(*ours)) == list(range(SAMPLES))


def test_datasets_streaming(lines: list[str]) -> None:
    ours = epochs_of(DpexDataLoader, rows(lines), **OURS)
    assert ours == epochs_of(DataLoader, rows(lines))


def test_datasets_set_epoch(lines: list[str]) -> None:
    def epochs(loader_type: Any, **options: Any) -> list[list[int]]:
        dataset = rows(lines)
        loader = loader_type(dataset, 4, num_workers=2, **options)
        found = []
        for epoch in range(2):
            dataset.set_epoch(epoch)
            found.append([i for batch in loader for i in batch["index"].tolist()])
        return found

    ours = epochs(DpexDataLoader, **OURS)
    assert ours == epochs(DataLoader)
    assert ours[0] != ours[1]
    assert sorted(ours[0]) == sorted(ours[1]) == list(range(SAMPLES))


@pytest.mark.parametrize("place", [1, 5, 13])
def test_datasets_resume_from_their_state(lines: list[str], place: int) -> None:
    """This stream is not shuffled, because ``datasets`` does not restore a shuffle buffer."""
    dataset = datasets.load_dataset("json", data_files=lines, split="train", streaming=True)
    with DpexDataLoader(dataset, 4, num_workers=2, **OURS) as loader:
        whole = [str(batch) for batch in loader]
    with DpexDataLoader(dataset, 4, num_workers=2, **OURS) as loader:
        before = [str(batch) for batch in itertools.islice(loader, place)]
        state = loader.state_dict()
    assert state["stream_states"][0]["dataset"] is not None
    with DpexDataLoader(dataset, 4, num_workers=2, **OURS) as loader:
        loader.load_state_dict(state)
        assert before + [str(batch) for batch in loader] == whole


def test_a_rank_s_share(lines: list[str]) -> None:
    """``split_dataset_by_node`` gives each rank a share, which the logical workers divide."""
    from datasets.distributed import split_dataset_by_node

    def share(rank: int, loader_type: Any, **options: Any) -> list[int]:
        part = split_dataset_by_node(rows(lines), rank, 2)
        loader = loader_type(part, 4, num_workers=2, **options)
        return [i for batch in loader for i in batch["index"].tolist()]

    ours = [share(rank, DpexDataLoader, **OURS) for rank in range(2)]
    assert ours == [share(rank, DataLoader) for rank in range(2)]
    assert sorted(itertools.chain(*ours)) == list(range(SAMPLES))


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("".join(f"line {number}\n" for number in range(30)))

    def dataset() -> Any:
        files = str(tmp_path / "lines.txt")
        return datasets.load_dataset("text", data_files=files, split="train", streaming=True)

    # There is one file, so the second of the two logical workers reads nothing, as with torch.
    ours = epochs_of(DpexDataLoader, dataset(), **OURS)
    assert ours == epochs_of(DataLoader, dataset())
