"""Pass: rows are gathered once of a tensor, not of each of its slices."""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import is_op, shape_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState


def gather_before_slices(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the rows of several slices of columns gathered as whole rows.

    ::

        q, k, v = slices of y                   z = take(y, rows)
        take(q, rows), take(k, rows), ...   ->  q, k, v = slices of z

    The slices are of a combined matmul, the rows those of the padded form (`tokens.unpad`): one kernel instead of
    three, and heads are read where they lie. Only where nothing else reads the slices.
    """
    graph = Graph(mod)
    found: dict[relax.Var, relax.Call] = {}
    for binding in graph.bindings:
        slices = [one for one in graph.readers(binding.var) if _is_slice_of_columns(graph.value(one), binding.var)]
        if len(slices) < 2 or len(slices) != len(graph.readers(binding.var)):
            continue
        readers = [graph.only_reader(one) for one in slices]
        takes = [take for one in readers if is_op(take := graph.value(one), "take")]
        of_rows = all(take.attrs.axis is not None and int(take.attrs.axis) == 0 for take in takes)
        if len(takes) < len(slices) or not of_rows or len({take.args[1] for take in takes}) != 1:
            continue
        found |= {reader: graph.values[one] for reader, one in zip(readers, slices, strict=True) if reader is not None}
    if not found:
        return mod
    gathered: dict[relax.Var, relax.Var] = {}

    def gather(new: Rewriter, binding: relax.VarBinding, of: relax.Call) -> tvm.ir.Expr:
        data, take = of.args[0], binding.value
        if data not in gathered:
            rows = relax.Call(take.op, [new.of(data), new.of(take.args[1])], take.attrs)
            gathered[data] = new.extra(f"{data.name}__gathered", rows)
        return relax.Call(of.op, [gathered[data], *of.args[1:]], of.attrs)

    return replace_found(mod, state, found, gather)


def _is_slice_of_columns(value: tvm.ir.Expr | None, data: relax.Var) -> bool:
    shape = shape_of(data) or []
    if not is_op(value, "strided_slice") or len(shape) != 2 or not isinstance(value.args[1], relax.Tuple):
        return False
    return [int(axis) % 2 for axis in value.args[1].fields] == [1]
