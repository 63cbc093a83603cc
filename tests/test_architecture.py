"""The folders are the architecture: imports point one way, rooms form no circle, and the light packages stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from relaxtune.pipeline.batch.unchanged import NOT_OF_ARTIFACTS

ROOT = Path(__file__).parent.parent
PACKAGES = ("models", "schedules", "tuning_db", "pipeline")
ALLOWED = {
    "models": set(),
    "schedules": set(),
    "tuning_db": set(),
    "pipeline": {"models", "schedules", "tuning_db"},
}
MAX_FILES = 18  # of a room, its `__init__.py` among them
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("relaxtune", *parts)).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCES}


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Return what a file imports, `from package import module` as the module; imports inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found.update(inside)
            if len(inside) < len(node.names):
                found.add(node.module)
    return frozenset(found)


def own_imports(path: Path) -> set[str]:
    return {module for module in imported_modules(path) if module in MODULES}


def room_of(module: str, under: str) -> str | None:
    """Return the child of the package `under` that holds `module`: a folder, or a file of `under` itself."""
    return module[len(under) + 1 :].split(".")[0] if module.startswith(f"{under}.") else None


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of nodes that reach each other (Tarjan's strongly connected components, by reachability)."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for there in edges.get(todo.pop(), set()) - seen:
                seen.add(there)
                todo.append(there)
        return seen

    reached = {node: reach(node) for node in edges}
    groups = {frozenset(there for there in reached[node] if node in reached.get(there, set())) for node in edges}
    return [set(group) for group in groups if len(group) > 1]


def test_rooms_that_no_accepted_cell_depends_on_make_no_artifact() -> None:
    reached, todo = set(), ["relaxtune.pipeline.jobs.compile_and_tune"]
    while todo:
        reached.add(module := todo.pop())
        todo += own_imports(MODULES[module]) - reached
    rooms = tuple(f"relaxtune.{room.replace('/', '.')}" for room in NOT_OF_ARTIFACTS)
    assert sorted(module for module in reached if module.startswith(rooms)) == []
    assert all((ROOT / room).is_dir() for room in NOT_OF_ARTIFACTS)


@pytest.mark.parametrize(
    "package",
    [
        "models",
        "schedules",
        "tuning_db",
        "pipeline",
    ],
)
def test_imports_point_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        roots = {module.split(".")[1] for module in own_imports(path) if "." in module}
        foreign = (roots & set(PACKAGES)) - {package} - ALLOWED[package]
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_everything_of_ours_is_imported_by_its_one_name() -> None:
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        bare = {module for module in imported_modules(path) if module.split(".")[0] in PACKAGES}
        assert not bare, f"{path.relative_to(ROOT)} imports {sorted(bare)}; write relaxtune.{min(bare)}"


def test_only_the_command_line_imports_the_command_line() -> None:
    for path in (ROOT / "pipeline").rglob("*.py"):
        if "cli" in path.relative_to(ROOT).parts:
            continue
        above = {module for module in own_imports(path) if module.startswith("relaxtune.pipeline.cli")}
        assert not above, f"{path.relative_to(ROOT)} imports {sorted(above)}"


def test_only_the_room_of_targets_knows_architectures_by_name() -> None:
    for path in SOURCES:
        if path.is_relative_to(ROOT / "schedules/targets"):
            continue
        texts = [n.value for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Constant)]
        named = [text for text in texts if isinstance(text, str) and re.fullmatch(r"sm_(\d+[af]?)?", text)]
        assert not named, f"{path.relative_to(ROOT)} has {named}; ask relaxtune.schedules.targets.Feature instead"


def test_files_form_no_circle() -> None:
    assert circles({name: own_imports(path) - {name} for name, path in MODULES.items()}) == []


@pytest.mark.parametrize("folder", sorted({str(path.parent.relative_to(ROOT)) for path in SOURCES}))
def test_rooms_form_no_circle(folder: str) -> None:
    under = module_name(ROOT / folder / "__init__.py")
    edges: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        here = room_of(name, under)
        if here is not None:
            there = {room_of(module, under) for module in own_imports(path)} - {None, here}
            edges.setdefault(here, set()).update(room for room in there if room)
    assert circles(edges) == []


@pytest.mark.parametrize("top", [*PACKAGES, "benchmarks"])
def test_rooms_are_not_crowded(top: str) -> None:
    files = Counter(str(path.parent.relative_to(ROOT)) for path in (ROOT / top).rglob("*.py"))
    assert {folder: count for folder, count in files.items() if count > MAX_FILES} == {}


@pytest.mark.parametrize(
    "module",
    [
        "relaxtune.models",
        "relaxtune.tuning_db",
        "relaxtune.tuning_db.store",
        # What a cluster's worker imports before it starts the process that compiles.
        "relaxtune.pipeline.tuning.local.build_pool",
    ],
)
def test_package_imports_without_tvm(module: str) -> None:
    code = f"import sys, {module}; sys.exit('tvm' in sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_tuning_db_needs_tvm_in_its_adapter_only() -> None:
    users = {
        path.stem
        for path in (ROOT / "tuning_db").rglob("*.py")
        if {"tvm", "tvm_ffi"} & {module.split(".")[0] for module in imported_modules(path)}
    }
    assert users <= {"metaschedule"}
