"""The rule for the steps of a recurrent layer on a GPU."""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.target import Target

from relaxtune.schedules.functions.recurrence import layer_of, recurrence_function


def recurrence(func: tirx.PrimFunc, _target: Target) -> Schedule | None:
    """Return the steps of a recurrent layer as a kernel each; None for other functions."""
    layer = layer_of(func)
    return None if layer is None else Schedule(recurrence_function(layer, on_gpu=True).with_attrs(func.attrs))
