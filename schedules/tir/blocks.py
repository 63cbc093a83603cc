"""Read the blocks of a PrimFunc as FuseTIR leaves it: one assignment a block, plain loops, static shapes."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer

from relaxtune.schedules.errors import Refusal


def list_blocks(func: tirx.PrimFunc) -> list[SBlock] | Refusal:
    """Return the blocks of an unscheduled function in their order, each one assignment over plain loops."""
    if any(static_shape(param) is None for param in func.params):
        return Refusal("a parameter is no tensor of static shape")
    found: list[SBlockRealize] = []
    tvm_ffi.structural_walk(func.body, (SBlockRealize, found.append))
    root = [realize for realize in found if not realize.block.iter_vars]
    inner = [realize for realize in found if realize.block.iter_vars]
    if len(root) != 1 or not inner:
        return Refusal(f"expected blocks under one root, found {len(inner)} under {len(root)}")
    for realize in inner:
        block = realize.block
        if constant_value(realize.predicate) != 1 or not isinstance(block.body, tirx.BufferStore):
            return Refusal(f"block {block.name_hint} is guarded, or more than one assignment")
        if not all(isinstance(value, tirx.Var) for value in realize.iter_values if constant_value(value) != 0):
            return Refusal(f"block {block.name_hint} is scheduled already: its axes are not plain loops")
        if axis_extents(block) is None:
            return Refusal(f"block {block.name_hint} has an axis of symbolic size")
    return [realize.block for realize in inner]


def position_of(func: tirx.PrimFunc, buffer: tirx.Var) -> int | None:
    """Return which parameter of the function a buffer is, None when it is none."""
    return next((i for i, param in enumerate(func.params) if param.same_as(buffer)), None)


def static_shape(buffer: tirx.Var) -> tuple[int, ...] | None:
    """Return a buffer's shape when all its sizes are numbers."""
    shape = getattr(buffer.ty, "shape", None)
    if shape is None or not all(isinstance(size, tirx.IntImm) for size in shape):
        return None
    return tuple(int(size) for size in shape)


def axis_extents(block: SBlock) -> tuple[int, ...] | None:
    """Return the sizes of a block's axes when all are numbers."""
    extents = [axis.dom.extent for axis in block.iter_vars]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return tuple(int(extent) for extent in extents)


def constant_value(value: tirx.Expr) -> int | float | None:
    """Return the number that an expression is, None when it is none."""
    simple = Analyzer().simplify(value)
    return simple.value if isinstance(simple, (tirx.IntImm, tirx.FloatImm)) else None


def substitute(expr: tirx.Expr, values: Mapping[tirx.Var, tirx.Expr]) -> tirx.Expr:
    """Return the expression with variables replaced."""
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var)))


def tree_size(expr: tirx.Expr) -> int:
    """Return the nodes of an expression's tree."""
    count = 0

    def note(_node: object) -> None:
        nonlocal count
        count += 1

    tvm_ffi.structural_walk(expr, (tvm.ir.Expr, note))
    return count
