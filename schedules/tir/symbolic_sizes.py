"""Functions of symbolic sizes: with variables for sizes that are quotients, and at one set of sizes."""

from __future__ import annotations

from collections.abc import Mapping

import tvm_ffi
from tvm import tirx
from tvm_ffi import structural_equal

from relaxtune.schedules.sizes import Size, parse_size, size_text, variables_of
from relaxtune.schedules.tir.blocks import shape_of
from relaxtune.schedules.tir.expressions import find_all

# Parts of sums and products of sizes.
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


def at_sizes(func: tirx.PrimFunc, sizes: Mapping[str, int]) -> tirx.PrimFunc | None:
    """Return a function with numbers for the variables of its shapes.

    None where one of them has no size given, or is nowhere the size of an axis by itself.
    """
    shapes = {param: shape for param in func.params if (shape := shape_of(param)) is not None}
    # TVM takes numbers for variables alone; sizes made of them follow.
    plain = {param: shape for param, shape in shapes.items() if all(isinstance(one, (int, tirx.Var)) for one in shape)}
    wanted = variables_of(shapes.values()).keys()
    if not wanted <= sizes.keys() or not wanted <= variables_of(plain.values()).keys():
        return None
    buffers = {
        param: tirx.decl_buffer(
            [tirx.IntImm("int64", size_at(size, sizes)) for size in shape], str(param.ty.dtype), str(param.name)
        )
        for param, shape in plain.items()
        if not all(isinstance(size, int) for size in shape)
    }
    return func.specialize(buffers) if buffers else func


def size_at(size: Size, sizes: Mapping[str, int]) -> int:
    """Return a size with numbers for its variables."""
    value = parse_size(size_text(size), sizes)
    assert isinstance(value, int)
    return value
