"""Pass: functions of positions that cost something to compute are tables of constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import dtype_of, main_of, shape_of
from relaxtune.pipeline.passes.kit.rewrite import INJECTIVE, Rewriter, rewrite
from relaxtune.pipeline.passes.kit.sizes import size_of, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.symbolic.functions_of_positions import FunctionsOfPositions, Root
from relaxtune.pipeline.passes.symbolic.tables import TABLE_ATTR, table_mark
from relaxtune.pipeline.passes.weights.fold_constants import FOLD_BYTES_MAX, fold_constants


def tabulate_positions(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with cosines, sines, logarithms and powers of positions, and what is made of them, read from tables.

    ::

        angles = cos(cast(arange(0, n)) * frequencies)      ->   p < 4096 ? table[p] : cos(cast(p) * frequencies)
        bias = take(weight, bucket(keys - queries))         ->   |k - q| < 4096 ? table[k - q + 4095] : ...

    Of static sizes these are constants. Of symbolic ones, the cosines and sines of rotary embeddings and the buckets of
    relative positions were kernels of their own. A table is read in each elementwise operation that wants its values
    (`repeat_positions` copies the reading). It has all positions where axes have maxima, and 4096 where they have none.
    Other positions are computed as before, in the same place; or are like the last one of the table, where that is
    sure, as it is of buckets.
    """
    positions = FunctionsOfPositions(Graph(mod), state.options.maxima)
    wanted = {
        var: root for var, root in positions.last_costly().items() if _bytes(var, root, positions) <= FOLD_BYTES_MAX
    }
    if not wanted:
        return mod
    state.note(f"{len(wanted)} functions of positions are tables")
    tables = _evaluated(wanted, positions, state)
    starts: dict[tuple[relax.Var, relax.Var], tvm.ir.Expr] = {}

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        var, root = binding.var, wanted.get(binding.var)
        if root is None:
            return None
        operands, mark = [new.of(root), tables[var]], ""
        if any(positions.roots[root].open) and not positions.settles(var, root):
            starts[root, root] = operands[0]
            operands.append(positions.computed(var, root, starts, lambda one, value: new.extra(one.name, value, [one])))
        shape, axes = positions.shape(var, root), positions.functions[var][root].axes
        compute = _reading(positions.roots[root], axes, shape)
        if len(operands) == 2:
            mark = table_mark(axes, positions.roots[root].axes[0], positions.roots[root].low)
        read = new.kernel(compute, *operands, name="table", op_pattern=INJECTIVE, **{TABLE_ATTR: mark})
        if tuple(map(size_of, shape)) == sizes_of(var):
            return read
        return relax.op.broadcast_to(new.extra(f"{var.name}__table", read, [var]), relax.ShapeExpr(shape_of(var)))

    return rewrite(mod, state, rule)


def _bytes(var: relax.Var, root: relax.Var, positions: FunctionsOfPositions) -> int:
    count = positions.roots[root].high - positions.roots[root].low + 1
    return math.prod(map(int, positions.shape(var, root, count))) * max(1, int(tvm.DataType(dtype_of(var)).bits) // 8)


def _evaluated(
    wanted: Mapping[relax.Var, relax.Var], positions: FunctionsOfPositions, state: LoweringState
) -> dict[relax.Var, tvm.ir.Expr]:
    """Return what tensors are at all positions of their roots, along the roots' first axes."""
    builder = relax.BlockBuilder()
    made: dict[tuple[relax.Var, relax.Var], tvm.ir.Expr] = {}
    outputs = []
    with builder.function("main", []):
        with builder.dataflow():
            for var, root in wanted.items():
                known = positions.roots[root]
                integers = np.arange(known.low, known.high + 1)
                shape = [int(size) for size in positions.shape(root, root, len(integers))]
                made[root, root] = relax.const(integers.reshape(shape), dtype_of(root))
                table = positions.computed(var, root, made, lambda _, value: builder.emit(value), len(integers))
                outputs.append(builder.emit_output(table))
        builder.emit_func_output(relax.Tuple(outputs))
    folded = main_of(fold_constants(builder.get(), state)).body.body.fields
    return dict(zip(wanted, folded, strict=True))


def _reading(root: Root, axes: tuple[int | None, ...], shape: list[tirx.Expr | int]) -> Callable[..., te.Tensor]:
    """Return the tensor expression of (integers, table, computed): the table where it has the integer."""

    def compute(integers: te.Tensor, table: te.Tensor, *computed: te.Tensor) -> te.Tensor:
        def element(*index: tirx.Var) -> tirx.Expr:
            of_root = {axis: at for at, axis in zip(index, axes, strict=True) if axis is not None}
            position = integers(*(of_root.get(axis, 0) for axis in range(len(integers.shape))))
            low, high = (tirx.const(end, integers.dtype) for end in (root.low, root.high))
            ends = list(zip(root.open, (position >= low, position <= high), strict=True))
            if not computed:
                position = tirx.max(position, low) if root.open[0] else position
                position = tirx.min(position, high) if root.open[1] else position
            places = [
                at if axis is None else position - low if axis == root.axes[0] else 0
                for at, axis in zip(index, axes, strict=True)
            ]
            if not computed:
                return table(*places)
            known = tirx.all(*(inside for is_open, inside in ends if is_open))
            return tirx.if_then_else(known, table(*places), computed[0](*index))

        return te.compute(computed[0].shape if computed else shape, element, name="table")

    return compute
