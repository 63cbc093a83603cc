"""What the sanitizer's script makes of a tool's report and pytest's counts; the tool is a stand-in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.sanitize_kernels import Outcome, gpu_tests, sanitize

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


def outcome_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, report: str, suite: str) -> Outcome:
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(_STAND_IN.format(python=sys.executable, report=report, suite=suite))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return sanitize(Path("test_gemm_gpu.py"), tool, "", tmp_path, threads=1, timeout_s=60)


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
    assert outcome.passed == (0 if not suite or 'skipped="9"' in suite else 6 if 'failures="1"' in suite else 7)


def test_there_are_gpu_tests_of_every_template() -> None:
    names = {path.name for path in gpu_tests()}
    assert names >= {"test_gemm_sm90_gpu.py", "test_attention_sm90_gpu.py", "test_memory_bound_gpu.py"}
