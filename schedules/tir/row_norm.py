"""Statistics of rows, from which a matmul's epilogue makes the product of rows that were normalised before it.

Notation
--------
::

    layer norm    x = (y * scale + shift) * gamma + beta       mean = sum_k y[k] / K, shift = -mean * scale
                                                               scale = 1 / sqrt(sum_k y[k]^2 / K - mean^2 + epsilon)
    RMS norm      x = y * scale * gamma                        scale = 1 / sqrt(sum_k y[k]^2 / K + epsilon), shift = 0

    x @ W  =  (y @ V) * scale + shift * ones @ V + beta @ W    with V = gamma[:, None] * W

so that a matmul of y itself, with two numbers a row and two a column, takes the norm's place. Three kinds of functions
share the work, all in float32:

- the one that makes y [rows..., K] also makes `partials` [K / group, rows..., 2]: the sum (`SUM`) and the sum of
  squares (`SQUARES`) of each group of columns, which one thread block has;
- one that multiplies y makes `statistics` [rows..., 2] of them: `SCALE` and `SHIFT`;
- one that adds x reads those.

The square of the mean costs the variance a relative error of about 1e-7 * (1 + mean^2 / variance): less than what half
precision did to y before, which is 5e-4 of y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import te, tirx
from tvm.ir import Call

from relaxtune.schedules.tir.blocks import Block, position_of, same_sizes, shape_of
from relaxtune.schedules.tir.contraction import are_axes
from relaxtune.schedules.tir.expressions import call_name, constant_value, find_all, list_loads

SUM, SQUARES = 0, 1
SCALE, SHIFT = 0, 1
COUNT = 2


@dataclass(frozen=True)
class PartialSums:
    """Sums of groups of columns of a function's output.

    `block` sums up the parameter at position `source`; the sums are the parameter at position `output`, [groups,
    rows..., COUNT], each of `group` columns.
    """

    source: int
    output: int
    group: int
    block: Block


@dataclass(frozen=True)
class RowNorm:
    """Statistics of rows whose partial sums are a function's parameter."""

    partials: int  # Position of the partial sums.
    # Partial sums of a row, and its elements.
    groups: int
    size: int
    centred: bool  # Whether the mean is subtracted (a layer norm).
    epsilon: float  # Added to the variance.
    buffer: tirx.Var  # The statistics, [rows..., COUNT].
    output: int | None  # Position of the parameter that the statistics are, None when they are an intermediate.
    blocks: tuple[Block, ...]  # The blocks that compute them.


