"""Kernels of tensor expressions take sizes in the order of their names.

A size that is no axis of a tensor by itself, as `past` and `sequence` of an axis `past + sequence`, is an argument of
the kernel. TVM takes such sizes from a set, in the order of addresses: equal operations became different kernels, and
the same model had other kernels in the next run.
"""

from __future__ import annotations

from functools import cache

import tvm
from tvm import tirx
from tvm.relax import block_builder, utils


@cache
def order_sizes() -> None:
    """Let TVM's `call_te` order the sizes of its kernels from now on."""
    block_builder.gen_call_tir_inputs = _in_order


def _in_order(*arguments: object, **options: object) -> tuple[tirx.PrimFunc, list[tvm.ir.Expr], object]:
    """Return a PrimFunc, the arguments of its call, and the type of the result."""
    func, given, kinds = utils.gen_call_tir_inputs(*arguments, **options)
    tensors = sum(not tvm.ir.is_prim_expr(one) for one in given)
    sizes = sorted(range(tensors, len(given)), key=lambda place: str(given[place]))
    order = [*range(tensors), *sizes, *range(len(given), len(func.params))]
    if order == sorted(order):
        return func, given, kinds
    ordered = tirx.PrimFunc([func.params[place] for place in order], func.body, func.ret_type, func.attrs)
    return ordered, [given[place] for place in order[: len(given)]], kinds
