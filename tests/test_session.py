"""A session of pytest in which every test was skipped fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED = "import pytest\n\ndef test_skipped():\n    pytest.skip('no device')\n"
PASSED = "\ndef test_passed():\n    pass\n"


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
@pytest.mark.parametrize(("tests", "code"), [(SKIPPED, 1), (SKIPPED + PASSED, 0)], ids=["skipped", "one passed"])
def test_session_fails_when_every_test_was_skipped(
    tests: str, code: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_some.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stdout + ended.stderr
