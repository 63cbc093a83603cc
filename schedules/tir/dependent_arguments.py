"""Parameters of a kernel that are not random numbers in use: masks of padding, and sums of other parameters."""

from __future__ import annotations

from tvm import tirx
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import spec_of
from relaxtune.schedules.tir.blocks import position_of
from relaxtune.schedules.tir.expressions import constant_value, find_all
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.row_norm import SHIFT


def padding_masks(func: tirx.PrimFunc) -> dict[str, int]:
    """Return the position of an attention's mask of padding, and the number with which it hides nothing."""
    spec = spec_of(func)
    if spec is None or spec.bias is None or not spec.bias.of_padding:
        return {}
    return {str(spec.bias.param): 0 if spec.bias.kind == "add" else 1}


def partial_sums_of_rows(func: tirx.PrimFunc) -> dict[str, int]:
    """Return the positions of the partial sums that a matmul of normalised rows reads, and of the rows."""
    matmul = recognise_matmul(func)
    return {} if isinstance(matmul, Refusal) or matmul.norm is None else {str(matmul.norm.partials): matmul.a}


def column_sums_of_weights(func: tirx.PrimFunc) -> dict[str, tuple[int, int]]:
    """Return the positions of the sums of B's columns that a matmul of centred rows reads, and of B, and B's K axis.

    They are what the epilogue multiplies the shift of a row by.
    """
    matmul = recognise_matmul(func)
    if isinstance(matmul, Refusal) or matmul.norm is None:
        return {}
    found: dict[str, tuple[int, int]] = {}

    for product in find_all(matmul.epilogue.value, tirx.Mul):
        for shift, sums in ((product.a, product.b), (product.b, product.a)):
            loads = isinstance(shift, TensorLoad) and isinstance(sums, TensorLoad)
            if loads and shift.source.same_as(matmul.norm.buffer) and constant_value(shift.indices[-1]) == SHIFT:
                position = position_of(func, sums.source)
                if position is not None:
                    found[str(position)] = (matmul.b, 1 if matmul.b_transposed else 0)
    return found
