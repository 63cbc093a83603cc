"""Sessions of pytest: they fail where every test was skipped, and leave out slow cases."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED = "import pytest\n\ndef test_skipped():\n    pytest.skip('no device')\n"
PASSED = "\ndef test_passed():\n    pass\n"
CASES = """
import pytest

@pytest.mark.quick_cases("short", {more})
@pytest.mark.parametrize("case", ["short", "long"])
def test_case(case):
    pass
"""


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


@pytest.mark.parametrize(
    ("more", "code", "said"), [("", 0, "1 passed, 1 deselected"), ("'shorter'", 4, "test_case has no case 'shorter'")]
)
def test_cases_that_a_test_does_not_call_quick_are_slow(more: str, code: int, said: str, tmp_path: Path) -> None:
    ended = run_session(CASES.format(more=more), ("-m", "not slow"), tmp_path)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert said in ended.stdout + ended.stderr


def run_session(tests: str, options: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "test_some.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
