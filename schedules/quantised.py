"""Matmuls by quantised weights as tensor expressions: what their kernels compute, and how the bytes lie.

::

    W[k, n] = (level - offset) * scale[n, k // group]          level of `bits` bits, offset 2**(bits - 1)

Rows, for GPUs: bytes [N, K * bits / 8], scales [N, groups]; of 4 bits, even positions along K are the lower halves.
Panels, for CPUs: bytes [P, K * bits / 8, width], scales [P, groups, width], column n = panel * width + place; a panel
is what a register tile of the matmul reads (see `schedules.cpu.packing`).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx

Compute = Callable[..., te.Tensor]


def dequantise_rows(k: int, bits: int, group: int, dtype: str) -> Compute:
    """Return the tensor expression (bytes, scales) -> W^T [N, K] in a dtype, computed in float32."""

    def compute(packed: te.Tensor, scales: te.Tensor) -> te.Tensor:
        def element(n: tirx.Var, at: tirx.Var) -> tirx.Expr:
            value = _level(packed[n, at * bits // 8], at, bits) * scales[n, at // group].astype("float32")
            return value.astype(dtype)

        return te.compute((packed.shape[0], k), element, name="dequantise")

    return compute


def matmul_of_rows(k: int, bits: int, group: int, dtype: str) -> Compute:
    """Return the tensor expression (x [..., K], bytes, scales) -> x @ W, summed in float32 and given in a dtype."""

    def compute(x: te.Tensor, packed: te.Tensor, scales: te.Tensor) -> te.Tensor:
        weight = dequantise_rows(k, bits, group, "float32")(packed, scales)
        over = te.reduce_axis((0, k), name="k")

        def element(*index: tirx.Var) -> tirx.Expr:
            *row, column = index
            return te.sum(x(*row, over).astype("float32") * weight(column, over), axis=over)

        return _given(te.compute([*x.shape[:-1], packed.shape[0]], element, name="matmul"), dtype)

    return compute


def matmul_of_panels(k: int, columns: int, bits: int, group: int, dtype: str) -> Compute:
    """Return the tensor expression (x [..., K], bytes, scales) -> x @ W [..., `columns`] for weights in panels."""

    def compute(x: te.Tensor, packed: te.Tensor, scales: te.Tensor) -> te.Tensor:
        panels, _, width = (int(size) for size in packed.shape)

        def dequantised(panel: tirx.Var, at: tirx.Var, place: tirx.Var) -> tirx.Expr:
            level = _level(packed[panel, at * bits // 8, place], at, bits)
            return level * scales[panel, at // group, place].astype("float32")

        weight = te.compute((panels, k, width), dequantised, name="dequantise")
        wide = te.compute(x.shape, lambda *index: x(*index).astype("float32"), name="wide")
        over = te.reduce_axis((0, k), name="k")

        def element(*index: tirx.Var) -> tirx.Expr:
            *row, column = index
            return te.sum(
                wide(*row, over) * weight(tirx.floordiv(column, width), over, tirx.floormod(column, width)), axis=over
            )

        product = te.compute([*x.shape[:-1], panels * width], element, name="matmul")
        if panels * width != columns:
            product = te.compute([*x.shape[:-1], columns], lambda *index: product(*index), name="crop")
        return _given(product, dtype)

    return compute


def _level(byte: tirx.Expr, at: tirx.Var, bits: int) -> tirx.Expr:
    """Return a level less its offset, in float32."""
    level = byte.astype("int32")
    if bits == 4:
        level = (level >> (at % 2 * 4).astype("int32")) & 15
    return (level - 2 ** (bits - 1)).astype("float32")


def _given(product: te.Tensor, dtype: str) -> te.Tensor:
    if dtype == "float32":
        return product
    return te.compute(product.shape, lambda *index: product(*index).astype(dtype), name="rounded")
