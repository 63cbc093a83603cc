"""Evaluate a matmul's epilogue on registers, in the fast forms of its functions; for all kernels of matmuls.

A graph in half precision rounds after every operator. Sums of pairs cost least so: one instruction makes two. Around
erf, tanh, exp and their like, which are computed in float32 anyway, roundings cost a conversion each way, and keep the
forms of `schedules.templates.emit.fast_math` from being found. There everything is computed in float32 and rounded
once (`in_float32`), as kernels of rows and elements do. Not so where a value jumps (rounding to integers, as in
quantising): the roundings before decide to which side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.templates.emit.fast_math import fast_call, fast_gelu
from relaxtune.schedules.tir.blocks import narrow
from relaxtune.schedules.tir.epilogue import Epilogue
from relaxtune.schedules.tir.expressions import (
    IF_THEN_ELSE,
    MATH_CALLS,
    call_names,
    dtype_of,
    find_all,
    rebuild,
    substitute,
)


def output_axes(epilogue: Epilogue, row: tirx.Expr, column: tirx.Expr) -> dict[tirx.Var, tirx.Expr]:
    """Return the position along each axis of the output, in the axes' dtypes, of a row and a column."""
    indices: list[tirx.Expr] = [column]
    for whole in reversed(epilogue.shape[:-1]):
        size = narrow(whole)
        indices.insert(0, row % size)
        row = row // size
    return {axis: tirx.Cast(dtype_of(axis), index) for axis, index in zip(epilogue.axes, indices, strict=True)}


def evaluated(
    value: tirx.Expr,
    epilogue: Epilogue,
    sums: Sequence[tirx.Expr],
    axes: Mapping[tirx.Var, tirx.Expr],
    load: Callable[[TensorLoad], tirx.Expr],
) -> tirx.Expr:
    """Return an output element: the value of an epilogue, as it is or in another precision, at a place.

    `sums` are the accumulator, and the second one where there is one; `axes` is the place as `output_axes` returns it;
    `load` returns what stands in the place of a load.
    """
    value = tvm_ffi.structural_map(value, (TensorLoad, load))
    value = tvm_ffi.structural_map(value, (tirx.Mul, fast_gelu))
    value = tvm_ffi.structural_map(value, (Call, fast_call))
    variables = [epilogue.accumulator, *([] if epilogue.second is None else [epilogue.second])]
    return substitute(value, {**axes, **dict(zip(variables, sums, strict=True))})


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
