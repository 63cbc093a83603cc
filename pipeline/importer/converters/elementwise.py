"""Elementwise operators."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from pipeline.importer.converters.base import Converter, ConverterInput, constant_value

# Up to here a product is cheaper than `pow`, and as exact.
_MAX_PRODUCT = 4


def convert_pow(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return a power with a small constant exponent as products, or a square root; None leaves the rest to TVM.

    `pow` is a library call an element, it keeps LLVM from vectorising the loop (GELU's x^3, RMSNorm's x^2), and TVM
    warns about it on stderr.
    """
    base = node.input(0)
    exponent = constant_value(node.input(1))
    if exponent is None or exponent.size != 1 or exponent.ndim > base.ty.ndim or not _is_float(base):
        return None
    value = float(exponent.reshape(()))
    if value == 0.5:
        return relax.op.sqrt(base)
    if value not in range(1, _MAX_PRODUCT + 1):
        return None
    product = base
    for _ in range(int(value) - 1):
        product = node.builder.emit(relax.op.multiply(product, base))
    return product


def _is_float(expr: tvm.ir.Expr) -> bool:
    return str(expr.ty.dtype.dtype).startswith(("float", "bfloat"))


ELEMENTWISE_CONVERTERS: Mapping[tuple[str, str], Converter] = {("", "Pow"): convert_pow}
