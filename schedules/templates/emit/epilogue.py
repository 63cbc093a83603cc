"""Evaluate a matmul's epilogue on registers, in the fast forms of its functions; for all kernels of matmuls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.templates.emit.fast_gelu import fast_gelu
from relaxtune.schedules.templates.emit.fast_math import fast_call
from relaxtune.schedules.tir.blocks import narrow
from relaxtune.schedules.tir.epilogue import Epilogue
from relaxtune.schedules.tir.expressions import dtype_of, substitute


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
