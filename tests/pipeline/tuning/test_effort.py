from __future__ import annotations

from dataclasses import replace

import pytest

from relaxtune.pipeline.tuning.options import LEVELS, Effort, options_for, search_seconds


def test_more_effort_tries_more_and_is_content_later() -> None:
    levels = [LEVELS[effort] for effort in (Effort.QUICK, Effort.NORMAL, Effort.THOROUGH)]
    assert set(LEVELS) == set(Effort)
    assert [level.trials for level in levels] == sorted(level.trials or 0 for level in levels)
    assert [level.population for level in levels] == sorted(level.population for level in levels)
    assert [level.min_gain for level in levels] == sorted((level.min_gain for level in levels), reverse=True)
    assert [bool(level.rerank) for level in levels] == [False, False, True]


@pytest.mark.parametrize(
    ("trials", "time_budget_s", "expected"), [(None, None, 64), (10, None, 10), (None, 5.0, None), (10, 5.0, 10)]
)
def test_limits_asked_for_override_the_level(
    trials: int | None, time_budget_s: float | None, expected: int | None
) -> None:
    options = options_for(Effort.QUICK, trials, time_budget_s)
    assert (options.trials, options.time_budget_s) == (expected, time_budget_s)
    assert options.min_gain == LEVELS[Effort.QUICK].min_gain


def test_the_search_leaves_room_in_a_budget_for_what_comes_before_and_after() -> None:
    options = options_for(Effort.QUICK, None, 30.0)
    assert search_seconds(options) == 30.0
    assert search_seconds(replace(options, reserved_s=12.0)) == 18.0
    assert search_seconds(replace(options, reserved_s=40.0)) == 10.0
    assert search_seconds(options_for(Effort.QUICK, 10, None)) is None
