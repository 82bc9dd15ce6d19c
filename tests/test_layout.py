"""Tests of the package's structure: the direction of imports, and when Ray is loaded."""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dpex

PACKAGE = Path(dpex.__file__).parent
# Layers, from the training process to the bytes of a batch. A layer imports no earlier layer.
LAYERS = ["dpex.training", "dpex.carriers", "dpex.worker", "dpex.wire"]
# Modules of these folders may import Ray, except WITHOUT_RAY. Of other folders, WITH_RAY may.
RAY_FOLDERS = ("dpex.carriers.ray", "dpex.cluster", "dpex.compat")
WITHOUT_RAY = {
    *("dpex.compat.private_names", "dpex.compat.torch_names", "dpex.compat.untraced"),
    "dpex.compat.late_calls",
    *("dpex.cluster.machine_share", "dpex.cluster.own_process", "dpex.carriers.ray.worker_options"),
}
WITH_RAY = {
    "dpex.wire.receiver",
    "dpex.worker.actor_calls",
    "dpex.worker.kept_jobs",
    "dpex.worker.task",
}
# Other modules that may import a module which imports Ray.
DOORS_TO_RAY = {"dpex.carriers.choice", "dpex.dataloader", "dpex.doctor.report"}
# The sessions of the carriers, and the one module that may import them.
SESSIONS = {"dpex.carriers.processes.session", "dpex.carriers.ray.session"}
CHOICE = "dpex.carriers.choice"
# Modules that the protocol must not import.
IMPURE = {"asyncio", "multiprocessing", "os", "ray", "threading", "time", "torch"}
# Only the module of the same name in dpex.integrations may import a framework.
FRAMEWORKS = {"accelerate", "lightning", "transformers"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def targets(module: str, node: ast.AST) -> set[str]:
    """Return the absolute names of the modules that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    base = node.module or ""
    if node.level:
        package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        base = f"{package}.{base}".rstrip(".")
    # `from dpex.carriers.ray import actor` names the module dpex.carriers.ray.actor, if it exists,
    # and else the package.
    names = {f"{base}.{alias.name}" for alias in node.names}
    return (names & MODULES.keys()) | ({base} if names - MODULES.keys() else set())


@functools.cache
def imports(module: str) -> set[str]:
    """Return the modules that a module imports, also in functions and for annotations."""
    return {
        name
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        for name in targets(module, node)
    }


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def reaches_ray(module: str) -> bool:
    inside = any(is_within(module, folder) for folder in RAY_FOLDERS)
    return (inside and module not in {*RAY_FOLDERS, *WITHOUT_RAY}) or module in WITH_RAY


@functools.cache
def assigned_all(path: Path) -> list[str] | None:
    for node in ast.parse(path.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("module", MODULES)
def test_only_some_modules_import_ray(module: str) -> None:
    if not reaches_ray(module):
        assert not {name for name in imports(module) if is_within(name, "ray")}


@pytest.mark.parametrize("module", MODULES)
def test_only_its_doors_reach_ray(module: str) -> None:
    if not reaches_ray(module) and module not in DOORS_TO_RAY:
        assert not {name for name in imports(module) if reaches_ray(name)}


def test_one_module_imports_the_carriers_and_the_loader_imports_it() -> None:
    assert {module for module in MODULES if imports(module) & SESSIONS} == {CHOICE}
    assert {module for module in MODULES if CHOICE in imports(module)} == {"dpex.dataloader"}
    assert imports(CHOICE) >= SESSIONS


@pytest.mark.parametrize("module", [m for m in MODULES if is_within(m, "dpex.carriers.processes")])
def test_worker_processes_of_this_machine_need_no_ray(module: str) -> None:
    assert not {name for name in imports(module) if reaches_ray(name) or is_within(name, "ray")}


@pytest.mark.parametrize("module", [m for m in MODULES if is_within(m, "dpex.protocol")])
def test_the_protocol_is_pure(module: str) -> None:
    """It has no thread, no clock and no I/O, so that the simulation can run it."""
    ours = {name for name in imports(module) if is_within(name, "dpex")}
    assert {n for n in ours if not is_within(n, "dpex.protocol")} <= {"dpex.errors", "dpex.tuning"}
    assert imports(module).isdisjoint(IMPURE)


@pytest.mark.parametrize("number", range(1, len(LAYERS)))
def test_a_layer_imports_none_before_it(number: int) -> None:
    upwards = {
        f"{module} imports {name}"
        for module in MODULES
        if is_within(module, LAYERS[number])
        for name in imports(module)
        if any(is_within(name, before) for before in LAYERS[:number])
    }
    assert not upwards


@pytest.mark.parametrize("module", MODULES)
def test_a_framework_is_imported_by_its_own_integration_alone(module: str) -> None:
    named = {name.partition(".")[0] for name in imports(module)}
    own = {module.rpartition(".")[2]} if is_within(module, "dpex.integrations") else set()
    assert not (named & FRAMEWORKS) - own


@pytest.mark.parametrize("module", MODULES)
def test_nothing_depends_on_an_integration_but_integrations(module: str) -> None:
    if not is_within(module, "dpex.integrations"):
        named = imports(module)
        assert not {name for name in named if is_within(name, "dpex.integrations")}


def test_no_import_cycles() -> None:
    # Python runs the __init__ of a module's packages before the module. That is no edge here. It is
    # harmless unless an __init__ imports the module at its top level, and that import is an edge.
    graph = {
        module: {name for name in imports(module) if name in MODULES and name != module}
        for module in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import one another: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("module", MODULES)
def test_all_is_sorted(module: str) -> None:
    names = assigned_all(MODULES[module])
    if names is not None:
        assert names == sorted(set(names))


def used_names(module: str) -> dict[str, set[str]]:
    """Return the names that a module uses of other modules, by module."""
    tree = ast.parse(MODULES[module].read_text())
    found: dict[str, set[str]] = defaultdict(set)
    bound: dict[str, str] = {}  # names of imported modules
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in MODULES:
                    bound[alias.asname or alias.name] = name
                else:
                    found[node.module].add(alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = bound.get(node.value.id, "")
            if name and not node.attr.startswith("__"):
                found[name].add(node.attr)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_uses_only_names_in_all_of_others(module: str) -> None:
    missing = {
        other: names - set(public)
        for other, names in used_names(module).items()
        if (public := assigned_all(MODULES[other])) is not None and names - set(public)
    }
    assert not missing


def test_all_of_the_package_exists() -> None:
    assert dpex.__all__ == sorted(set(dpex.__all__))
    missing = [name for name in dpex.__all__ if not hasattr(dpex, name)]
    assert not missing


def test_py_typed_is_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_no_drawer_for_odds_and_ends() -> None:
    assert not [name for name in MODULES if name.rpartition(".")[2] in {"utils", "helpers"}]


def run_python(code: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )
    assert finished.returncode == 0, finished.stderr


def test_import_and_construction_leave_ray_alone() -> None:
    run_python(
        """
import sys
import dpex
assert "ray" not in sys.modules, "import dpex imports ray"
import threading
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
def children():
    return Path("/proc/self/task").glob("*/children") if sys.platform == "linux" else []
def child_pids():
    return {pid for path in children() for pid in path.read_text().split()}
pids, threads = child_pids(), threading.active_count()
loader = dpex.DpexDataLoader(
    TensorDataset(torch.arange(8)), batch_size=2, num_workers=2, distribute_mode=True
)
assert len(loader) == 4
assert "ray" not in sys.modules, "constructing a loader imports ray"
assert child_pids() == pids, "constructing a loader starts a process"
assert threading.active_count() == threads, "constructing a loader starts a thread"
"""
    )


def test_plain_mode_leaves_ray_alone() -> None:
    run_python(
        """
import sys
import torch
from torch.utils.data import TensorDataset
from dpex import DpexDataLoader
dataset = TensorDataset(torch.arange(8))
assert len(list(DpexDataLoader(dataset, batch_size=2))) == 4
assert len(list(DpexDataLoader(dataset, batch_size=2, distribute_mode=True))) == 4
assert "ray" not in sys.modules
"""
    )


def test_the_pipeline_actor_and_the_stage_that_starts_tasks_do_not_load_torch() -> None:
    run_python(
        """
import sys
import dpex.carriers.ray.actor
import dpex.worker.task
assert "torch" not in sys.modules
"""
    )


def test_the_command_line_waits_for_nothing() -> None:
    run_python(
        """
import sys
from dpex.__main__ import main
try:
    main(["doctor", "--help"])
except SystemExit:
    pass
assert not {"ray", "torch"} & set(sys.modules), "a mistyped command imports torch"
"""
    )


TUNING = re.compile(
    r"^_?[A-Z][A-Z0-9_]*_(S|SECONDS|BYTES|SHARE|TRIES)(: \S+)? = [0-9.]", re.MULTILINE
)


def test_every_time_and_size_that_tunes_dpex_is_in_one_module() -> None:
    elsewhere = {
        module: [match[0] for match in TUNING.finditer(path.read_text())]
        for module, path in MODULES.items()
        if not module.startswith(("dpex.datasets", "dpex.doctor"))
    }
    found = {module for module, names in elsewhere.items() if names}
    assert found == {"dpex.tuning", "dpex.dataloader"}, elsewhere
    public = [n for n in elsewhere["dpex.dataloader"] if not n.startswith("DEFAULT_")]
    assert public == [], "only defaults of public arguments stay with the arguments"


def test_every_tuning_constant_is_used_and_says_why() -> None:
    tree = ast.parse(MODULES["dpex.tuning"].read_text())
    names = {n.targets[0].id: at for at, n in enumerate(tree.body) if isinstance(n, ast.Assign)}
    for name, at in names.items():
        reason = tree.body[at + 1]
        assert isinstance(reason, ast.Expr), f"{name} has no reason"
    used = {
        node.attr
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "tuning"
    }
    assert used == names.keys()
