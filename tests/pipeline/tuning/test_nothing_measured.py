"""A run without any valid candidate."""

from __future__ import annotations

import dataclasses

import pytest

from relaxtune.pipeline.errors import NothingMeasuredError
from relaxtune.pipeline.tuning.options import TuningSummary
from relaxtune.pipeline.tuning.session import require_valid
from relaxtune.tuning_db.records import Status
from tests.pipeline.tuning.tuning_cases import settled_task


def test_require_valid_raises_when_every_candidate_failed() -> None:
    error = "Traceback\nValueError: no such intrinsic"
    failed = dataclasses.replace(settled_task(), valid=0, failures={Status.BUILD_ERROR: 2}, known=0, last_error=error)
    summary = TuningSummary((failed,), 1.0, {"build": 1.0}, interrupted=False)
    with pytest.raises(NothingMeasuredError, match=r"2 build_error.*ValueError: no such intrinsic") as raised:
        require_valid(summary)
    assert raised.value.exit_code == 4
    require_valid(dataclasses.replace(summary, tasks=(dataclasses.replace(failed, known=1),)))
    require_valid(dataclasses.replace(summary, tasks=()))
    untried = dataclasses.replace(failed, failures={}, failed=0, last_error=None)
    require_valid(dataclasses.replace(summary, tasks=(untried,)))  # No time is no fault.
