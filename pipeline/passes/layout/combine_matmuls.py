"""Pass: one matmul for the query, key and value projections."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    constant_of,
    dtype_of,
    either_way,
    is_constant,
    is_op,
    multiplies_by_matrix,
    numbers_beside,
    static_shape,
)
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState

# Operations that the slice out of the combined result disappears into: it changes what they read, not what they cost
# (of rows that are gathered, by `gather_before_slices`).
_VIEWS = ("reshape", "permute_dims", "expand_dims", "split", "strided_slice", "take")


@dataclass(frozen=True)
class _Branch:
    """One matmul by a constant [K, N] matrix and what follows it: cast, constant bias [N], cast, each where present."""

    matmul: relax.Var
    weight: tvm.ir.Expr
    end: relax.Var
    first_cast: str
    bias: tvm.ir.Expr | None
    last_cast: str
    steps: tuple[relax.Var, ...]

    @property
    def width(self) -> int:
        return (static_shape(self.weight) or ())[1]


def combine_matmuls(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls of one left operand by several constant matrices merged into one.

    ::

        q = x @ Wq + bq                     y = x @ [Wq|Wk|Wv] + [bq|bk|bv]
        k = x @ Wk + bk          ->         q, k, v = slices of y
        v = x @ Wv + bv

    Widths may differ (grouped-query attention); a missing bias becomes zeros when another branch has one. Only where
    every reader of every branch is a reshape, transpose or slice (behind a scale, where there is one), which takes the
    slice in for nothing. Elsewhere
    (SwiGLU's gate and up) the split would break the fusion of an activation or a residual into its matmul, and cost a
    kernel and a round trip through memory; such groups are left alone. The stock `CombineParallelMatmul` asks for
    weights that are variables, not constants, so it finds nothing in an imported graph.
    """
    graph = Graph(mod)
    found: dict[tuple[object, ...], list[_Branch]] = {}
    for binding in graph.bindings:
        value = binding.value
        if not multiplies_by_matrix(value) or not isinstance(value.args[0], relax.Var):
            continue
        branch = _branch(binding.var, value.args[1], graph)
        if _read_by_views_only(branch.end, graph):
            dtypes = (dtype_of(branch.weight), dtype_of(branch.matmul), branch.first_cast)
            found.setdefault((value.args[0], (static_shape(branch.weight) or ())[0], *dtypes), []).append(branch)
    # The first matmul of each group -> the group.
    groups = {group[0].matmul: _aligned(group) for group in found.values() if len(group) > 1}
    if not groups:
        return mod
    for group in groups.values():
        state.note(f"combined {', '.join(branch.matmul.name for branch in group)}")
    slices: dict[relax.Var, tvm.ir.Expr] = {}

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        if binding.var in groups:
            slices.update(_combined(new, groups[binding.var], binding.value))
        return slices.get(binding.var)

    return rewrite(mod, state, rule)


def _aligned(group: list[_Branch]) -> list[_Branch]:
    """Return the branches ending in one dtype: a last cast that they do not share is left to their readers."""
    if len({branch.last_cast for branch in group}) == 1:
        return group
    return [
        replace(branch, end=branch.steps[-2], steps=branch.steps[:-1], last_cast="") if branch.last_cast else branch
        for branch in group
    ]


def _branch(var: relax.Var, weight: tvm.ir.Expr, graph: Graph) -> _Branch:
    steps, casts, bias = [var], ["", ""], None
    while (reader := graph.only_reader(steps[-1])) is not None:
        value = graph.value(reader)
        stage = 0 if bias is None else 1
        if is_op(value, "astype") and not casts[stage]:
            casts[stage] = dtype_of(reader)
        elif is_op(value, "add") and bias is None:
            vectors = (one for one, other in either_way(value) if is_constant(one) and other == steps[-1])
            bias = next((one for one in vectors if static_shape(one) == (static_shape(weight) or ())[1:]), None)
            if bias is None:
                break
        else:
            break
        steps.append(reader)
    if bias is None:
        casts = ["", casts[0]]
    return _Branch(var, weight, steps[-1], casts[0], bias, casts[1], tuple(steps))


def _read_by_views_only(var: relax.Var, graph: Graph) -> bool:
    readers = graph.readers(var)
    return bool(readers) and all(reader != var and _is_view(reader, graph) for reader in readers)


def _is_view(var: relax.Var, graph: Graph) -> bool:
    """Return whether a variable is a view, or a scale (of queries, say) or cast that views follow."""
    value = graph.value(var)
    if is_op(value, *_VIEWS):
        return True
    scale = graph.value(value.args[0]) if is_op(value, "astype") else value
    scales = is_op(scale, "multiply", "divide") and bool(numbers_beside(scale))
    return scales and _read_by_views_only(var, graph)


def _combined(new: Rewriter, group: list[_Branch], matmul: relax.Call) -> dict[relax.Var, tvm.ir.Expr]:
    """Emit the matmul of a group; return the end of each branch -> its slice of the result."""
    first, count = group[0], 0
    steps = [step for branch in group for step in branch.steps]

    def bind(value: tvm.ir.Expr) -> relax.Var:
        nonlocal count
        count += 1
        return new.extra(f"{first.matmul.name}__combined_{count}", value, steps)

    weight = np.concatenate([array_of(branch.weight) for branch in group], axis=1)
    wide = constant_of(weight)
    result = bind(relax.op.matmul(new.of(matmul.args[0]), wide, matmul.attrs.out_dtype))
    if first.first_cast:
        result = bind(relax.op.astype(result, first.first_cast))
    if any(branch.bias is not None for branch in group):
        dtype = dtype_of(result)
        biases = [np.zeros(b.width, dtype) if b.bias is None else array_of(b.bias) for b in group]
        result = bind(relax.op.add(result, relax.const(np.concatenate(biases), dtype)))
    if first.last_cast:
        result = bind(relax.op.astype(result, first.last_cast))
    axis, start = int(result.ty.ndim) - 1, 0
    slices = {}
    for branch in group:
        end = start + branch.width
        slices[branch.end] = relax.op.strided_slice(result, [axis], [start], [end], assume_inbound=True)
        # The slice computes no node: the combined bindings already stand for the branch.
        new.state.sources[branch.end.name] = ()
        start = end
    return slices
