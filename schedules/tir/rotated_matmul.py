"""Matmuls whose epilogue rotates heads by rotary embeddings: the function, and where its columns lie.

::

    C[m, c] = P[m, c] * cos[m, c % d] + turned * sin[m, c % d]         c < columns: queries and keys, heads of d columns
    C[m, c] = P[m, c]                                                  else: values
    turned  = -P[m, c + d/2] in the first half of a head, P[m, c - d/2] in the second

In the product that a kernel makes, the halves of each head alternate, 8 columns of the first and 8 of the second, so
that a thread that evaluates wgmma's accumulators has both columns of a pair: the weight's columns are stored so
(`interleaved_heads`). C's columns are in the graph's order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import te, tirx

_EIGHT = 8
# A head is whole eights of both halves.
HEAD_UNIT = 2 * _EIGHT
# Of the heads that are looked for.
_HEAD_MAX = 256


def product_column(column: tirx.Expr, head: int) -> tirx.Expr:
    """Return the product's column that a column of C is made of."""
    return _interleave(column, head, tirx.floordiv(tirx.floormod(column, head), head // 2))


def partner_column(column: tirx.Expr, head: int) -> tirx.Expr:
    """Return the product's column that a column of C is rotated with."""
    return _interleave(column, head, 1 - tirx.floordiv(tirx.floormod(column, head), head // 2))


def output_column(column: tirx.Expr, head: int) -> tirx.Expr:
    """Return the column of C that a column of the product goes to."""
    inside = tirx.floormod(column, head)
    second = tirx.floordiv(tirx.floormod(inside, HEAD_UNIT), _EIGHT)
    pair = tirx.floordiv(inside, HEAD_UNIT) * _EIGHT + tirx.floormod(column, _EIGHT)
    return tirx.floordiv(column, head) * head + second * (head // 2) + pair


def _interleave(column: tirx.Expr, head: int, second: tirx.Expr) -> tirx.Expr:
    pair = tirx.floormod(column, head // 2)
    inside = tirx.floordiv(pair, _EIGHT) * HEAD_UNIT + second * _EIGHT + tirx.floormod(pair, _EIGHT)
    return tirx.floordiv(column, head) * head + inside


def possible_heads(columns: int) -> list[int]:
    """Return the sizes that the heads of a matrix with some columns may have, the usual one first."""
    sizes = [size for size in range(HEAD_UNIT, _HEAD_MAX + 1, HEAD_UNIT) if columns % size == 0]
    return sorted(sizes, key=lambda size: (size not in (64, 128), size))


def interleaved_heads(weight: np.ndarray, head: int) -> np.ndarray:
    """Return a matrix [K, N] with the halves of each head of columns alternating, 8 columns of each."""
    rows, columns = weight.shape
    halves = weight.reshape(rows, columns // head, 2, head // HEAD_UNIT, _EIGHT)
    return np.ascontiguousarray(halves.transpose(0, 1, 3, 2, 4).reshape(rows, columns))


def float32_product(x: te.Tensor, weight: te.Tensor, *, turned: bool) -> te.Tensor:
    """Return x [rows..., K] times a weight [K, N], or [N, K] where it is `turned`, with sums in float32."""
    columns, length = weight.shape if turned else reversed(weight.shape)
    over = te.reduce_axis((0, length), name="k")

    def multiply(*index: tirx.Var) -> tirx.Expr:
        *rows, column = index
        place = (column, over) if turned else (over, column)
        return te.sum(x(*rows, over).astype("float32") * weight[place].astype("float32"), axis=over)

    return te.compute((*x.shape[:-1], columns), multiply, name="product")


def rotated_matmul(columns: int, head: int, dtype: str, *, turned: bool = False) -> Callable[..., te.Tensor]:
    """Return the tensor expression of such a matmul.

    It takes x [batch, positions, K], the interleaved weight [K, N], or [N, K] where it is `turned`, cos and sin
    [1 or batch, positions, head]; of the N columns, the first `columns` are rotated. Sums and rotations are in float32,
    the result is rounded once.
    """

    def compute(x: te.Tensor, weight: te.Tensor, cos: te.Tensor, sin: te.Tensor) -> te.Tensor:
        product = float32_product(x, weight, turned=turned)
        is_one = isinstance(cos.shape[0], tirx.IntImm) and int(cos.shape[0]) == 1

        def rotate(b: tirx.Var, s: tirx.Var, c: tirx.Var) -> tirx.Expr:
            row, place = 0 if is_one else b, tirx.floormod(c, head)
            own, partner = product(b, s, product_column(c, head)), product(b, s, partner_column(c, head))
            # Not in the branches of the sign, under whose condition its columns would be simplified beyond recognition.
            sign = tirx.Select(place < head // 2, tirx.FloatImm("float32", -1.0), tirx.FloatImm("float32", 1.0))
            other = partner * sign * sin[row, s, place].astype("float32")
            rotated = own * cos[row, s, place].astype("float32") + other
            all_rotated = columns == int(product.shape[-1])
            return (rotated if all_rotated else tirx.Select(c < columns, rotated, own)).astype(dtype)

        return te.compute(product.shape, rotate, name="rotated")

    return compute
