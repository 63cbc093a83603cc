"""Ranges of the integers that a kernel's parameters may hold, found from what it indexes with them.

A kernel such as `take` reads `table[ids[i], j]`: random integers would read out of bounds. The bound of `ids` is the
size of the axis it indexes. An integer parameter that indexes nothing (a mask, a condition) gets 0 and 1, one of 8 bits
that is multiplied into sums in int32 all its integers.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from relaxtune.schedules.tir.blocks import is_buffer, list_statements, static_shape, written_params
from relaxtune.schedules.tir.contraction import find_factors
from relaxtune.schedules.tir.expressions import is_branch, list_loads

# In the place of a bound: all integers of 8 bits, negative ones too.
ALL_BYTES = 0
_UNKNOWN_BOUND = 2
_BYTES = ("int8", "uint8")


def index_ranges(func: tirx.PrimFunc) -> dict[int, int]:
    """Return the exclusive upper bound of every integer or boolean input of a PrimFunc, by parameter position.

    Indices that pass through intermediates (a cast, a wrap-around of negative indices) are followed. An index inside
    arithmetic, such as `ids[i] * 64 + j`, is divided by its coefficient; where that is not a constant the bound is 1,
    so that only index 0 is ever read.
    """
    outputs = set(written_params(func))
    positions = {
        param: position
        for position, param in enumerate(func.params)
        if position not in outputs and is_buffer(param) and _is_integer(str(param.dtype))
    }
    stores = [stmt for stmt in list_statements(func.body) if isinstance(stmt, tirx.BufferStore)]
    # Buffer -> the integer parameters that its values are made of; the parameters stand for themselves.
    sources: dict[tvm.ir.Var, set[tvm.ir.Var]] = {param: {param} for param in positions}
    for store in stores:
        if _is_integer(str(store.buffer.dtype)):
            found = {param for load in list_loads(store.value) for param in sources.get(load.source, set())}
            sources.setdefault(store.buffer, set()).update(found)
    bounds: dict[int, int] = {}
    for store in stores:
        accesses = [(store.buffer, list(store.indices))]
        accesses += [(load.source, list(load.indices)) for load in list_loads(store.value)]
        accesses += [(load.source, list(load.indices)) for index in store.indices for load in list_loads(index)]
        for buffer, indices in accesses:
            for axis, index in enumerate(indices):
                for load in list_loads(index):
                    size = (static_shape(buffer) or (1,) * len(indices))[axis]
                    bound = max(1, size // coefficient) if (coefficient := _coefficient(index, load)) else 1
                    for param in sources.get(load.source, set()):
                        position = positions[param]
                        bounds[position] = min(bounds.get(position, bound), bound)
    # Integers of 8 bits that are multiplied into a sum in int32.
    sums = [store for store in stores if str(store.buffer.dtype) == "int32"]
    factors = {load.source for store in sums for factor in find_factors(store) or () for load in list_loads(factor)}
    unknown = {
        position: ALL_BYTES if param in factors and str(param.dtype) in _BYTES else _UNKNOWN_BOUND
        for param, position in positions.items()
    }
    return {position: bounds.get(position, unknown[position]) for position in sorted(positions.values())}


def _coefficient(index: tvm.ir.Expr, load: tvm.ir.TensorLoad) -> int | None:
    """Return how much an index grows when the loaded integer grows by one; None when that is not a constant."""
    if isinstance(index, tvm.ir.TensorLoad):
        return 1
    if isinstance(index, tirx.Cast):
        return _coefficient(index.value, load)
    if isinstance(index, (tirx.Add, tirx.Sub, tirx.Min, tirx.Max)):
        sides = [_coefficient(side, load) for side in (index.a, index.b) if _contains(side, load)]
        return sides[0] if len(sides) == 1 else None
    if isinstance(index, tirx.Mul):
        for side, factor in ((index.a, index.b), (index.b, index.a)):
            if isinstance(factor, tirx.IntImm) and int(factor.value) > 0:
                inner = _coefficient(side, load)
                return inner * int(factor.value) if inner else None
        return None
    branches = _branches(index)
    if branches is not None:
        found = {_coefficient(branch, load) for branch in branches if _contains(branch, load)}
        return found.pop() if len(found) == 1 else None
    return None


def _branches(expr: tvm.ir.Expr) -> tuple[tvm.ir.Expr, tvm.ir.Expr] | None:
    """Return the two values of a conditional, the form in which negative indices are wrapped around."""
    if isinstance(expr, tirx.Select):
        return expr.true_value, expr.false_value
    return (expr.args[1], expr.args[2]) if is_branch(expr) else None


def _contains(expr: tvm.ir.Expr, load: tvm.ir.TensorLoad) -> bool:
    """Return whether an expression is made of a load; one that only decides which of two values it is, is not one."""
    parts = _branches(expr) or (expr,)
    return any(inner.source.same_as(load.source) for part in parts for inner in list_loads(part))


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))
