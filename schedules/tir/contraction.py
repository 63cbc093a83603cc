"""Recognition of contractions, the family of matmuls: one reading of `C += A * B`, for signatures, schedules, kernels.

Notation: ``C[b.., m.., n..] += A[b.., m.., k..] * B[b.., k.., n..]`` in any order of the indices. An axis of the output
is ``b`` when both operands have it, ``m`` when only A has it, ``n`` when only B has it; reduction axes are ``k``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.tir.blocks import Block
from relaxtune.schedules.tir.expressions import list_loads, used_vars, without_casts

Loads = tuple[TensorLoad, TensorLoad]


@dataclass(frozen=True)
class Contraction:
    """A matmul as written in TIR: sizes, whether A is stored k-major (`trans_a`) and B n-major (`trans_b`), buffers."""

    batch: int
    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool
    a: tirx.Var
    b: tirx.Var
    output: tirx.Var
    is_conv: bool


def find_factors(store: tirx.BufferStore, *, rounded: bool = False) -> tuple[tirx.Expr, tirx.Expr] | None:
    """Return x and y of `C[...] = C[...] + x * y`, None for another statement; `rounded` products may be cast."""
    total = store.value
    if not isinstance(total, tirx.Add):
        return None
    for accumulated, product in ((total.a, total.b), (total.b, total.a)):
        if isinstance(accumulated, TensorLoad) and accumulated.source.same_as(store.buffer):
            product = without_casts(product) if rounded else product
            return (product.a, product.b) if isinstance(product, tirx.Mul) else None
    return None


def find_operands(store: tirx.BufferStore, *, rounded: bool = False) -> Loads | None:
    """Return the loads of `C[...] = C[...] + x * y` of two tensors, casts around them removed; see `find_factors`."""
    factors = find_factors(store, rounded=rounded)
    if factors is None:
        return None
    a, b = map(without_casts, factors)
    if not isinstance(a, TensorLoad) or not isinstance(b, TensorLoad) or a.source.same_as(b.source):
        return None
    return a, b


def index_vars(load: TensorLoad) -> set[tirx.Var]:
    """Return the variables in the indices of a load."""
    return {var for index in load.indices for var in used_vars(index)}


def are_axes(indices: Sequence[tirx.Expr], axes: Sequence[tirx.Var]) -> bool:
    """Whether indices are some axes, in their order."""
    return len(indices) == len(axes) and all(index.same_as(axis) for index, axis in zip(indices, axes, strict=True))


def find_contraction(block: Block) -> Contraction | None:
    """Return the contraction that a block of static sizes computes, or None when it is something else."""
    stores = block.stores
    operands = find_operands(stores[0], rounded=True) if block.reduced and len(stores) == 1 else None
    if operands is None or any(list_loads(index) for load in operands for index in load.indices):
        return None
    a, b = operands
    a_axes, b_axes = _plain_axes(a), _plain_axes(b)
    is_conv = a_axes is None or b_axes is None
    in_a, in_b = index_vars(a), index_vars(b)
    sizes = {"batch": 1, "m": 1, "n": 1}
    kinds: dict[str, set[tirx.Var]] = {"batch": set(), "m": set(), "n": set()}
    for var, extent, letter in zip(block.axes, block.extents, block.kinds, strict=True):
        if letter != "R":
            kind = "batch" if var in in_a and var in in_b else "n" if var in in_b else "m"
            sizes[kind] *= extent or 0
            kinds[kind].add(var)
    if not kinds["m"] and not kinds["n"]:
        return None
    reduced = set(block.reduced)
    return Contraction(
        batch=sizes["batch"],
        m=sizes["m"],
        n=sizes["n"],
        k=math.prod(block.reduced_sizes),
        trans_a=not is_conv and _last_of(a_axes or [], kinds["m"] | reduced) in kinds["m"],
        trans_b=not is_conv and _last_of(b_axes or [], kinds["n"] | reduced) in reduced,
        a=a.source,
        b=b.source,
        output=stores[0].buffer,
        is_conv=is_conv,
    )


def _plain_axes(load: TensorLoad) -> list[tirx.Var] | None:
    """Return the index variables of a load in storage order, or None when an index is an expression.

    An axis cut into panels, as a packed weight's is, counts as the variable for the panel's number and its inside.
    """
    axes = []
    for index in load.indices:
        if isinstance(index, tirx.FloorDiv | tirx.FloorMod) and isinstance(index.b, tirx.IntImm):
            index = index.a
        if isinstance(index, tirx.Var):
            axes.append(index)
        elif not isinstance(index, tirx.IntImm):
            return None
    return axes


def _last_of(axes: Sequence[tirx.Var], candidates: Collection[tirx.Var]) -> tirx.Var | None:
    return next((axis for axis in reversed(axes) if axis in candidates), None)
