"""Matmuls by quantised weights as tensor expressions: what their kernels compute, and how the bytes lie.

::

    W[k, n] = (level - offset) * scale[n, k // group]          level of `bits` bits, offset 2**(bits - 1)

Rows, for GPUs: bytes [N, K * bits / 8], scales [groups, N]; of 4 bits, even positions along K are the lower halves.
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
            value = _level(packed[n, at * bits // 8], at, bits) * scales[_group_of(at, k, group), n].astype("float32")
            return value.astype(dtype)

        return te.compute((packed.shape[0], k), element, name="dequantise")

    return compute


def matmul_of_rows(k: int, bits: int, group: int, dtype: str) -> Compute:
    """Return the tensor expression (x [..., K], bytes, scales) -> x @ W, summed in float32 and given in a dtype.

    W is rounded to x's dtype, as where it is dequantised by a kernel of its own.
    """

    def compute(x: te.Tensor, packed: te.Tensor, scales: te.Tensor) -> te.Tensor:
        weight = dequantise_rows(k, bits, group, x.dtype)(packed, scales)
        over = te.reduce_axis((0, k), name="k")

        def element(*index: tirx.Var) -> tirx.Expr:
            *row, column = index
            return te.sum(x(*row, over).astype("float32") * weight(column, over).astype("float32"), axis=over)

        return _given(te.compute([*x.shape[:-1], packed.shape[0]], element, name="matmul"), dtype)

    return compute


def matmul_of_panels(k: int, columns: int, bits: int, group: int, dtype: str) -> Compute:
    """Return the tensor expression (x [..., K], bytes, scales) -> x @ W [..., `columns`] for weights in panels."""

    def compute(x: te.Tensor, packed: te.Tensor, scales: te.Tensor) -> te.Tensor:
        panels, _, width = (int(size) for size in packed.shape)

        def dequantised(panel: tirx.Var, at: tirx.Var, place: tirx.Var) -> tirx.Expr:
            level = _level(packed[panel, at * bits // 8, place], at, bits)
            return level * scales[panel, _group_of(at, k, group), place].astype("float32")

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


def _group_of(at: tirx.Var, k: int, group: int) -> tirx.Expr:
    # Written as later passes simplify it, so that a dequantisation is known again.
    return at // group if group < k else tirx.IntImm(str(at.ty.dtype), 0)


def _level(byte: tirx.Expr, at: tirx.Var, bits: int) -> tirx.Expr:
    """Return a level less its offset, in float32."""
    # In bytes: wider integers of an index's type would be widened with it.
    level = byte if bits == 8 else (byte >> (at % 2 * 4).astype("uint8")) & tirx.const(15, "uint8")
    return level.astype("float32") - tirx.const(2.0 ** (bits - 1), "float32")


def _given(product: te.Tensor, dtype: str) -> te.Tensor:
    if dtype == "float32":
        return product
    return te.compute(product.shape, lambda *index: product(*index).astype(dtype), name="rounded")
