"""What earlier runs spare this one."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.tuning.options import SEARCHED_ROUTES, TuningOptions
from pipeline.tuning.state import TaskState, decision_key
from tuning_db.records import Route, Status, TuningRecord


def take_known(state: TaskState, known: Sequence[TuningRecord], options: TuningOptions) -> None:
    """Let a task start where earlier runs of it, on this device, left off."""
    for record in known:
        latency_us = record.latency_us if record.status is Status.OK else None
        if latency_us is not None:
            state.offer(record.route, latency_us)
            if record.route is Route.FALLBACK:
                state.before_us = latency_us
        if record.route in SEARCHED_ROUTES:
            state.known += latency_us is not None
            state.decided[decision_key(record.decision)] = None if latency_us is None else latency_us / 1e6
    searched = sum(record.route is Route.METASCHEDULE for record in known)
    state.progress = [state.best_us] * (searched // options.trials_per_iteration)
    if state.known >= options.enough_records:
        state.skipped = f"{state.known} valid records of it are known (mode force measures again)"
