"""A session of pytest in which every test was skipped fails; one that only lists the tests does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED = "import pytest\n\ndef test_skipped():\n    pytest.skip('no device')\n"
PASSED = "\ndef test_passed():\n    pass\n"


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
@pytest.mark.parametrize(("tests", "code"), [(SKIPPED, 1), (SKIPPED + PASSED, 0)], ids=["skipped", "one passed"])
def test_session_fails_when_every_test_was_skipped(
    tests: str, code: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    ended = run_session(tests, options, tmp_path)
    assert ended.returncode == code, ended.stdout + ended.stderr


def test_a_list_of_tests_with_a_module_that_is_skipped_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "test_left_out.py").write_text("import pytest\n\npytest.importorskip('there_is_no_such_module')\n")
    ended = run_session(PASSED, ("--collect-only",), tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def run_session(tests: str, options: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "test_some.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
