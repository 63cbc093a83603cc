from __future__ import annotations

import pytest

from relaxtune.pipeline.tuning.options import LEVELS, Effort, options_for


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