def partial_sums(data: te.Tensor, group: int) -> te.Tensor:
    """Return the partial sums [K / group, rows..., COUNT] of a tensor [rows..., K]; `group` divides K."""
    *rows, length = data.shape

    def element(*index: tirx.Var) -> tirx.Expr:
        number, *row, which = index
        over = te.reduce_axis((0, _index(group)), name="c")
        return te.sum(_power(which, data(*row, number * group + over)), axis=over)

    return te.compute((_index(int(length) // group), *rows, _index(COUNT)), element, name="partial_sums")


def row_statistics(partials: te.Tensor, size: int, *, centred: bool, epsilon: float) -> te.Tensor:
    """Return the statistics [rows..., COUNT] of rows of `size` elements from their partial sums."""
    groups, *rows, _ = partials.shape

    def sum_of(name: str, which: int) -> te.Tensor:
        over = te.reduce_axis((0, groups), name="g")
        return te.compute(rows, lambda *row: te.sum(partials(over, *row, _index(which)), axis=over), name=name)

    total = sum_of("row_sum", SUM) if centred else None
    squares = sum_of("row_squares", SQUARES)

    def statistic(*index: tirx.Var) -> tirx.Expr:
        *row, which = index
        return _statistic(which, None if total is None else total(*row), squares(*row), size, epsilon)

    return te.compute((*rows, _index(COUNT)), statistic, name="row_statistics")


def find_partial_sums(func: tirx.PrimFunc, blocks: Sequence[Block]) -> PartialSums | None:
    """Return the partial sums that one of a function's blocks computes of a parameter, None when there are none."""
    for block in blocks:
        store, shape = block.store, shape_of(block.store.buffer)
        output, loads = position_of(func, store.buffer), list_loads(store.value)
        if block.init is None or output is None or shape is None or not _sums(block) or len(loads) < COUNT:
            continue
        if len(store.indices) < 2:
            continue
        source = position_of(func, loads[-1].source)
        whole = None if source is None else shape_of(func.params[source])
        if source is None or not whole or not isinstance(whole[-1], int) or not same_sizes(whole[:-1], shape[1:-1]):
            continue
        group = block.reduced_sizes[-1]
        number, *row, which = store.indices
        data = func.params[source][(*row, number * group + block.axes[-1])]
        expected = tirx.Add(store.buffer[tuple(store.indices)], _power(which, data))
        if (shape[0], shape[-1]) == (whole[-1] // group, COUNT) and tvm_ffi.structural_equal(store.value, expected):
            return PartialSums(source, output, group, block)
    return None


def find_row_norm(func: tirx.PrimFunc, blocks: Sequence[Block]) -> RowNorm | None:
    """Return the statistics that some of a function's blocks compute, None when there are none."""
    found = (_statistics_of(func, blocks, block) for block in blocks)
    return next((norm for norm in found if norm is not None), None)


def _statistics_of(func: tirx.PrimFunc, blocks: Sequence[Block], block: Block) -> RowNorm | None:
    """Return the statistics that a block completes."""
    store, shape = block.store, shape_of(block.store.buffer)
    constants = _constants(store.value)
    if block.init is not None or not shape or not constants:
        return None
    if not same_sizes(shape[-1:], (COUNT,)) or not same_sizes(block.sizes, shape):
        return None
    size, epsilon = constants
    read = [load.source for load in list_loads(store.value)]
    sums = [one for one in blocks if one.init is not None and any(one.store.buffer.same_as(source) for source in read)]
    if not 1 <= len(sums) <= COUNT or not all(_sums(one) for one in sums):
        return None
    # Sums first, squares last.
    sums.sort(key=_kind)
    *row, which = store.indices
    if any(len(one.store.indices) != len(row) for one in sums):
        return None
    total, squares = (sums[0].store.buffer if len(sums) == COUNT else None), sums[-1].store.buffer
    row_total = None if total is None else total[tuple(row)]
    if not tvm_ffi.structural_equal(store.value, _statistic(which, row_total, squares[tuple(row)], size, epsilon)):
        return None
    partials = next(
        (p for load in list_loads(sums[-1].store.value) if (p := position_of(func, load.source)) is not None), None
    )
    if partials is None:
        return None
    given = func.params[partials]
    groups, *rows = shape_of(given) or (0,)
    if not isinstance(groups, int) or not same_sizes(rows, shape):
        return None
    if not all(same_sizes(one.sizes, (*rows[:-1], groups)) for one in sums):
        return None
    for one, kind in zip(sums, (SUM, SQUARES) if total is not None else (SQUARES,), strict=True):
        body, over = one.store, one.axes[-1]
        element = given[(over, *body.indices, _index(kind))]
        if not tvm_ffi.structural_equal(body.value, tirx.Add(body.buffer[tuple(body.indices)], element)):
            return None
    output = position_of(func, store.buffer)
    return RowNorm(partials, groups, size, total is not None, epsilon, store.buffer, output, (*sums, block))


def _power(which: tirx.Expr, x: tirx.Expr) -> tirx.Expr:
    """Return an element or its square, in float32."""
    wide = tirx.Cast("float32", x)
    return tirx.Select(tirx.EQ(which, _index(SUM)), wide, tirx.Mul(wide, wide))


def _statistic(which: tirx.Expr, total: tirx.Expr | None, squares: tirx.Expr, size: int, epsilon: float) -> tirx.Expr:
    zero, length = tirx.FloatImm("float32", 0.0), tirx.FloatImm("float32", float(size))
    mean, variance = zero, tirx.Div(squares, length)
    if total is not None:
        mean = tirx.Div(total, length)
        variance = tirx.Max(tirx.Sub(variance, tirx.Mul(mean, mean)), zero)
    scale = tirx.rsqrt(tirx.Add(variance, tirx.FloatImm("float32", epsilon)))
    shift = zero if total is None else tirx.Mul(tirx.Sub(zero, mean), scale)
    return tirx.Select(tirx.EQ(which, _index(SCALE)), scale, shift)


def _constants(value: tirx.Expr) -> tuple[int, float] | None:
    """Return the size of a row and what is added under the inverse roots of an expression."""
    roots, divisions = find_all(value, Call), find_all(value, tirx.Div)
    if not roots or any(call_name(root) != "tirx.rsqrt" for root in roots) or not divisions:
        return None
    total = roots[0].args[0]
    epsilon = constant_value(total.b) if isinstance(total, tirx.Add) else None
    size = constant_value(divisions[0].b)
    return None if epsilon is None or size is None else (int(size), float(epsilon))


def _sums(block: Block) -> bool:
    """Whether a block is a sum from 0 over one axis, its last, that writes its other axes in their order."""
    return (
        block.init is not None
        and block.kinds == "S" * (len(block.axes) - 1) + "R"
        and constant_value(block.init.value) == 0
        and are_axes(block.store.indices, block.spatial)
    )


def _kind(block: Block) -> int:
    """Return which partial sums a block adds up; any number where it adds up something else."""
    load = list_loads(block.store.value)[-1]
    return int(constant_value(load.indices[-1]) or 0) if load.indices else 0


def _index(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)
