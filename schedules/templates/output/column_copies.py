"""Copies in shared memory of what an epilogue reads one element a column of (a bias), one for each group of warps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx.layout import S, TileLayout
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import constant_params
from relaxtune.schedules.templates.emit.device_function import load_bytes
from relaxtune.schedules.templates.output.output_shares import Shares, column_loads
from relaxtune.schedules.tir.blocks import element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.expressions import dtype_of

# The first of the groups' named barriers.
_GROUP_BARRIER = 2


class ColumnCopies:
    """Emits the making and reading of copies into the current IRBuilder.

    `params` are the parameters of the kernel under construction, in the order of the function's.
    """

    def __init__(self, func: tirx.PrimFunc, matmul: MatmulFunction, params: Sequence[tirx.Var], shares: Shares) -> None:
        self._shares, self._columns = shares, matmul.columns
        self._warps, self._threads = shares.group_warps, shares.group_warps * 32
        self._loads = column_loads(matmul)
        places = [next(n for n, one in enumerate(func.params) if one.same_as(load.source)) for load in self._loads]
        self._params = [params[place] for place in places]
        self._constant = [place in constant_params(func) for place in places]
        self._begun = False

    def allocate(self, pool: T.SMEMPool) -> None:
        """Take shared memory from a pool."""
        shape = (self._shares.warps // self._warps, self._shares.columns)
        self._copies = [pool.alloc(shape, dtype_of(load), align=128) for load in self._loads]

    def begin(self, column: tirx.Expr, warp: tirx.Expr, lane: tirx.Expr) -> None:
        """Emit the copying of what no kernel writes for a block's only tile, as `make` does it for the others."""
        self._begun = True
        for number, constant in enumerate(self._constant):
            if constant:
                self._copy(number, column, warp, lane)

    def make(self, column: tirx.Expr, warp: tirx.Expr, lane: tirx.Expr) -> None:
        """Emit the copying of a tile's columns; `column` is the first of this warp's part of the tile."""
        # The reads of the tile before must be done.
        if not self._begun:
            self.wait(warp)
        for number, constant in enumerate(self._constant):
            if not (constant and self._begun):
                self._copy(number, column, warp, lane)

    def wait(self, warp: tirx.Expr) -> None:
        """Emit a barrier of the group, where it shares copies: each lane reads what others made."""
        if self._loads:
            T.evaluate(T.ptx.bar.sync(tirx.Cast("uint32", warp // self._warps + _GROUP_BARRIER), self._threads))

    def pairs(self, warp: tirx.Expr, column: tirx.Expr) -> list[tuple[TensorLoad, tirx.Var]]:
        """Emit the loads of two neighbouring elements of every copy into registers; `column` is the first's, in it."""
        return [
            (load, load_pair(copy, [warp // self._warps], column))
            for load, copy in zip(self._loads, self._copies, strict=True)
        ]

    def _copy(self, number: int, column: tirx.Expr, warp: tirx.Expr, lane: tirx.Expr) -> None:
        dtype = dtype_of(self._loads[number])
        source = T.decl_buffer((self._columns,), dtype, data=self._params[number].data)
        for step in range(math.ceil(self._shares.columns / self._threads)):
            position = warp % self._warps * 32 + lane + step * self._threads
            register = T.alloc_local([1], dtype)
            with T.If(position < self._shares.columns), T.Then():
                at = tirx.min(column + position, self._columns - 1)
                load_bytes(register.ptr_to([0]), source.ptr_to([at]), element_bytes(dtype))
                T.buffer_store(self._copies[number], register[0], [warp // self._warps, position])


@lru_cache(maxsize=1)
def _layout_of_pair() -> TileLayout:
    return TileLayout(S[(2,)])


def pair_of(dtype: str) -> tirx.Var:
    """Emit two registers. Their layout is TVM's default, which TVM would work out anew for each of hundreds."""
    return T.alloc_local([2], dtype, layout=_layout_of_pair())


def load_pair(buffer: tirx.Var, indices: list[tirx.Expr], last: tirx.Expr) -> tirx.Var:
    """Emit the load of two neighbouring elements along a buffer's last axis into registers."""
    pair = pair_of(str(buffer.ty.dtype))
    with T.vectorized(2) as lane:
        T.buffer_store(pair, buffer[(*indices, last + lane)], [lane])
    return pair
