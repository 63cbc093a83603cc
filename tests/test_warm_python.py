"""Processes that start warm, and those that they start."""

from __future__ import annotations

import sys

import pytest

from tests import warm_python


@pytest.mark.skipif(not warm_python.possible(), reason="processes do not start warm here")
def test_what_a_warm_process_starts_is_warm_too() -> None:
    code = "from relaxtune.pipeline.workers import process; print(process.subprocess.Popen.__module__)"
    assert warm_python.run([sys.executable, "-c", code], timeout=120).stdout == "tests.warm_python\n"


@pytest.mark.skipif(not warm_python.possible(), reason="processes do not start warm here")
def test_an_interrupt_that_a_warm_process_took_does_not_decide_its_exit_code() -> None:
    code = "import sys\ntry:\n    exec('raise KeyboardInterrupt')\nexcept KeyboardInterrupt:\n    sys.exit(130)"
    assert warm_python.run([sys.executable, "-c", code], timeout=120).returncode == 130
