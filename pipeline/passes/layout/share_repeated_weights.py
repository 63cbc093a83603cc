"""Pass: weights that are repeated for each batch row are multiplied by once, as they are."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_op, shape_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import Size, quotient, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState


def share_repeated_weights(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls by a constant that a symbolic axis repeats as matmuls by the constant.

    ::

        y = x[B * H, N, K] @ reshape(broadcast_to(w[1, H, K, M], [B, H, K, M]), [B * H, K, M])
        ->   y = reshape(reshape(x, [B, H, N, K]) @ w[H, K, M], [B * H, N, M])

    DeBERTa multiplies by its relative positions so. Of static sizes the repeated constant is a constant. Of a symbolic
    batch it was copied, B times over, in each call.
    """
    graph = Graph(mod)
    found = {binding.var: weight for binding in graph.bindings if (weight := _weight(binding.value, graph))}

    def multiply(new: Rewriter, binding: relax.VarBinding, weight: tuple[tirx.Expr, np.ndarray]) -> tvm.ir.Expr:
        batch, array = weight
        data, repeated = binding.value.args
        rows = new.emit(relax.op.reshape(new.of(data), (batch, len(array), *(shape_of(data) or [])[1:])))
        product = relax.op.matmul(rows, relax.const(array, dtype_of(repeated)), binding.value.attrs.out_dtype)
        return relax.op.reshape(new.emit(product), relax.ShapeExpr(shape_of(binding.var) or []))

    return replace_found(mod, state, found, multiply, "matmuls by weights that were repeated for each batch row")


def _weight(value: tvm.ir.Expr, graph: Graph) -> tuple[tirx.Expr, np.ndarray] | None:
    """Return the axis that repeats the second operand of a batched matmul, and what it repeats."""
    left, right = (sizes_of(arg) for arg in value.args) if is_op(value, "matmul") else (None, None)
    if left is None or right is None or (len(left), len(right)) != (3, 3) or left[0] != right[0]:
        return None
    path = graph.behind(value.args[1], "reshape", "squeeze", "expand_dims", "permute_dims")
    stretch = graph.value(path[-1]) if path else None
    if not is_op(stretch, "broadcast_to") or not is_constant(stretch.args[0]) or not (axes := shape_of(path[-1])):
        return None
    *moved, source = path
    batch, array = (sizes_of(source) or (0,))[0], array_of(stretch.args[0])
    once = _of_one(source, batch)
    if once is None or isinstance(batch, int) or array.ndim != len(once) or array.shape[0] != 1:
        return None
    array = np.broadcast_to(array, once)
    for step in reversed(moved):
        call, shape = graph.value(step), _of_one(step, batch)
        first_stays = not is_op(call, "permute_dims") or int(call.attrs.axes[0]) == 0
        if shape is None or not first_stays:
            return None
        array = array.transpose([int(axis) for axis in call.attrs.axes]) if is_op(call, "permute_dims") else array
        array = array.reshape(shape)
    return axes[0], array


def _of_one(expr: tvm.ir.Expr, batch: Size) -> tuple[int, ...] | None:
    """Return the shape of a tensor for a batch of one, None where more than its first axis, or not that, has it."""
    first, *rest = sizes_of(expr) or (0,)
    count = quotient(first, batch)
    if not isinstance(count, int) or not all(isinstance(size, int) for size in rest):
        return None
    return (count, *(int(size) for size in rest if isinstance(size, int)))
