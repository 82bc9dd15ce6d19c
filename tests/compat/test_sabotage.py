"""Tests that an epoch completes if a private name of Ray is missing or has another meaning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_programs import (
    PROGRAMS,
    ROOT,
    environment,
    run_program,
    workplace,
)
from living import Plain
from torch.utils.data import DataLoader

from dpex.compat.names_table import all_shortcuts, table
from dpex.compat.private_names import PrivateName

PROGRAM = PROGRAMS / "sabotage_program.py"
SITE = PROGRAMS / "sabotage_site"
# One program alone may take 60 s, but several run at a time, and each starts many processes.
SECONDS = 180.0
# Prefixes of names that dpex does not use for an epoch on a local Ray. Ray's compiled code reads
# its worker object in frames of dpex, so the program cannot tell these reads apart.
ELSEWHERE = (
    "ray._private.worker:",
    "ray.util.client",
    "ray._private.runtime_env",
    "ray._private.ray_constants:DEBUG",
    "ray.experimental.internal_kv",
)
# The method of Ray Data that says whether a stage may start one more task.
TASKS_START = (
    "ray.data._internal.execution.operators.task_pool_map_operator"
    ":TaskPoolMapOperator.can_add_input"
)

NAMES = {
    name.path: name
    for shortcut in all_shortcuts()
    if shortcut.package == "ray"
    for name in shortcut.names.values()
}
IN_EPOCH = [path for path in NAMES if not path.startswith(ELSEWHERE)]
# One name of Ray Data's executor, one of its iterator, and one of a local Ray's start.
FEW = [
    "ray.data._internal.execution.streaming_executor_state:ray",
    "ray.data:DataIterator._to_ref_bundle_iterator",
    "ray._private.services:ConsolePopen",
]

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


def expected() -> list[list[list[int]]]:
    loader: DataLoader[Any] = DataLoader(
        Plain(), 10, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    return [[batch[1].tolist() for batch in loader] for _ in range(2)]


def check(path: str, how: str) -> subprocess.CompletedProcess[str]:
    with workplace() as place:
        paths = f"{SITE}:{environment(place).get('PYTHONPATH', '')}"
        done = run_program(
            PROGRAM,
            str(place),
            place=place,
            seconds=SECONDS,
            PYTHONPATH=paths,
            DPEX_SPOIL=f"{how}={path}",
        )
        said = done.stdout[-2000:] + done.stderr[-5000:]
        assert done.returncode == 0, said
        assert json.loads((place / "epochs").read_text()) == expected(), said
        assert (place / "mark").exists()
    assert said.count("has changed what dpex uses") <= 1, said
    return done


def check_hidden(path: str) -> None:
    done = check(path, "hidden")
    if not NAMES[path].of_instances:
        said = done.stdout + done.stderr
        assert "has changed what dpex uses" in said, said[-7000:]


@pytest.mark.parametrize("path", FEW)
def test_an_epoch_comes_where_a_name_is_missing(path: str) -> None:
    check_hidden(path)


@pytest.mark.extended
@pytest.mark.parametrize("how", ["hidden", "raises", "none", "never"])
def test_an_epoch_comes_where_ray_data_runs_no_tasks(how: str) -> None:
    done = check(TASKS_START if how == "never" else "ray.data:TaskPoolStrategy", how)
    said = done.stdout + done.stderr
    assert "runs no tasks" in said, said[-7000:]
    if how == "never":
        assert "was lost (TimeoutError: no task has started" in said, said[-7000:]


@pytest.mark.extended
@pytest.mark.sabotage
@pytest.mark.parametrize("path", IN_EPOCH)
def test_an_epoch_comes_where_any_name_is_missing(path: str) -> None:
    check_hidden(path)


@pytest.mark.extended
@pytest.mark.sabotage
@pytest.mark.parametrize("how", ["raises", "none", "zero", "huge", "text"])
@pytest.mark.parametrize("path", IN_EPOCH)
def test_an_epoch_comes_where_a_name_has_another_meaning(path: str, how: str) -> None:
    check(path, how)


def test_the_names_are_those_of_the_installed_ray() -> None:
    names = [name for name in NAMES.values() if not name.of_instances]
    assert [name.path for name in names if not exists(name)] == []


def test_the_docs_have_the_table() -> None:
    page = ROOT / "docs" / "private_names.md"
    text = page.read_text()
    assert text.endswith(table()), "python -m dpex.compat prints it"


def exists(name: PrivateName) -> bool:
    try:
        name.find()
    except (ImportError, AttributeError):
        return False
    return True


def test_private_names_stand_in_compat_alone() -> None:
    package = Path(sys.modules["dpex"].__file__ or "").parent
    private = ("ray._private", "ray._raylet", "_internal", "torch._utils", "data._utils")
    found = [
        f"{file.relative_to(package)}:{number}"
        for file in package.rglob("*.py")
        if "compat" not in file.relative_to(package).parts
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.lstrip().startswith(("import ", "from ")) and any(p in line for p in private)
    ]
    assert not found
