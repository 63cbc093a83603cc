"""The bytes that the static memory plan of a module takes."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

_ALLOC_STORAGE = "relax.vm.alloc_storage"


def planned_bytes(mod: tvm.ir.IRModule) -> int | None:
    """Return the bytes of all storage that a planned module asks for: intermediates and outputs, weights not counted.

    None when a size depends on the inputs' shapes.
    """
    sizes: list[int | None] = []

    def visit(expr: tvm.ir.Expr) -> None:
        if isinstance(expr, tvm.ir.Call) and str(getattr(expr.op, "name", "")) == _ALLOC_STORAGE:
            extents = list(expr.args[0].values) if isinstance(expr.args[0], relax.ShapeExpr) else [None]
            sizes.extend(int(extent) if isinstance(extent, tirx.IntImm) else None for extent in extents)

    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
