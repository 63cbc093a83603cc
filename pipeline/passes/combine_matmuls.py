"""Pass: one matmul for the query, key and value projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from pipeline.passes.ir import (
    array_of,
    bindings_of,
    dtype_of,
    emit_extra,
    emit_named,
    is_constant,
    is_op,
    main_of,
    rewrite_main,
    static_shape,
    users_of,
    values_of,
)
from pipeline.passes.state import LoweringState

# Operations that the slice out of the combined result disappears into: it changes what they read, not what they cost.
_VIEWS = ("reshape", "permute_dims", "expand_dims", "split", "strided_slice")


@dataclass(frozen=True)
class _Branch:
    """One matmul by a constant [K, N] matrix, its constant bias [N] if it has one, and the variable it ends in."""

    matmul: relax.Var
    weight: tvm.ir.Expr
    bias: tvm.ir.Expr | None
    end: relax.Var

    @property
    def width(self) -> int:
        return int(array_shape(self.weight)[1])


def array_shape(constant: tvm.ir.Expr) -> tuple[int, ...]:
    """Return the shape of a constant."""
    shape = static_shape(constant)
    return shape if shape is not None else ()


def combine_matmuls(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls of one left operand by several constant matrices merged into one.

    ::

        q = x @ Wq + bq                     y = x @ [Wq|Wk|Wv] + [bq|bk|bv]
        k = x @ Wk + bk          ->         q, k, v = slices of y
        v = x @ Wv + bv

    Widths may differ (grouped-query attention); a missing bias becomes zeros when another branch has one. Only where
    every reader of every branch is a reshape, transpose or slice, which takes the slice in for nothing. Elsewhere
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
        key = (value.args[0], array_shape(branch.weight)[0], dtype_of(branch.weight), str(value.attrs.out_dtype))
        groups.setdefault(key, []).append(branch)
    return {group[0].matmul: group for group in groups.values() if len(group) > 1}


def _branch(
    var: relax.Var,
    weight: tvm.ir.Expr,
    values: Mapping[relax.Var, tvm.ir.Expr],
    users: Mapping[relax.Var, list[relax.Var]],
) -> _Branch | None:
    if len(array_shape(weight)) != 2:
        return None
    readers = users.get(var, [])
    if len(readers) == 1 and readers[0] != var and is_op(values.get(readers[0]), "add"):
        left, right = values[readers[0]].args
        bias = right if isinstance(left, relax.Var) and left == var else left
        if is_constant(bias) and array_shape(bias) == array_shape(weight)[1:]:
            return _Branch(var, weight, bias, readers[0])
    return _Branch(var, weight, None, var)


def _read_by_views_only(
    var: relax.Var, values: Mapping[relax.Var, tvm.ir.Expr], users: Mapping[relax.Var, list[relax.Var]]
) -> bool:
    readers = users.get(var, [])
    return bool(readers) and all(reader != var and is_op(values.get(reader), *_VIEWS) for reader in readers)


@mutator
class _Combine(PyExprMutator):  # type: ignore[misc]
    def __init__(self, groups: Mapping[relax.Var, list[_Branch]], state: LoweringState) -> None:
        super().__init__()
        self._groups = groups
        self._state = state
        self._slices: dict[relax.Var, tvm.ir.Expr] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self._groups:
            self._emit(self._groups[binding.var], binding.value)
        if binding.var in self._slices:
            emit_named(self, binding.var, self._slices[binding.var])
        else:
            super().visit_var_binding_(binding)

    def _emit(self, group: list[_Branch], matmul: relax.Call) -> None:
        sources = self._state.sources
        name = f"{group[0].matmul.name}__combined"
        weight = np.concatenate([array_of(branch.weight) for branch in group], axis=1)
        left = self.visit_expr(matmul.args[0])
        combined = relax.op.matmul(left, relax.const(weight, dtype_of(group[0].weight)), matmul.attrs.out_dtype)
        result = emit_extra(self, name, combined)
        sources[name] = self._state.nodes_of(branch.matmul.name for branch in group)
        if any(branch.bias is not None for branch in group):
            dtype = dtype_of(result)
            parts = [_bias_of(branch, dtype) for branch in group]
            result = emit_extra(self, f"{name}_bias", relax.op.add(result, relax.const(np.concatenate(parts), dtype)))
            sources[f"{name}_bias"] = self._state.nodes_of(b.end.name for b in group if b.bias is not None)
        start = 0
        for branch in group:
            axis = int(result.ty.ndim) - 1
            part = relax.op.strided_slice(result, [axis], [start], [start + branch.width], assume_inbound=True)
            self._slices[branch.end] = part
            # The slice computes no node: the combined matmul already stands for it.
            sources[branch.end.name] = ()
            start += branch.width


def _bias_of(branch: _Branch, dtype: str) -> np.ndarray:
    return np.zeros(branch.width, dtype) if branch.bias is None else array_of(branch.bias)
