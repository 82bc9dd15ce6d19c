"""Tests of the errors of a local Ray that does not start: their reason and the next step."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpex import ClusterError
from dpex.cluster.local import directory
from dpex.cluster.local.launch import _not_started


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for Ray's sockets, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def test_the_reason_comes_first_and_names_rays_logs_if_there_are_any(place: Path) -> None:
    error = RuntimeError("no memory.")
    assert str(_not_started(error, place)) == "a local Ray did not start: no memory"
    logs = place / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    text = f"a local Ray did not start: no memory. Ray's logs: {logs}"
    assert str(_not_started(error, place)) == text


def test_a_ray_tmpdir_that_is_too_long_is_named_with_the_limit(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit, the longest path of Ray's sockets is as long as a socket's path can be."""
    own = f"/dpex-{os.getuid()}/999"
    rays = "/ray/session_2026-11-30_01-48-36_578485_4194304/sockets/plasma_store"
    most = 107 - len(own) - len(rays)
    longest = place / ("d" * (most - len(str(place)) - 1))
    monkeypatch.setenv("RAY_TMPDIR", str(longest))
    assert directory.runtime_directory() == longest / f"dpex-{os.getuid()}"
    with socket.socket(socket.AF_UNIX) as bound:
        (longest / f"{own}{rays}"[1:]).parent.mkdir(parents=True)
        bound.bind(f"{longest}{own}{rays}")
    monkeypatch.setenv("RAY_TMPDIR", f"{longest}d")
    text = rf"RAY_TMPDIR='{longest}d' has {most + 1} bytes.* 107 bytes.* space for {most}\."
    with pytest.raises(ClusterError, match=text):
        directory.runtime_directory()
    # TMPDIR is often long, and set for other programs.
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", f"{longest}d")
    assert directory.runtime_directory() == Path(f"/tmp/dpex-{os.getuid()}")


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_in_which_others_can_replace_everything_is_not_used(
    place: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    place.chmod(0o777)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    if variable == "TMPDIR":
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        assert directory.runtime_directory() == Path(f"/tmp/dpex-{os.getuid()}")
        return
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    with pytest.raises(ClusterError, match=f"chmod go-w {place}.* directory with RAY_TMPDIR"):
        directory.runtime_directory()


def test_a_directory_open_to_others_says_what_to_do(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    ours = place / f"dpex-{os.getuid()}"
    ours.mkdir()
    ours.chmod(0o755)
    with pytest.raises(ClusterError, match=f"{ours} .* mode 0755. .* Run `chmod 700 {ours}`"):
        directory.runtime_directory()
    ours.chmod(0o700)
    assert directory.runtime_directory() == ours
