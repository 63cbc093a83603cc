from __future__ import annotations

from types import SimpleNamespace

import pytest

from relaxtune.pipeline.tuning.measure import clock as module
from relaxtune.pipeline.tuning.measure.clock import AwakeClock


def test_seconds_in_which_the_process_was_stopped_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = AwakeClock()
    began = clock.seconds()
    for step in (0.1, 14.0, 0.2, 1.5, 3600.0, 0.3):
        now[0] += step
        clock.seconds()
    assert clock.seconds() - began == pytest.approx(0.1 + 0.2 + 1.5 + 0.3)
