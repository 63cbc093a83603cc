"""Sizes that are quotients, as variables of a function's own: `height // 8 * (width // 8) + 1` tokens of an image."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm_ffi import structural_equal

from relaxtune.schedules.tir.blocks import shape_of
from relaxtune.schedules.tir.expressions import find_all

# What sums and products of sizes are made of.
_POLYNOMIAL = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Var, tirx.IntImm)


def with_named_sizes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function in which no size of a parameter's axis is more than sums and products of variables.

    A variable stands for an axis that is, wherever its size is written, and a call finds it by the shape of the tensor.
    TVM's analysis does not see that loops over one such quotient cover the axis of another: no rule for a GPU took the
    softmax of a vision transformer whose images have any size.
    """
    named: list[tuple[tirx.Expr, tirx.Var]] = []

    def put(size: tirx.Expr) -> tirx.Expr:
        return next((var for of, var in named if structural_equal(of, size)), size)

    kinds = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)
    axes = [axis for param in func.params for axis in shape_of(param) or () if not isinstance(axis, int)]
    # Parts before what is made of them: that stays their sum or product.
    for axis in sorted(axes, key=lambda axis: len(find_all(axis, tirx.Expr))):
        rest = tvm_ffi.structural_map(axis, (kinds, put), order="pre")
        if not all(isinstance(part, _POLYNOMIAL) for part in find_all(rest, tirx.Expr)):
            named.append((axis, tirx.Var(f"size_{len(named)}", str(axis.ty.dtype))))
    return tvm_ffi.structural_map(func, (kinds, put), order="pre") if named else func
