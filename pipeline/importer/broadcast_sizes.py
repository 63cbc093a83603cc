"""Sizes known when the model runs beside sizes of the graph: what a broadcast says of them.

A mixture of experts cuts its tokens into one part an expert, and joins the parts again: as many rows as there were, but
the graph knows them as a sum of sizes. Multiplied by a tensor of 24 rows, they are 24, which a check holds at run time.
A Slice clips its bounds to its input: all frames but the last of `n` are `min(max(n - 1, 0), n)`. Added to `n - 1`
frames, they are `n - 1`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_equal

from relaxtune.schedules.tir.expressions import find_all

BROADCASTING = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater",
     "GreaterOrEqual", "Where"}
)  # fmt: skip


def broadcast_sizes(
    builder: relax.BlockBuilder, inputs: Sequence[tvm.ir.Expr | None], axes: frozenset[str]
) -> list[tvm.ir.Expr | None]:
    """Return operands of a broadcast in which a computed size beside one of the graph's above one is that one.

    Parameters
    ----------
    axes
        Names of the axes of the model's inputs: other names are of sizes known when the model runs. A size that is one
        such name may be one, and stays; `2*batch*sequence` may not.
    """
    shapes = [_sizes(expr) for expr in inputs]
    known: dict[int, tirx.Expr] = {}
    for shape in shapes:
        for place, size in enumerate(reversed(shape or [])):
            number = isinstance(size, tirx.IntImm) and int(size) > 1
            first = place not in known or _is_clipped(known[place], size)
            if number or (first and _is_computed(size) and _names(size) <= axes):
                known[place] = size
    made = list(inputs)
    for index, (expr, shape) in enumerate(zip(inputs, shapes, strict=True)):
        if shape is None or expr is None:
            continue
        sizes = [
            known[place] if place in known and _takes(size, known[place], axes) else size
            for place, size in enumerate(reversed(shape))
        ][::-1]
        if any(one is not other for one, other in zip(sizes, shape, strict=True)):
            made[index] = builder.match_cast(expr, relax.TensorType(sizes, expr.ty.dtype))
    return made


def _takes(size: tirx.Expr, known: tirx.Expr, axes: frozenset[str]) -> bool:
    """Return whether a size gives way to a known one: to a number if computed, to a computed size if known later."""
    later = isinstance(known, tirx.IntImm) or not _names(size) <= axes
    return _is_computed(size) and (later or _is_clipped(size, known))


def _is_clipped(size: tirx.Expr, plain: tirx.Expr) -> bool:
    """Return whether a size is another one clipped to bounds that it keeps, as it is the size of a tensor too."""
    if not find_all(size, tirx.Max) or structural_equal(size, plain):
        return False
    analyzer = tvm.sym.Analyzer()
    with analyzer.constraint_scope(tirx.GE(plain, tirx.IntImm("int64", 0))):
        return bool(analyzer.can_prove_equal(size, plain))


def _names(size: tirx.Expr) -> set[str]:
    return {str(var.name) for var in tirx.analysis.undefined_vars(size)}


def _sizes(expr: tvm.ir.Expr | None) -> list[tirx.Expr] | None:
    if expr is None or not isinstance(expr.ty, relax.TensorType) or expr.ty.shape is None:
        return None
    return list(expr.ty.shape)


def _is_computed(size: tirx.Expr) -> bool:
    return not isinstance(size, tirx.IntImm | tirx.Var)
