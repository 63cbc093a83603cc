"""The folders are the architecture: imports point one way, and the light packages stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("models", "schedules", "tuning_db", "pipeline")
ALLOWED = {
    "models": set(),
    "schedules": set(),
    "tuning_db": set(),
    "pipeline": {"models", "schedules", "tuning_db"},
}


def imported_roots(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.split(".")[0])
    return roots


def imported_modules(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        foreign = (imported_roots(path) & set(PACKAGES)) - {package} - ALLOWED[package]
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_only_the_command_line_imports_the_command_line() -> None:
    for path in (ROOT / "pipeline").rglob("*.py"):
        if "cli" in path.relative_to(ROOT).parts:
            continue
        above = {module for module in imported_modules(path) if module.startswith("pipeline.cli")}
        assert not above, f"{path.relative_to(ROOT)} imports {sorted(above)}"


@pytest.mark.parametrize("module", ["models", "tuning_db", "tuning_db.store"])
def test_package_imports_without_tvm(module: str) -> None:
    code = f"import sys, {module}; sys.exit('tvm' in sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_tuning_db_needs_tvm_in_its_adapter_only() -> None:
    users = {
        path.parent.name for path in (ROOT / "tuning_db").rglob("*.py") if {"tvm", "tvm_ffi"} & imported_roots(path)
    }
    assert users <= {"metaschedule"}
