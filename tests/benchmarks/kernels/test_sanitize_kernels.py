"""What the sanitizer's script makes of a tool's report and pytest's counts; the tool is a stand-in."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.kernels.sanitize_kernels import Outcome, gpu_tests, runs_of, sanitize

pytestmark = pytest.mark.slow

_STAND_IN = """\
#!{python}
import sys
from pathlib import Path
log = sys.argv[sys.argv.index("--log-file") + 1]
junit = next(a for a in sys.argv if a.startswith("--junitxml=")).removeprefix("--junitxml=")
Path(log).write_text({report!r})
if {suite!r}:
    Path(junit).write_text("<testsuites><testsuite {{}}/></testsuites>".format({suite!r}))
"""


def put_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def outcome_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, report: str, suite: str) -> Outcome:
    put_on_path(tmp_path, monkeypatch, _STAND_IN.format(python=sys.executable, report=report, suite=suite))
    return sanitize(["tests/test_gemm_gpu.py::test_kernel"] * 7, tool, tmp_path / "run", timeout_s=60)


@pytest.mark.parametrize(
    ("tool", "report", "suite", "clean"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 'tests="9" skipped="2" failures="0" errors="0"', True),
        ("memcheck", "========= ERROR SUMMARY: 1 error", 'tests="9" skipped="2" failures="0" errors="0"', False),
        (
            "racecheck",
            "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)",
            'tests="9" skipped="2" failures="0" errors="0"',
            False,
        ),
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 'tests="9" skipped="9" failures="0" errors="0"', False),
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 'tests="9" skipped="2" failures="1" errors="0"', False),
        ("memcheck", "========= ERROR SUMMARY: 0 errors", "", False),
        (
            "synccheck",
            "========= Target application terminated",
            'tests="9" skipped="2" failures="0" errors="0"',
            False,
        ),
    ],
    ids=["clean", "error", "hazards", "none ran", "failed", "pytest did not end", "tool did not end"],
)
def test_only_a_whole_run_without_findings_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, report: str, suite: str, clean: bool
) -> None:
    outcome = outcome_of(tmp_path, monkeypatch, tool, report, suite)
    assert outcome.clean == clean
    failed = 7 if not suite else 1 if 'failures="1"' in suite else 0
    assert (outcome.passed, outcome.failed) == (0 if 'skipped="9"' in suite else 7 - failed, failed)


@pytest.mark.timing
def test_a_run_that_takes_too_long_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = tmp_path / "alive"
    # As the tool does with pytest, it starts a process and waits for it; that one would write the file later.
    slow = f"#!/bin/sh\n(sleep 2; touch {alive}) &\nwait\n"
    put_on_path(tmp_path, monkeypatch, slow)
    outcome = sanitize(["tests/test_gemm_gpu.py::test_kernel"], "memcheck", tmp_path / "run", timeout_s=0.5)
    assert outcome.seconds < 2
    assert not outcome.clean
    assert outcome.failed == 1
    time.sleep(2)
    assert not alive.exists()


def test_both_runs_must_be_clean() -> None:
    clean, hazard = Outcome(3, 0, 0, "0 errors", 1.5), Outcome(2, 0, 1, "1 error", 2.0)
    unfinished = Outcome(0, 2, None, "no summary", 3.0)
    assert clean + clean == Outcome(6, 0, 0, "0 errors", 3.0)
    assert clean + hazard == hazard + clean == Outcome(5, 0, 1, "1 error", 3.5)
    assert hazard + unfinished == unfinished + hazard == Outcome(2, 2, None, "no summary", 5.0)
    assert [(clean + one).clean for one in (clean, hazard, unfinished)] == [True, False, False]


def test_every_test_is_in_one_run_of_its_file() -> None:
    tests = [f"tests/a.py::test[{number}]" for number in range(12)] + ["tests/b.py::test"]
    runs = runs_of(tests, 5)
    assert [len(run) for run in runs] == [4, 4, 4, 1]
    assert sorted(test for run in runs for test in run) == sorted(tests)
    assert all(len({test.partition("::")[0] for test in run}) == 1 for run in runs)


def test_there_are_gpu_tests_of_every_template() -> None:
    names = {Path(test.partition("::")[0]).stem for test in gpu_tests("")}
    kernels = {
        "gemm_sm90_gpu",
        "gemm_sm90_norm",
        "attention_sm90_gpu",
        "gemm_sm80_gpu",
        "attention_sm80_gpu",
        "memory_bound_gpu",
        "gemv_gpu",
    }
    assert names >= {f"test_{kernel}" for kernel in kernels}
    assert "test_libraries_gpu" not in names
