"""Arithmetic of sizes that are numbers, or expressions where they are known only when the kernel is called."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions.attention import AttentionSpec
from relaxtune.schedules.sizes import Size, variables_of
from relaxtune.schedules.tir.blocks import shape_of

# The kernel counts elements in 32 bits.
INDEX_MAX = 2**31 - 1


def ceil_div(size: Size, by: int) -> Size:
    """Return how many parts of some elements there are, the last one perhaps not whole."""
    return (size + by - 1) // by


def least(left: Size, right: Size) -> Size:
    """Return the smaller of two sizes."""
    return min(left, right) if isinstance(left, int) and isinstance(right, int) else tirx.min(left, right)


def most(left: Size, right: Size) -> Size:
    """Return the larger of two sizes."""
    return max(left, right) if isinstance(left, int) and isinstance(right, int) else tirx.max(left, right)


def is_zero(size: Size) -> bool:
    """Whether a size is surely 0."""
    return isinstance(size, int) and size == 0


def variables_in(func: tirx.PrimFunc) -> dict[str, tirx.Var]:
    """Return the variables in the shapes of a function's parameters, and its scalar parameters, by name."""
    return variables_of(shape_of(param) or (() if param.ty is None else (param,)) for param in func.params)


def with_values(spec: AttentionSpec, values: Mapping[str, Size]) -> AttentionSpec:
    """Return an attention with values for the variables of its sizes."""
    return AttentionSpec.from_json(spec.to_json(), values)


def bind_sizes(spec: AttentionSpec, func: tirx.PrimFunc) -> AttentionSpec:
    """Emit int32 variables of the host for those of a function's shapes, and return the attention with them."""
    bound = {}
    for name, var in variables_in(func).items():
        bound[name] = T.Bind(tirx.Cast("int32", var))
        IRBuilder.name(name, bound[name])
    return with_values(spec, bound)


def flat_view(param: tirx.Var, dtype: str | None = None) -> tirx.Var:
    """Return a flat view of a parameter of the kernel; of symbolic size, of as many elements as 32 bits count."""
    shape = shape_of(param) or ()
    size = math.prod(size for size in shape if isinstance(size, int))
    known = all(isinstance(size, int) for size in shape)
    return T.decl_buffer((size if known else INDEX_MAX,), dtype or str(param.ty.dtype), data=param.data)
