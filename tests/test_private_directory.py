"""Tests that no other user can access or replace a private directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dpex.private_directory import NotPrivate, check_way, make_private

OTHER_USER = 65534

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no modes")
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory like ``/tmp``."""
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


def of_other_user(path: Path, mode: int = 0o700) -> Path:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, OTHER_USER, OTHER_USER)
    return path


def test_it_is_created_with_missing_parents(folder: Path) -> None:
    made = make_private(folder / "a" / "ours", sticky=True)
    assert made == folder / "a" / "ours"
    assert made.stat().st_mode & 0o777 == 0o700
    assert make_private(made, sticky=True) == made


def test_links_of_this_user_are_resolved(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (folder / "link").symlink_to("../disk")
    made = make_private(folder / "link" / "ours", sticky=True)
    assert made == tmp_path / "disk" / "ours"


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701])
def test_a_directory_that_others_can_read_is_refused(folder: Path, mode: int) -> None:
    ours = folder / "ours"
    ours.mkdir()
    ours.chmod(mode)
    with pytest.raises(NotPrivate, match=rf"mode 0{mode:o}\. .*`chmod 700 {ours}` if it is yours"):
        make_private(ours)
    assert make_private(ours, readable=True) == ours


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_directory_that_others_can_write_to_is_always_refused(folder: Path, mode: int) -> None:
    ours = folder / "ours"
    ours.mkdir()
    ours.chmod(mode)
    with pytest.raises(NotPrivate, match="no other user can write to"):
        make_private(ours, readable=True)


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_directory_of_another_user_is_refused(folder: Path, mode: int) -> None:
    theirs = of_other_user(folder / "ours", mode)
    with pytest.raises(NotPrivate, match=f"{theirs} belongs to user {OTHER_USER}"):
        make_private(theirs, readable=True)
    with pytest.raises(NotPrivate, match=f"{theirs} belongs to user {OTHER_USER}"):
        make_private(theirs / "inner")
    assert not list(theirs.iterdir())


@as_root
@pytest.mark.parametrize("inner", ["", "inner"])
def test_a_link_of_another_user_is_refused(folder: Path, tmp_path: Path, inner: str) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    link = folder / "ours"
    link.symlink_to(tmp_path / "disk")
    os.lchown(link, OTHER_USER, OTHER_USER)
    with pytest.raises(NotPrivate, match=f"{link} belongs to user {OTHER_USER}"):
        make_private(link / inner)
    assert not list((tmp_path / "disk").iterdir())
    (tmp_path / "link").symlink_to(link)
    with pytest.raises(NotPrivate, match=f"{link} belongs to user {OTHER_USER}"):
        make_private(tmp_path / "link" / inner)


@as_root
def test_a_directory_that_only_its_owner_can_write_to_may_be_on_the_way(tmp_path: Path) -> None:
    """Only users who can write to the parent can have given it to its owner."""
    project = of_other_user(tmp_path / "project", 0o755)
    assert make_private(project / "ours", sticky=True) == project / "ours"


def test_without_the_sticky_bit_others_could_replace_it(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(NotPrivate, match=rf"has mode 0777\. Run `chmod go-w {folder}`"):
        make_private(folder / "ours", sticky=True)
    assert make_private(folder / "ours") == folder / "ours"


@as_root
def test_only_this_user_s_own_group_may_write(folder: Path) -> None:
    folder.chmod(0o775)
    check_way(folder / "ours", sticky=True)  # the group root of the user root
    (folder / "ours").mkdir()
    os.chown(folder, 0, OTHER_USER)
    with pytest.raises(NotPrivate, match=r"has mode 0775"):
        check_way(folder / "ours", sticky=True)


def test_a_circle_of_links_is_an_error(folder: Path) -> None:
    (folder / "ours").symlink_to("other")
    (folder / "other").symlink_to("ours")
    with pytest.raises(OSError, match="symbolic links"):
        make_private(folder / "ours")
