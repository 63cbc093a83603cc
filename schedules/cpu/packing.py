"""Weights laid out at compile time the way the register tile of a matmul reads them.

    packed[p, k, c] = W[k, p * width + c], and 0 past the last column
    packed[p, k, c, b] = W[4 * k + b, p * width + c], of bytes that a core multiplies by fours

One panel of `width` columns is what one tile of C needs: it is contiguous, so that the tile streams through it with
aligned loads, and the panel stays in the second cache for all rows. Read in place, the rows of a panel lie N elements
apart; where N * 4 is a multiple of 4096 they fall into few sets of the caches and are fetched again for every tile of
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import te, tirx

from relaxtune.schedules.cpu.contraction import BYTES_OF_WORD, best_tile, lanes_of
from relaxtune.schedules.targets import CpuLimits

#: A vector of so many bytes is a line of the caches. A tall tile then reads little of its panel: 14 x 2 vectors in
#: place of 6 x 4. On a Xeon with AVX-512, BERT-base of symbolic sizes takes 0.87 of the time at length 16, 0.90 at 64,
#: and the same from 128 on. Where rows of C begin inside a line, as GPT-2's logits do, wider panels are faster.
LINE_BYTES = 64


def panel_width(rows: int | None, columns: int, dtype: str, limits: CpuLimits) -> int:
    """Return the columns of a panel: those of the best register tile for a matmul of so many rows and columns.

    `rows` is the extent of the left operand's longest row axis, None where symbolic; `dtype` is the accumulators'.
    """
    lanes = lanes_of(dtype, limits)
    exact = columns % lanes == 0
    streamed = rows is None and exact and limits.vector_bytes >= LINE_BYTES
    return best_tile(rows, columns, lanes, limits.vector_registers, exact=exact, streamed=streamed).columns


def packs_words(x: str, weight: np.ndarray, limits: CpuLimits) -> bool:
    """Whether products of activations in a dtype by a [K, N] weight take four bytes along K in one step."""
    return limits.has_byte_dot and (x, str(weight.dtype)) == ("uint8", "int8") and len(weight) % BYTES_OF_WORD == 0


def pack_words(weight: np.ndarray, width: int) -> np.ndarray:
    """Return an int8 [K, N] matrix as [ceil(N / width), K / 4, width, 4], zeros past the last column."""
    panels = pack_weight(weight, width)
    words = panels.reshape(len(panels), -1, BYTES_OF_WORD, width).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(words)


def pack_weight(weight: np.ndarray, width: int) -> np.ndarray:
    """Return a [K, N] matrix as [ceil(N / width), K, width], zeros past the last column."""
    rows, columns = weight.shape
    panels = math.ceil(columns / width)
    padded = np.pad(weight, ((0, 0), (0, panels * width - columns))) if columns % width else weight
    return np.ascontiguousarray(padded.reshape(rows, panels, width).transpose(1, 0, 2))


def packed_matmul(columns: int, dtype: str = "float32") -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    """Return the tensor expression of x [..., M, K] times a packed weight of so many columns, with sums in a dtype.

    Where the columns do not fill the last panel, the product is computed for whole panels and cropped.
    """

    def compute(x: te.Tensor, packed: te.Tensor) -> te.Tensor:
        width = int(packed.shape[2])
        k = te.reduce_axis((0, x.shape[-1]), name="k")

        def element(*index: tirx.Var) -> tirx.Expr:
            *rows, column = index
            panel, place = tirx.floordiv(column, width), tirx.floormod(column, width)
            if len(packed.shape) == 4:
                weight = packed(panel, tirx.floordiv(k, BYTES_OF_WORD), place, tirx.floormod(k, BYTES_OF_WORD))
            else:
                weight = packed(panel, k, place)
            return te.sum(x(*rows, k).astype(dtype) * weight.astype(dtype), axis=k)

        whole = int(packed.shape[0]) * width
        product = te.compute([*x.shape[:-1], whole], element, name="matmul")
        if whole == columns:
            return product
        return te.compute([*x.shape[:-1], columns], lambda *index: product(*index), name="crop")

    return compute
