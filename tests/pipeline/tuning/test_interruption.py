"""Ctrl-C and SIGTERM: the first asks for the end, the second ends at once, and nothing measured is exit code 130."""

from __future__ import annotations

import os
import signal

import pytest

from relaxtune.pipeline.cli.app import exit_code_of
from relaxtune.pipeline.errors import InterruptedEarlyError
from relaxtune.pipeline.jobs.tuned_model import require_kept
from relaxtune.pipeline.tuning.measure.stop import StopSignal, ctrl_c_requests
from relaxtune.pipeline.tuning.options import TaskSummary, TuningSummary


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_for_the_end_and_the_second_raises(first, second) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stop = StopSignal(None)
    with ctrl_c_requests(stop):
        os.kill(os.getpid(), first)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def summary(after_us: float | None) -> TuningSummary:
    task = TaskSummary(None, 0, 0, {}, 0, None, after_us, None, 1, 0.0, 0.0)  # type: ignore[arg-type]
    return TuningSummary((task,), 1.0, {}, interrupted=True)


def test_interrupted_before_anything_was_measured_is_exit_code_130() -> None:
    with pytest.raises(InterruptedEarlyError, match=r"no artifact was written. Run the same command again") as raised:
        require_kept(summary(None))
    assert exit_code_of(raised.value) == 130
    require_kept(summary(12.5))
