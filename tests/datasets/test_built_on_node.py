"""Tests of datasets whose files are on the nodes, but not on the training process's node."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import node_kinds_program as program
import pytest
import torch
from cluster_programs import PROGRAM_SECONDS, PROGRAMS, run_program, workplace
from cluster_programs.clusters import Cluster
from cluster_programs.stores import ENVIRONMENT, object_store
from data_files import write_data_files
from idx_files import TRAINING, write_idx
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision import transforms as v1

from dpex import DpexDataLoader
from dpex.datasets import Parquet
from dpex.transforms import MappedDataset

pytestmark = [pytest.mark.extended, pytest.mark.multiprocess]

FILES_PROGRAM = PROGRAMS / "node_data_program.py"
KINDS_PROGRAM = Path(program.__file__)

Same = Callable[[Any, Any], None]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Start a head without files and two nodes with files, which can all read a store."""
    with workplace() as place, object_store(place) as (address, buckets):
        write_data_files(buckets / "bucket")
        store = {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{address}"}
        cluster = Cluster(place, **store)
        for name in ("one", "two"):
            write_data_files(place / name)
            write_idx(place / name, "FilesOfTheNode")
            cluster.add(NODE_FILES=str(place / name))
        yield cluster


def run(program: Path, nodes: Cluster, *arguments: str) -> bytes:
    """Run a training process, and return the content of the file that it wrote."""
    out = nodes.place / "report"
    done = run_program(
        program,
        nodes.address,
        *arguments,
        str(out),
        place=nodes.place,
        seconds=PROGRAM_SECONDS,
        **nodes.variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out.read_bytes()


def given(**changes: Any) -> str:
    return json.dumps({"length": TRAINING, "train": True, **changes})


def test_nodes_read_their_own_files(nodes: Cluster) -> None:
    report = json.loads(run(FILES_PROGRAM, nodes, given()))
    whole = datasets.FashionMNIST(str(nodes.place / "one" / "digits"), transform=v1.ToTensor())
    assert report["labels"] == [whole[index][1] for index in range(TRAINING)]
    assert report["sums"] == pytest.approx([float(whole[i][0].sum()) for i in range(TRAINING)])
    assert sorted(report["folders"]) == [str(nodes.place / name) for name in ("one", "two")]
    assert report["here"].startswith("NodeDataError: on_node(")
    assert "pass length=" in report["here"]


def torchs(dataset: Any, collate_fn: Any = None) -> list[Any]:
    return list(DataLoader(dataset, program.BATCH_SIZE, collate_fn=collate_fn))


def expected(folder: Path) -> dict[str, list[Any]]:
    """Return the batches of torch's loader where the files are."""
    pictures = datasets.ImageFolder(str(folder / "pictures"))
    tensors = torchs(MappedDataset(pictures, program.to_tensor))
    fixed = torchs(MappedDataset(pictures, program.FIXED))
    staged = MappedDataset(pictures, program.STAGES)
    joint = MappedDataset(pictures, transforms=program.JOINT)
    digits = str(folder / "digits")
    plain = torchs(datasets.FashionMNIST(digits, False, program.to_tensor))
    rows = torchs(Parquet(folder / "rows", program.COLUMNS))
    return {
        "FashionMNIST": plain,
        "ImageFolder": tensors,
        "cached in memory": fixed,
        "cached in a directory": fixed,
        "from_torchvision": torchs(datasets.FashionMNIST(digits, False, program.COMPOSE, float)),
        "joint transforms": torchs(joint, list),
        "stages": torchs(staged, staged.collate()),
        "Parquet": rows,
        "FashionMNIST in a store": plain,
        "ImageFolder in a store": tensors,
        "Parquet in a store": rows,
    }


@pytest.mark.usefixtures("shared_ray")
def test_all_kinds_of_datasets_are_read_where_the_files_are(
    nodes: Cluster, assert_same: Same
) -> None:
    report = pickle.loads(run(KINDS_PROGRAM, nodes, str(nodes.place / "cache")))
    assert "cannot be built in this process (KeyError: 'NODE_FILES')" in report.pop("here")
    ours = {name: result["epochs"] for name, result in report.items()}
    drawn = {
        name: (ours.pop(name), transforms)
        for name, transforms in (
            ("random behind a cache", program.CROPPED),
            ("random stages", program.RANDOM_STAGES),
        )
    }
    here = expected(nodes.place / "one")
    assert ours.keys() == here.keys()
    for name, epochs in ours.items():
        assert_same((name, epochs), (name, [here[name]] * 2))
    cached = [name for name, result in report.items() if result["hit_rate"] == 1]
    assert cached == ["cached in memory", "cached in a directory", "random behind a cache"]

    pictures = datasets.ImageFolder(str(nodes.place / "one" / "pictures"))
    for name, (epochs, transforms) in drawn.items():
        loader: Any = DpexDataLoader(
            MappedDataset(pictures, transforms),
            program.BATCH_SIZE,
            num_workers=1,
            generator=torch.Generator().manual_seed(0),
            distribute_mode=True,
            head_address="local",
        )
        assert_same((name, epochs), (name, [list(loader) for _ in range(2)]))


@pytest.mark.parametrize(
    "kind",
    [
        *("Parquet in a store", "ImageFolder"),
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in (
                *("ImageFolder in a store", "FashionMNIST in a store"),
                *("cached in a directory", "from_torchvision"),
            )
        ),
    ],
)
def test_a_worker_that_dies_while_it_reads_changes_nothing(
    kind: str, nodes: Cluster, assert_same: Same, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    report = pickle.loads(run(KINDS_PROGRAM, nodes, str(tmp_path / "cache"), kind, str(mark)))
    assert mark.exists()
    assert_same(report["epochs"], [expected(nodes.place / "one")[kind]] * 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"length": TRAINING + 1}, r"has 1,200 samples on this node, but 1,201.*"),
        ({"train": None}, r"FileNotFoundError: .*nowhere.*on_node\(FilesOfTheNode"),
    ],
    ids=["another length", "no files"],
)
def test_a_node_with_other_files_says_so(
    nodes: Cluster, changes: dict[str, Any], says: str
) -> None:
    report = json.loads(run(FILES_PROGRAM, nodes, given(**changes)))
    assert re.search(says, report["error"], re.DOTALL), report["error"]
    assert re.search(r"dataset ind.*, batch 0, node \d+\.\d+\.\d+\.\d+, pid \d+", report["error"])
