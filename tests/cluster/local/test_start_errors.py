"""Tests of the errors of a local Ray that does not start: their reason and the next step."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpex import ClusterError
from dpex.cluster.local import directory, shared_by_ranks
from dpex.cluster.local.launch import _not_started


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for Ray's sockets, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def test_the_reason_comes_first_and_names_rays_logs_if_there_are_any(place: Path) -> None:
    error = RuntimeError("no memory.")
    assert str(_not_started(error, str(place))) == "a local Ray did not start: no memory"
    logs = place / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    text = f"a local Ray did not start: no memory. Ray's logs: {logs}"
    assert str(_not_started(error, str(place))) == text


@pytest.mark.parametrize(
    ("name", "says"),
    [("deep" * 10, "Set a shorter RAY_TMPDIR"), ("none", "is not a writable directory")],
)
def test_ray_tmpdir_is_named_only_if_it_is_the_cause(place: Path, name: str, says: str) -> None:
    text = str(_not_started(RuntimeError("no socket"), str(place / name)))
    assert text.startswith("a local Ray did not start: no socket. RAY_TMPDIR=")
    assert text.endswith(says)


def test_a_lock_that_another_rank_keeps_is_named(place: Path) -> None:
    with (place / "lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(ClusterError, match=f"another rank .* end it and run .*{place}/lock"),
            shared_by_ranks._locked(place / "job", time.monotonic()),
        ):
            pass


def test_a_directory_open_to_others_says_what_to_do(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    ours = place / f"dpex-{os.getuid()}"
    ours.mkdir()
    ours.chmod(0o755)
    with pytest.raises(ClusterError, match=f"{ours} must be .* Run `chmod 700 {ours}`"):
        directory.runtime_directory()
    ours.chmod(0o700)
    assert directory.runtime_directory() == ours
