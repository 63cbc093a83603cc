"""An epilogue's float32 form, where that is cheaper than the half precision that it was written in.

A graph in half precision rounds after every operator. Sums of pairs cost least so: one instruction makes two. Around
erf, tanh, exp and their like, which are computed in float32 anyway, roundings cost a conversion each way, and keep the
forms of `schedules.templates.emit.fast_gelu` from being found. There everything is computed in float32 and rounded
once, as kernels of rows and elements do. Not so where a value jumps (rounding to integers, as in quantising): the
roundings before decide to which side.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.tir.expressions import IF_THEN_ELSE, MATH_CALLS, call_names, dtype_of, find_all, rebuild

_HALVES = ("float16", "bfloat16")
_WIDE = "float32"
JUMPS = frozenset(
    f"tirx.{name}" for name in ("floor", "round", "nearbyint", "trunc", "fmod", "isnan", "isinf", "isfinite")
) | {"prim.ceil"}


def in_float32(value: tirx.Expr) -> tirx.Expr:
    """Return a value of half precision computed in float32 and rounded once, where it calls functions of float32.

    Any other value is returned as it is.
    """
    if dtype_of(value) not in _HALVES or not _calls_functions(value):
        return value
    return tirx.Cast(dtype_of(value), _widened(value))


def _calls_functions(value: tirx.Expr) -> bool:
    """Whether a value calls functions, and none that jumps."""
    casts = find_all(value, tirx.Cast)
    if any("float" in dtype_of(cast.value) and "float" not in dtype_of(cast) for cast in casts):
        return False
    names, smooth = call_names(value), MATH_CALLS - JUMPS
    return bool(names & smooth) and names <= smooth | {IF_THEN_ELSE}


def _widened(value: tirx.Expr) -> tirx.Expr:
    """Return a value with everything of half precision in float32."""
    is_half = dtype_of(value) in _HALVES
    if isinstance(value, (TensorLoad, tirx.Var)):
        return tirx.Cast(_WIDE, value) if is_half else value
    if isinstance(value, tirx.FloatImm):
        return tirx.FloatImm(_WIDE, value.value) if is_half else value
    if isinstance(value, tirx.Cast):
        inner, dtype = _widened(value.value), _WIDE if is_half else dtype_of(value)
        return inner if dtype_of(inner) == dtype else tirx.Cast(dtype, inner)
    if isinstance(value, Call) and is_half:
        return Call(value.op, [_widened(argument) for argument in value.args], ret_ty=_WIDE)
    return rebuild(value, _widened)
