"""Maxima and minima over axes, and their places, with kernels that keep a NaN and know rows of infinities.

TVM starts at the least finite number: the maximum of a row of -inf, such as a mask that hides every key, would be
-3.4e38, and its place -1. A NaN wins here, as in NumPy; ONNX Runtime keeps or loses one by its place in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm
from tvm import relax, te, tirx, topi

from relaxtune.pipeline.importer.ordered_keys import keys_of, numbers_of

Legaliser = Callable[[relax.BlockBuilder, tvm.ir.Call], tvm.ir.Expr]


def reduction_legalisers() -> Mapping[str, Legaliser]:
    """Return how each operator of floating point numbers is lowered; integers have no NaN, and TVM lowers them."""
    return {
        "relax.max": _by_keys("relax.max", topi.max, numbers=True, nan_last=True),
        "relax.min": _by_keys("relax.min", topi.min, numbers=True, nan_last=False),
        "relax.argmax": _by_keys("relax.argmax", topi.argmax, numbers=False, nan_last=True),
        "relax.argmin": _by_keys("relax.argmin", topi.argmin, numbers=False, nan_last=False),
    }


def _by_keys(operator: str, reduce: Callable[..., te.Tensor], *, numbers: bool, nan_last: bool) -> Legaliser:
    stock = tvm.ir.Op.get(operator).get_attr("FLegalize")

    def legalise(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        dtype = str(call.args[0].ty.dtype.dtype)
        if not dtype.startswith(("float", "bfloat")):
            return stock(builder, call)

        if not numbers and _is_of_one(call):
            return relax.op.zeros(call.ty.shape, str(call.ty.dtype.dtype))

        def compute(x: te.Tensor) -> te.Tensor:
            found = reduce(keys_of(x, nan_last=nan_last), call.attrs.axis, bool(call.attrs.keepdims))
            return numbers_of(found, dtype, nan_last=nan_last) if numbers else found

        return builder.call_te(compute, call.args[0], primfunc_name_hint=operator.rpartition(".")[2])

    return legalise


def _is_of_one(call: tvm.ir.Call) -> bool:
    """Return whether a place is sought along an axis of one."""
    shape, axis = list(call.args[0].ty.shape), call.attrs.axis
    sizes = shape if axis is None else [shape[int(axis)]]
    return all(isinstance(size, tirx.IntImm) and int(size) == 1 for size in sizes)
