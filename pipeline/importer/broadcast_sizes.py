"""Sizes known when the model runs beside sizes of the graph: what a broadcast says of them.

A mixture of experts cuts its tokens into one part an expert, and joins the parts again: as many rows as there were, but
the graph knows them as a sum of sizes. Multiplied by a tensor of 24 rows, they are 24, which a check holds at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx

BROADCASTING = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater",
     "GreaterOrEqual", "Where"}
)  # fmt: skip


def broadcast_sizes(builder: relax.BlockBuilder, inputs: Sequence[tvm.ir.Expr | None]) -> list[tvm.ir.Expr | None]:
    """Return operands of a broadcast in which a computed size beside a number above one is that number.

    A size that is one name (an axis of the model's inputs) may be one, and stays.
    """
    shapes = [_sizes(expr) for expr in inputs]
    numbers: dict[int, int] = {}
    for shape in shapes:
        for place, size in enumerate(reversed(shape or [])):
            if isinstance(size, tirx.IntImm) and int(size) > 1:
                numbers[place] = int(size)
    made = list(inputs)
    for index, (expr, shape) in enumerate(zip(inputs, shapes, strict=True)):
        if shape is None or expr is None:
            continue
        known = [
            tirx.IntImm("int64", numbers[place]) if place in numbers and _is_computed(size) else size
            for place, size in enumerate(reversed(shape))
        ][::-1]
        if any(one is not other for one, other in zip(known, shape, strict=True)):
            made[index] = builder.match_cast(expr, relax.TensorType(known, expr.ty.dtype))
    return made


def _sizes(expr: tvm.ir.Expr | None) -> list[tirx.Expr] | None:
    if not isinstance(expr, relax.Var) or not isinstance(expr.ty, relax.TensorType) or expr.ty.shape is None:
        return None
    return list(expr.ty.shape)


def _is_computed(size: tirx.Expr) -> bool:
    return not isinstance(size, tirx.IntImm | tirx.Var)
