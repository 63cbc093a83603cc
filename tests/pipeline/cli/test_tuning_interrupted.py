"""Runs of `tune` that Ctrl-C or SIGTERM ends: what they keep, print and return."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relaxtune.tuning_db.errors import TuningDatabaseError
from relaxtune.tuning_db.records import Mode, RecordFilter, Route, Status
from relaxtune.tuning_db.store import TuningDatabase
from tests import warm_python
from tests.pipeline.cli.classifier import classifier

ROOT = Path(__file__).parents[3]

# The first measurement takes until the run is stopped.
NOTHING_MEASURED = """
import time
from relaxtune.pipeline.tuning.local import measuring_process as module
assert hasattr(module.MeasuringProcess, "_check")
def wait(process, *_):
    while not process._worker._stopped: time.sleep(0.05)
    raise module._NoAnswerError(module._STOPPED)
module.MeasuringProcess._check = wait
"""
# What follows the search takes minutes: a second Ctrl-C comes in the middle of it, however fast the machine is.
SLOW_END = (
    "import time; from relaxtune.pipeline.jobs import compile_and_tune as jobs; "
    "jobs.compile_module = lambda *a, **k: time.sleep(600); "
)


@pytest.fixture
def tuning_process(request, tmp_path_factory, tmp_path) -> Iterator[subprocess.Popen[str]]:
    """A real run of `tune` that would go on for minutes, in a session of its own."""
    model = tmp_path_factory.mktemp("model") / "classifier.onnx"
    model.write_bytes(classifier().SerializeToString())
    program = getattr(request, "param", "") + "from relaxtune.pipeline.cli import main; main()"
    command = [sys.executable, "-c", program, "tune", str(model)]
    options = ["--target", "llvm", "--shape", "x=64x32", "--trials", "5000", "--no-bench"]
    job = warm_python.Popen(
        [*command, *options, "--db", str(tmp_path / "tuning.db"), "--out", str(tmp_path / "artifact")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    yield job
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.communicate()


def _wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline, "it has not happened within 120 s"
        time.sleep(0.2)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_still_compiles(tuning_process, tmp_path) -> None:
    database, artifact = tmp_path / "tuning.db", tmp_path / "artifact"
    _wait_for(lambda: _valid_records(database))
    tuning_process.send_signal(signal.SIGINT)
    stdout, stderr = tuning_process.communicate(timeout=120)
    assert tuning_process.returncode == 0, stderr
    assert "interrupted" in stdout
    assert "validation of classifier: passed" in stdout
    printed = " ".join(stdout.split())
    assert printed.endswith(f"artifact: {artifact} next: relaxtune report {artifact}; relaxtune bench {artifact}")
    assert json.loads((artifact / "manifest.json").read_text())["validation"]["passed"]
    with TuningDatabase.open(database) as opened:
        (recorded,) = opened.list_jobs()
        assert recorded.outcome == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("tuning_process", [SLOW_END], indirect=True, ids=["slow-end"])
def test_a_second_ctrl_c_half_a_second_later_ends_the_run_and_keeps_what_was_measured(tuning_process, tmp_path) -> None:
    _wait_for(lambda: _valid_records(tmp_path / "tuning.db"))
    tuning_process.send_signal(signal.SIGINT)
    # On a busy machine, two signals that a process has not seen yet are one.
    assert any("stopping" in line for line in tuning_process.stderr)
    time.sleep(0.5)
    tuning_process.send_signal(signal.SIGINT)
    _, stderr = tuning_process.communicate(timeout=120)
    assert tuning_process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "artifact").exists()
    assert _valid_records(tmp_path / "tuning.db")


@pytest.mark.parametrize("tuning_process", [NOTHING_MEASURED], indirect=True, ids=["held"])
def test_sigterm_before_anything_was_measured_is_130_and_leaves_nothing(tuning_process, tmp_path) -> None:
    _wait_for((tmp_path / "tuning.db").exists)
    tuning_process.terminate()
    _, stderr = tuning_process.communicate(timeout=60)
    assert tuning_process.returncode == 130, stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("tuning.db")] == []


def _valid_records(database: Path) -> int:
    if not database.exists():
        return 0
    try:
        with TuningDatabase.open(database, mode=Mode.READ_ONLY, create=False) as opened:
            return opened.count_records(RecordFilter(status=Status.OK, route=Route.METASCHEDULE))
    except TuningDatabaseError:
        # The job is creating it at this moment.
        return 0
