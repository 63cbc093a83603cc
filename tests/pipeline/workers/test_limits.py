"""A process that computes without end or stands still is told from one on a busy machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from relaxtune.pipeline.workers import limits
from relaxtune.pipeline.workers.limits import AwakeClock, Limit, Limits, Watch


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOOK_S", 0.0)


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", f"print(1, flush=True); {code}"], stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        one.stdout.readline()
        yield one
        for each in [*psutil.Process(one.pid).children(recursive=True), one] if one.poll() is None else []:
            each.kill()


def looked_at(one: subprocess.Popen[str], cpu_s: float, looks: int) -> str | None:
    watch = Watch(one.pid, Limits(cpu_s=cpu_s))
    for _ in range(looks):
        time.sleep(0.02)
        exceeded = watch.exceeded()
        if exceeded:
            assert exceeded[0] is Limit.WORK
            return exceeded[1]
    return None


def test_work_without_end_is_told_by_the_processor_it_took() -> None:
    with process("exec('while True: pass')") as one:
        assert looked_at(one, 0.1, 10_000) == "the process computed for 0.1 s of a processor without an answer"


def test_a_child_that_computes_counts_with_its_parent() -> None:
    child = "exec('while True: pass')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with process(code) as one:
        assert "computed for 0.3 s" in (looked_at(one, 0.3, 10_000) or "")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_does_nothing_stands_still(stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STILL_LOOKS", 5)
    with process("import time; time.sleep(600)") as one:
        if stopped:
            one.send_signal(signal.SIGSTOP)
        assert looked_at(one, 100.0, 10_000) == "the process did nothing for 5 s and gave no answer"


def test_a_process_that_is_gone_is_within_its_limits() -> None:
    with process("") as one:
        one.wait()
        assert looked_at(one, 0.0, 3) is None


def test_seconds_in_which_the_process_was_stopped_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = AwakeClock()
    began = clock.seconds()
    for step in (0.1, 14.0, 0.2, 1.5, 3600.0, 0.3):
        now[0] += step
        clock.seconds()
    assert clock.seconds() - began == pytest.approx(0.1 + 0.2 + 1.5 + 0.3)
