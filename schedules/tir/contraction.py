"""Recognition of contractions, the family of matmuls.

Notation: ``C[b.., m.., n..] += A[b.., m.., k..] * B[b.., k.., n..]`` in any order of the indices. An axis of the output
is ``b`` when both operands have it, ``m`` when only A has it, ``n`` when only B has it; reduction axes are ``k``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm
from tvm import tirx

from relaxtune.schedules.tir.functions import BlockView, list_expressions, list_loads


@dataclass(frozen=True)
class Contraction:
    """A matmul as written in TIR: sizes, whether A is stored k-major (`trans_a`) and B n-major (`trans_b`), dtypes."""

    batch: int
    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool
    a: tvm.ir.Var
    b: tvm.ir.Var
    output: tvm.ir.Var
    a_dtype: str
    b_dtype: str
    acc_dtype: str
    is_conv: bool


def find_contraction(block: BlockView) -> Contraction | None:
    """Return the contraction that a block computes, or None when it is something else."""
    if not block.reduction or len(block.stores) != 1:
        return None
    store = block.stores[0]
    operands = _product_operands(store)
    if operands is None:
        return None
    a, b = operands
    a_axes, b_axes = _plain_axes(a), _plain_axes(b)
    is_conv = a_axes is None or b_axes is None
    in_a, in_b = _index_vars(a), _index_vars(b)
    sizes = {"batch": 1, "m": 1, "n": 1}
    kinds: dict[str, list[tvm.ir.Var]] = {"batch": [], "m": [], "n": []}
    for var, extent in block.spatial:
        kind = "batch" if _has(in_a, var) and _has(in_b, var) else "n" if _has(in_b, var) else "m"
        sizes[kind] *= extent
        kinds[kind].append(var)
    if not kinds["m"] and not kinds["n"]:
        return None
    k_vars = [var for var, _ in block.reduction]
    return Contraction(
        batch=sizes["batch"],
        m=sizes["m"],
        n=sizes["n"],
        k=math.prod(extent for _, extent in block.reduction),
        trans_a=not is_conv and _last_of(a_axes or [], kinds["m"] + k_vars) in _ids(kinds["m"]),
        trans_b=not is_conv and _last_of(b_axes or [], kinds["n"] + k_vars) in _ids(k_vars),
        a=a.source,
        b=b.source,
        output=store.buffer,
        a_dtype=str(a.source.dtype),
        b_dtype=str(b.source.dtype),
        acc_dtype=str(store.buffer.dtype),
        is_conv=is_conv,
    )


def _product_operands(store: tirx.BufferStore) -> tuple[tvm.ir.TensorLoad, tvm.ir.TensorLoad] | None:
    """Return the operands of `out = out + a * b`, where either may be under a cast."""
    value = store.value
    if not isinstance(value, tirx.Add):
        return None
    for accumulator, product in ((value.a, value.b), (value.b, value.a)):
        if not isinstance(accumulator, tvm.ir.TensorLoad) or not accumulator.source.same_as(store.buffer):
            continue
        product = _strip_casts(product)
        if not isinstance(product, tirx.Mul):
            return None
        a, b = _strip_casts(product.a), _strip_casts(product.b)
        if isinstance(a, tvm.ir.TensorLoad) and isinstance(b, tvm.ir.TensorLoad) and len(list_loads(product)) == 2:
            return (a, b) if not a.source.same_as(b.source) else None
    return None


def _strip_casts(expr: tvm.ir.Expr) -> tvm.ir.Expr:
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return expr


def _plain_axes(load: tvm.ir.TensorLoad) -> list[tvm.ir.Var] | None:
    """Return the index variables of a load in storage order, or None when an index is an expression.

    An axis cut into panels, as a packed weight's is, counts as the variable for the panel's number and its inside.
    """
    axes = []
    for index in load.indices:
        if isinstance(index, tirx.FloorDiv | tirx.FloorMod) and isinstance(index.b, tirx.IntImm):
            index = index.a
        if isinstance(index, tvm.ir.Var):
            axes.append(index)
        elif not isinstance(index, tirx.IntImm):
            return None
    return axes


def _index_vars(load: tvm.ir.TensorLoad) -> list[tvm.ir.Var]:
    return [e for index in load.indices for e in list_expressions(index) if isinstance(e, tvm.ir.Var)]


def _has(variables: list[tvm.ir.Var], var: tvm.ir.Var) -> bool:
    return any(other.same_as(var) for other in variables)


def _ids(variables: list[tvm.ir.Var]) -> set[str]:
    return {str(var.name) for var in variables}


def _last_of(axes: list[tvm.ir.Var], candidates: list[tvm.ir.Var]) -> str | None:
    found = [str(axis.name) for axis in axes if _has(candidates, axis)]
    return found[-1] if found else None
