"""`tests.guardrails.cluster_faults` with few kills; twenty are run by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_a_plan_ends_the_same_on_a_broken_cluster() -> None:
    command = [sys.executable, "-m", "tests.guardrails.cluster_faults", "--kills", "3"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    assert ended.returncode == 0, ended.stdout
