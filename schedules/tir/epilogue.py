"""A matmul and the function of its accumulator, as values; `schedules.tir.matmul` recognises them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.tir.blocks import Size, element_bytes, same_sizes, shape_of, static_shape
from relaxtune.schedules.tir.expressions import constant_value
from relaxtune.schedules.tir.rotated_matmul import partner_column, product_column
from relaxtune.schedules.tir.row_norm import PartialSums, RowNorm


@dataclass(frozen=True)
class Epilogue:
    """The value that a kernel stores for an accumulator."""

    value: tirx.Expr  # The output element; its variables are `accumulator` and `axes`.
    accumulator: tirx.Var  # Stands for the accumulator: float32, or int32 of integer operands.
    axes: tuple[tirx.Var, ...]  # One variable per output axis.
    shape: tuple[Size, ...]  # The output's shape; all but the last axis may be symbolic.
    # Stands for the other accumulator of a gated function (see `gate_column`), or of one that rotates heads; None in
    # others.
    second: tirx.Var | None = None
    head: int = 0  # Columns of each head of a function that rotates heads (see `rotated_matmul`), 0 in others.

    @property
    def accumulators(self) -> int:
        """Columns of the product for each column of the output."""
        return 1 if self.second is None or self.head else 2

    def product_columns(self, column: tirx.Expr) -> tuple[tirx.Expr, ...]:
        """Return the columns of the product that an output column is made of, one for each accumulator."""
        if self.head:
            return product_column(column, self.head), partner_column(column, self.head)
        return (column,) if self.second is None else (gate_column(column), value_column(column))

    def loads(self) -> tuple[TensorLoad, ...]:
        """Return the distinct elements of external buffers that one output element depends on."""
        return self._loads

    # Plans ask thousands of times for what the expression's loads are.
    @cached_property
    def _loads(self) -> tuple[TensorLoad, ...]:
        found: list[TensorLoad] = []

        def note(load: TensorLoad) -> None:
            if not any(tvm_ffi.structural_equal(load, other) for other in found):
                found.append(load)

        # Loads inside the indices of others come first: a kernel makes them in this order.
        tvm_ffi.structural_walk(self.value, (TensorLoad, note))
        return tuple(found)

    @cached_property
    def aligned_loads(self) -> tuple[TensorLoad, ...]:
        """The loads that `is_aligned` holds for."""
        return tuple(load for load in self._loads if self.is_aligned(load))

    @cached_property
    def column_loads(self) -> tuple[TensorLoad, ...]:
        """The loads that `is_per_column` holds for."""
        return tuple(load for load in self._loads if self.is_per_column(load))

    def is_aligned(self, load: TensorLoad) -> bool:
        """Whether the load reads, of a buffer shaped like the output, the element at the output's own position."""
        return same_sizes(shape_of(load.source), self.shape) and same_position(load.indices, self.axes, self.shape)

    def is_per_column(self, load: TensorLoad) -> bool:
        """Whether the load reads the output's last axis alone, all of it (a bias)."""
        shape, last = static_shape(load.source), len(self.axes) - 1
        if shape is None or shape[-1:] != self.shape[last:] or math.prod(shape) != self.shape[last]:
            return False
        return same_position(load.indices[-1:], self.axes[last:], self.shape[last:]) and all(
            constant_value(index) == 0 for index in load.indices[:-1]
        )

    def is_per_row(self, load: TensorLoad) -> bool:
        """Whether the load reads, of a buffer of a few elements for each row of the output, one of them."""
        shape, last = shape_of(load.source), len(self.axes) - 1
        if not shape or not same_sizes(shape[:-1], self.shape[:-1]) or constant_value(load.indices[-1]) is None:
            return False
        return same_position(load.indices[:-1], self.axes[:last], self.shape[:last])


@dataclass(frozen=True)
class Quantisation:
    """How B is stored: positions of the parameters of its bytes and scales, bits, and weights along K with a scale."""

    packed: int
    scales: int
    bits: int
    group: int


@dataclass(frozen=True)
class MatmulFunction:
    """`C[M, N] = epilogue(A[M, K] @ B)` with B as `[K, N]`, or as `[N, K]` when `b_transposed`.

    `m` is the number of rows. Where it is symbolic, `rows` is its expression, and `m` the number that was asked about.
    `a`, `b` and `output` are positions of the function's parameters; `input_dtype` is A's dtype, `b_dtype` B's, which
    may be another where both have 8 bits; `norm` are statistics of A's rows that the epilogue reads, `partials` sums of
    C's rows that are an output too, None where there are none. Where B is quantised, `stored` says how, and `b` is no
    parameter of the function.
    """

    a: int
    b: int
    output: int
    b_transposed: bool
    m: int
    n: int
    k: int
    input_dtype: str
    b_dtype: str
    output_dtype: str
    epilogue: Epilogue
    norm: RowNorm | None = None
    partials: PartialSums | None = None
    rows: tirx.Expr | None = None
    stored: Quantisation | None = None

    @property
    def weight_bits(self) -> int:
        """Bits of an element of B as it is stored."""
        return 8 * element_bytes(self.b_dtype) if self.stored is None else self.stored.bits

    @property
    def sums(self) -> str:
        """The dtype of the sums: float32, or int32 of integer operands."""
        return str(self.epilogue.accumulator.ty.dtype)

    @property
    def extent(self) -> Size:
        """Rows as code counts them: their number, or its expression where that is symbolic."""
        return self.m if self.rows is None else self.rows

    @property
    def columns(self) -> int:
        """Columns of the output: N, or half of it where gates and values are interleaved."""
        return self.n // self.epilogue.accumulators


def gate_column(column: tirx.Expr) -> tirx.Expr:
    """Return the column of the product that is the gate of an output column of a gated function.

    A gated function is `C[m, c] = value(P[m, gate_column(c)], P[m, value_column(c)], m, c)` of one product P[M, N] with
    C[M, N / 2], such as silu(gate) * value. Its B alternates the weights of both: 8 columns of gates, 8 of values,
    so that a thread that evaluates wgmma's accumulators has both. On an H200 (cold L2, fp16), K = 2048 and 8192 gates
    take 18.1, 21.1 and 186 us with 1, 128 and 2048 rows, and as two kernels 20.9, 24.5 and 195 us.
    """
    return tirx.floordiv(column, 8) * 16 + tirx.floormod(column, 8)


def value_column(column: tirx.Expr) -> tirx.Expr:
    """Return the column of the product that is gated in an output column; see `gate_column`."""
    return gate_column(column) + 8


def same_position(indices: Sequence[tirx.Expr], axes: Sequence[tirx.Var], shape: Sequence[Size]) -> bool:
    """Whether the indices are the axes; an axis of size 1 may be written as 0."""
    return len(indices) == len(axes) and all(
        index.same_as(axis) or (isinstance(size, int) and size == 1 and constant_value(index) == 0)
        for index, axis, size in zip(indices, axes, shape, strict=True)
    )
