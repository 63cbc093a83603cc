"""A function of symbolic sizes at one set of them."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx

from relaxtune.schedules.sizes import Size, parse_size, size_text, variables_of
from relaxtune.schedules.tir.blocks import shape_of


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
