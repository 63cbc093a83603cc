"""When the search of a task ends before the limits of the run are reached."""

from __future__ import annotations

from relaxtune.pipeline.tuning.plan.state import TaskState

# How the reason begins where a task ended for what it promises.
SETTLED = "settled"


def reason_to_end(state: TaskState, model_us: float, min_gain: float, bound_us: float | None = None) -> str | None:
    """Return why a task is not worth another round, or None when it is; templates are measured in any case.

    Parameters
    ----------
    model_us : float
        Microseconds of all kernels of one inference.
    min_gain : float
        The part of it that a round has to promise.
    bound_us : float or None
        Microseconds below which no candidate of the search can be, where that is known.
    """
    if state.templates is not None and not state.templates.done:
        return None
    gain_us = state.expected_gain_us()
    if gain_us < min_gain * model_us:
        return f"{SETTLED}: a round is expected to save {gain_us:.2f} of {model_us:.0f} us"
    if bound_us is not None and state.best_us is not None and bound_us > state.best_us:
        return f"no search: without tensor cores at least {bound_us:.1f} us, the best is {state.best_us:.1f}"
    return None
