"""Pass: one matmul for the query, key and value projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    bindings_of,
    dtype_of,
    emit_extra,
    emit_named,
    is_constant,
    is_op,
    main_of,
    rewrite_main,
    scalar_of,
    static_shape,
    users_of,
    values_of,
)
from relaxtune.pipeline.passes.kit.state import LoweringState

# Operations that the slice out of the combined result disappears into: it changes what they read, not what they cost.
_VIEWS = ("reshape", "permute_dims", "expand_dims", "split", "strided_slice")


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
        return _shape_of_constant(self.weight)[1]


def _shape_of_constant(constant: tvm.ir.Expr) -> tuple[int, ...]:
    return static_shape(constant) or ()


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
    main = main_of(mod)
    groups = _find_groups(main)
    if not groups:
        return mod
    for group in groups.values():
        state.note(f"combined {', '.join(branch.matmul.name for branch in group)}")
    return rewrite_main(mod, _Combine(groups, state))


def _find_groups(main: relax.Function) -> dict[relax.Var, list[_Branch]]:
    """Return the first matmul of each group -> the group."""
    values, users = values_of(main), users_of(main)
    groups: dict[tuple[object, ...], list[_Branch]] = {}
    for binding in bindings_of(main):
        value = binding.value
        if not is_op(value, "matmul") or not isinstance(value.args[0], relax.Var) or not is_constant(value.args[1]):
            continue
        branch = _branch(binding.var, value.args[1], values, users)
        if branch is None or not _read_by_views_only(branch.end, values, users):
            continue
        dtypes = (dtype_of(branch.weight), dtype_of(branch.matmul), branch.first_cast)
        key = (value.args[0], _shape_of_constant(branch.weight)[0], *dtypes)
        groups.setdefault(key, []).append(branch)
    return {group[0].matmul: _aligned(group) for group in groups.values() if len(group) > 1}


def _aligned(group: list[_Branch]) -> list[_Branch]:
    """Return the branches ending in one dtype: a last cast that they do not share is left to their readers."""
    if len({branch.last_cast for branch in group}) == 1:
        return group
    return [
        replace(branch, end=branch.steps[-2], steps=branch.steps[:-1], last_cast="") if branch.last_cast else branch
        for branch in group
    ]


def _branch(
    var: relax.Var,
    weight: tvm.ir.Expr,
    values: Mapping[relax.Var, tvm.ir.Expr],
    users: Mapping[relax.Var, list[relax.Var]],
) -> _Branch | None:
    if len(_shape_of_constant(weight)) != 2:
        return None
    steps, casts, bias = [var], ["", ""], None
    while True:
        readers = users.get(steps[-1], [])
        value = values.get(readers[0]) if len(readers) == 1 and readers[0] != steps[-1] else None
        stage = 0 if bias is None else 1
        if is_op(value, "astype") and not casts[stage]:
            casts[stage] = dtype_of(readers[0])
        elif is_op(value, "add") and bias is None and (found := _bias_of(value, steps[-1], weight)) is not None:
            bias = found
        else:
            break
        steps.append(readers[0])
    if bias is None:
        casts = ["", casts[0]]
    return _Branch(var, weight, steps[-1], casts[0], bias, casts[1], tuple(steps))


def _bias_of(add: relax.Call, data: relax.Var, weight: tvm.ir.Expr) -> tvm.ir.Expr | None:
    """Return the constant vector that is added to `data`, None when it is something else."""
    for operand, other in (tuple(add.args), tuple(add.args)[::-1]):
        fits = is_constant(operand) and _shape_of_constant(operand) == _shape_of_constant(weight)[1:]
        if fits and isinstance(other, relax.Var) and other == data:
            return operand
    return None


def _read_by_views_only(
    var: relax.Var, values: Mapping[relax.Var, tvm.ir.Expr], users: Mapping[relax.Var, list[relax.Var]]
) -> bool:
    readers = users.get(var, [])
    return bool(readers) and all(reader != var and _is_view(reader, values, users) for reader in readers)


def _is_view(
    var: relax.Var, values: Mapping[relax.Var, tvm.ir.Expr], users: Mapping[relax.Var, list[relax.Var]]
) -> bool:
    """Return whether a variable is a view, or a scale (that of queries, say) or a cast behind it before views."""
    value = values.get(var)
    if is_op(value, *_VIEWS):
        return True
    behind = is_op(value, "astype") and _is_scaled(values.get(value.args[0]))
    return (_is_scaled(value) or behind) and _read_by_views_only(var, values, users)


def _is_scaled(value: tvm.ir.Expr | None) -> bool:
    return is_op(value, "multiply", "divide") and any(scalar_of(arg) is not None for arg in value.args)


@mutator
class _Combine(PyExprMutator):  # type: ignore[misc]
    def __init__(self, groups: Mapping[relax.Var, list[_Branch]], state: LoweringState) -> None:
        super().__init__()
        self._groups = groups
        self._state = state
        self._slices: dict[relax.Var, tvm.ir.Expr] = {}
        self._nodes = {
            first: state.nodes_of(step.name for branch in group for step in branch.steps)
            for first, group in groups.items()
        }
        self._count = 0

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self._groups:
            self._emit(self._groups[binding.var], binding.value)
        if binding.var in self._slices:
            emit_named(self, binding.var, self._slices[binding.var])
        else:
            super().visit_var_binding_(binding)

    def _emit(self, group: list[_Branch], matmul: relax.Call) -> None:
        first = group[0]
        left = self.visit_expr(matmul.args[0])
        weight = np.concatenate([array_of(branch.weight) for branch in group], axis=1)
        product = relax.op.matmul(left, relax.const(weight, dtype_of(first.weight)), matmul.attrs.out_dtype)
        result = self._bind(group, product)
        if first.first_cast:
            result = self._bind(group, relax.op.astype(result, first.first_cast))
        if any(branch.bias is not None for branch in group):
            dtype = dtype_of(result)
            biases = [np.zeros(b.width, dtype) if b.bias is None else array_of(b.bias) for b in group]
            result = self._bind(group, relax.op.add(result, relax.const(np.concatenate(biases), dtype)))
        if first.last_cast:
            result = self._bind(group, relax.op.astype(result, first.last_cast))
        axis = int(result.ty.ndim) - 1
        start = 0
        for branch in group:
            part = relax.op.strided_slice(result, [axis], [start], [start + branch.width], assume_inbound=True)
            self._slices[branch.end] = part
            # The slice computes no node: the combined bindings already stand for the branch.
            self._state.sources[branch.end.name] = ()
            start += branch.width

    def _bind(self, group: list[_Branch], value: tvm.ir.Expr) -> relax.Var:
        self._count += 1
        name = f"{group[0].matmul.name}__combined_{self._count}"
        self._state.sources[name] = self._nodes[group[0].matmul]
        return emit_extra(self, name, value)
