"""The documentation as a site: it is built without a warning, a broken link among them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_site_has_the_pages_and_the_reference(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", "docs", ".", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    reference = tmp_path / "docs" / "reference"
    assert "--time-budget" in (reference / "commands.html").read_text()
    assert "relaxtune.load" in (reference / "api.html").read_text()
    assert "recognise_attention" in (reference / "passes.html").read_text()
    assert (tmp_path / "docs" / "tuning.html").is_file()
