"""Tests of a release: its version, the files for GitHub, the wheel and the sdist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_programs import ROOT, environment, workplace
from cluster_programs.environments import environment_above

import dpex

FORGE = sorted((ROOT / ".github").rglob("*.yml"))
WORKFLOWS = [path for path in FORGE if path.parent.name == "workflows"]
FORMS = [path for path in FORGE if path.parent.name == "ISSUE_TEMPLATE" and path.stem != "config"]
NEWEST = re.compile(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", re.MULTILINE)
STEM = f"dpex-{dpex.__version__}"
# The README's first example uses a dataset of the reader.
README_DATASET = """
import dpex, torch
from torch.utils.data import TensorDataset

dataset = TensorDataset(torch.rand(1_000, 8), torch.arange(1_000))
"""
README_OUTCOME = """
    assert len(image) == len(label) == 100
print(dpex.__file__)
"""


def parsed(path: Path) -> dict[Any, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


def supported_pythons() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [re.fullmatch(r".* :: (3\.\d+)", line) for line in project["classifiers"]]
    versions = [match[1] for match in found if match]
    assert project["requires-python"] == f">={versions[0]}"
    return versions


def test_the_changelog_begins_with_this_version() -> None:
    newest = NEWEST.search((ROOT / "CHANGELOG.md").read_text())
    assert newest is not None
    assert newest[1] == dpex.__version__


def test_the_citation_is_of_this_version() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    assert citation["version"] == dpex.__version__
    assert citation["authors"] == [{"name": "The dpex contributors"}]


@pytest.mark.parametrize(
    ("tag", "date", "refusal"),
    [
        (f"v{dpex.__version__}", "2026-01-31", None),
        (dpex.__version__, "2026-01-31", f"says {dpex.__version__}"),
        ("v99.0.0", "2026-01-31", "The tag is v99.0.0"),
        (f"v{dpex.__version__}", "unreleased", "(unreleased)"),
    ],
)
def test_a_tag_is_the_version_and_its_changes_have_a_date(
    tmp_path: Path, tag: str, date: str, refusal: str | None
) -> None:
    for name in (".ci/check-tag", "dpex/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(NEWEST.sub(rf"## \1 ({date})", changes.read_text(), count=1))
    done = subprocess.run(
        [tmp_path / ".ci" / "check-tag", tag], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (refusal is None), done.stderr
    assert (refusal or "") in done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_do_no_more_than_they_must(path: Path) -> None:
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text()
    for name, job in workflow["jobs"].items():
        allowed = {"id-token": "write"} if (path.stem, name) == ("release", "publish") else None
        assert job.get("permissions") == allowed
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step["uses"])
            # Anyone can choose a branch name in a pull request, and a shell would run it.
            assert "${{ github" not in step.get("run", "")


def test_ci_runs_what_there_is_on_every_python_that_is_supported() -> None:
    runs = parsed(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    commands = {run["python"]: run["command"] for run in runs["include"]}
    assert list(commands) == supported_pythons()
    assert commands.pop(supported_pythons()[0]) == ".ci/run"
    assert set(commands.values()) == {"make test"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_can_be_filled_in(path: Path) -> None:
    form = parsed(path)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_a_bug_report_has_what_the_doctor_says() -> None:
    fields = {
        field.get("id"): field for field in parsed(FORMS[0].with_name("bug_report.yml"))["body"]
    }
    assert "dpex doctor" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"]["required"]
    assert parsed(FORMS[0].with_name("config.yml"))["blank_issues_enabled"] is False


def run(*command: str | Path, place: Path, seconds: float = 120) -> str:
    """Run a command outside the repository, and without the repository on Python's path."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=place,
        env=environment(place, PYTHONPATH=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel and an sdist as ``make dist`` does, and return their directory."""
    directory = tmp_path_factory.mktemp("dist")
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT),
        place=directory.parent,
    )
    return directory


def wheel_in(dist: Path) -> Path:
    return dist / f"{STEM}-py3-none-any.whl"


def sdist_in(dist: Path) -> Path:
    return dist / f"{STEM}.tar.gz"


@pytest.mark.extended
def test_the_wheel_is_the_package_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(wheel_in(dist)) as wheel:
        names = set(wheel.namelist())
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "dpex").rglob("*")
        if path.suffix in {".py", ".typed"}
    }
    described = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    assert "dpex/py.typed" in package
    assert names == package | {f"{STEM}.dist-info/{name}" for name in described}


@pytest.mark.extended
def test_the_sdist_is_the_repository(dist: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no repository, but perhaps an sdist")
    listed = run(
        *("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"), place=dist
    )
    with tarfile.open(sdist_in(dist)) as sdist:
        names = {name.removeprefix(f"{STEM}/") for name in sdist.getnames()}
    assert names == {*listed.splitlines(), "PKG-INFO"}


@pytest.mark.extended
def test_the_index_can_show_them(dist: Path) -> None:
    run(
        *(sys.executable, "-m", "twine", "check", "--strict"),
        *(wheel_in(dist), sdist_in(dist)),
        place=dist,
    )


def assert_it_works(environment_of: Path, place: Path) -> None:
    """Run the README's code and ``dpex doctor`` with the dpex that an environment has."""
    readme = (ROOT / "README.md").read_text()
    swap = re.search(r"^\+(from .*\n)", readme, re.M)
    code = re.search(r"^```python\n(.*?)^```", readme, re.DOTALL | re.M)
    assert swap is not None
    assert code is not None
    program = place / "readme.py"
    program.write_text(swap[1] + README_DATASET + code[1].replace("    ...\n", README_OUTCOME))
    loaded_from = run(environment_of / "bin" / "python", program, place=place).splitlines()[-1]
    assert Path(loaded_from).is_relative_to(environment_of)
    assert "verdict" in run(environment_of / "bin" / "dpex", "doctor", place=place)


@pytest.mark.extended
@pytest.mark.multiprocess
@pytest.mark.parametrize("packed_in", [wheel_in, sdist_in], ids=["wheel", "sdist"])
def test_it_works_beside_the_dependencies_that_are_here(
    dist: Path, packed_in: Callable[[Path], Path]
) -> None:
    """The wheel and the sdist must have every file that dpex needs.

    The dependencies are those of the tests' environment. The test below checks the dependencies
    that dpex declares.
    """
    with workplace() as place:
        installed = place / "installed"
        _, pip = environment_above(installed)
        run(*pip, "--no-deps", "--no-build-isolation", packed_in(dist), place=place)
        assert_it_works(installed, place)


@pytest.mark.extended
@pytest.mark.multiprocess
@pytest.mark.dist
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", supported_pythons())
def test_it_works_with_what_it_declares_to_depend_on(dist: Path, version: str) -> None:
    """pip installs all declared dependencies, which takes some gigabytes and minutes."""
    with workplace() as place:
        try:
            run(f"python{version}", "-c", "", place=place)
        except (FileNotFoundError, AssertionError):
            pytest.skip(f"there is no python{version} on the PATH")
        installed = place / "installed"
        run(f"python{version}", "-m", "venv", installed, place=place)
        pip = (installed / "bin" / "python", "-m", "pip", "install", "--quiet")
        run(*pip, wheel_in(dist), place=place, seconds=1500)
        assert_it_works(installed, place)
        run(*pip, "--no-deps", "--force-reinstall", sdist_in(dist), place=place)
        assert_it_works(installed, place)
