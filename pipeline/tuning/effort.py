"""Named levels of effort: how much a tuning run tries before it is content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from relaxtune.pipeline.efforts import Effort
from relaxtune.pipeline.tuning.options import TuningOptions

#: What each level is made of; everything else is the default of `TuningOptions`.
LEVELS: Mapping[Effort, TuningOptions] = {
    # A first look: the kernels that take most of the time, one or two rounds each.
    Effort.QUICK: TuningOptions(trials=64, population=32, min_gain=0.005, finals=5, warm_start_s=2.0),
    Effort.NORMAL: TuningOptions(trials=256, population=64, min_gain=0.001),
    # All that templates offer, a search until a round saves a ten-thousandth, and a look at the whole model.
    Effort.THOROUGH: TuningOptions(
        trials=2048,
        population=128,
        min_gain=0.0001,
        finals=11,
        warm_start_s=15.0,
        all_templates=True,
        rerank=6,
        norm_forms=True,
    ),
}


def options_for(effort: Effort, trials: int | None, time_budget_s: float | None) -> TuningOptions:
    """Return the options of a level with the limits asked for.

    Parameters
    ----------
    trials, time_budget_s : number or None
        A time budget alone leaves the candidates unlimited; neither leaves the level's own.
    """
    level = LEVELS[effort]
    wanted = trials if trials is not None or time_budget_s is not None else level.trials
    return replace(level, trials=wanted, time_budget_s=time_budget_s)
