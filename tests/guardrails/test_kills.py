"""A few rounds of `tests.guardrails.kills` and `tests.guardrails.interrupts`; hundreds are run by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_disturbed_runs_lose_and_invent_nothing(database: str) -> None:
    command = [sys.executable, "-m", "tests.guardrails.kills", "--database", database, "--rounds", "10"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.nightly
def test_interrupted_commands_end_soon_and_leave_nothing() -> None:
    command = [sys.executable, "-m", "tests.guardrails.interrupts", "--rounds", "32"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout
