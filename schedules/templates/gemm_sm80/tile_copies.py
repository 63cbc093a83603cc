"""Copies of tiles of A and B from global to shared memory by all threads of a block; the notation is `template.py`'s.

`schedules.templates.emit.async_copy` says which thread copies what. Rows and columns outside a matrix are clamped:
what they make is not written. Along K, zeros stand for what does not exist.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.async_copy import COPY_BYTES, TileChunks, copy_async
from relaxtune.schedules.templates.emit.kernel_frame import flat_view
from relaxtune.schedules.templates.emit.registers import when
from relaxtune.schedules.templates.gemm_sm80.plan import STORED_DEPTH, GemmPlan, chunks_together
from relaxtune.schedules.tir.blocks import Size, element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction


class TileCopies:
    """Emits the copies into the current IRBuilder; `tiles` are the stages of A and B in shared memory."""

    def __init__(
        self,
        matmul: MatmulFunction,
        plan: GemmPlan,
        params: Sequence[tirx.Var],
        tiles: Sequence[tirx.Var],
        thread: tirx.Expr,
    ) -> None:
        p = plan.parameters
        threads, stored, a = plan.threads, matmul.stored, flat_view(params[matmul.a])
        b = flat_view(params[matmul.b if stored is None else stored.packed])
        together = 1 if stored is None else chunks_together(16)
        self._a = _Rows(a, tiles[0], threads, thread, matmul.k, (p.block_m, p.block_k), matmul.extent, together)
        self._b: _Rows | _Depths
        self._scales: _Scales | None = None
        if stored is not None:
            depth, width = (size * stored.bits // 8 for size in (matmul.k, p.block_k))
            together = chunks_together(stored.bits)
            self._b = _Rows(b, tiles[1], threads, thread, depth, (p.block_n, width), matmul.n, together)
            self._scales = _Scales(flat_view(params[stored.scales]), tiles[2], thread, matmul, plan)
        elif matmul.b_transposed:
            self._b = _Rows(b, tiles[1], threads, thread, matmul.k, (p.block_n, p.block_k), matmul.n)
        else:
            self._b = _Depths(b, tiles[1], threads, thread, matmul.k, (p.block_k, p.block_n), matmul.n)

    def begin(self, row: tirx.Expr, column: tirx.Expr) -> None:
        """Emit what stays the same along K; `row` and `column` are the tile's first."""
        self._a.begin(row)
        self._b.begin(column)
        if self._scales is not None:
            self._scales.begin(column)

    def load_a(self, stage: tirx.Expr | int, k_tile: tirx.Expr | int) -> None:
        """Emit the copies of a tile of A."""
        self._a.load(stage, k_tile)

    def load_b(self, stage: tirx.Expr | int, k_tile: tirx.Expr | int) -> None:
        """Emit the copies of a tile of B, and of its scales."""
        self._b.load(stage, k_tile)
        if self._scales is not None:
            self._scales.load(stage, k_tile)


class _Tile(ABC):
    """A tile of `shape`, in shared memory, of a matrix."""

    def __init__(
        self,
        source: tirx.Var,
        tile: tirx.Var,
        threads: int,
        thread: tirx.Expr,
        depth: int,
        shape: tuple[int, int],
        limit: Size,
        together: int = 1,
    ) -> None:
        self._source, self._tile, self._depth, self._shape, self._limit = source, tile, depth, shape, limit
        self._each = COPY_BYTES // element_bytes(str(tile.ty.dtype))
        self._chunks = TileChunks(threads, thread, shape[0], shape[1] // self._each, self._each, together)

    @abstractmethod
    def _found(self, number: int, k_tile: tirx.Expr | int) -> tuple[tirx.Expr, list[tirx.Expr]]:
        """Return the place of a chunk in the matrix, and the conditions under which it exists."""

    def load(self, stage: tirx.Expr | int, k_tile: tirx.Expr | int) -> None:
        for number in range(self._chunks.count):
            at, exists = self._found(number, k_tile)
            with when(self._chunks.inside(number)):
                to = self._tile.ptr_to([stage, self._chunks.place(number)])
                copy_async(to, self._source.ptr_to([at]), exists, lines=True)


class _Rows(_Tile):
    """Tiles of a matrix whose rows run along K: of A, and of B as [N, K]."""

    def begin(self, first: tirx.Expr) -> None:
        self._starts = T.alloc_local([self._chunks.count], "int32")
        ragged = not isinstance(self._limit, int) or self._limit % self._shape[0] != 0
        for number in range(self._chunks.count):
            row = first + self._chunks.row + number * self._chunks.step
            row = tirx.min(row, self._limit - 1) if ragged else row
            T.buffer_store(self._starts, row * self._depth + self._chunks.chunk * self._each, [number])

    def _found(self, number: int, k_tile: tirx.Expr | int) -> tuple[tirx.Expr, list[tirx.Expr]]:
        k, inside = k_tile * self._shape[1], self._chunks.chunk * self._each
        if self._depth % self._shape[1] == 0:
            return self._starts[number] + k, []
        # The address has to exist even where nothing is read.
        exists = k + inside < self._depth
        return tirx.Select(exists, self._starts[number] + k, self._starts[number] - inside), [exists]


class _Depths(_Tile):
    """Tiles of B as [K, N], whose rows run along N."""

    def begin(self, first: tirx.Expr) -> None:
        self._start = T.alloc_local([1], "int32")
        column = first + self._chunks.chunk * self._each
        ragged = not isinstance(self._limit, int) or self._limit % self._shape[1] != 0
        column = tirx.min(column, self._limit - self._each) if ragged else column
        T.buffer_store(self._start, column, [0])

    def _found(self, number: int, k_tile: tirx.Expr | int) -> tuple[tirx.Expr, list[tirx.Expr]]:
        k = k_tile * self._shape[0] + self._chunks.row + number * self._chunks.step
        exists = [k < self._depth] if self._depth % self._shape[0] else []
        row = tirx.Select(exists[0], k, tirx.IntImm("int32", 0)) if exists else k
        return row * self._limit + self._start[0], exists


class _Scales:
    """Rows of scales [groups, N] of a tile of B: one for a stage, or one for each step; a thread copies 8 of them."""

    def __init__(
        self, source: tirx.Var, tile: tirx.Var, thread: tirx.Expr, matmul: MatmulFunction, plan: GemmPlan
    ) -> None:
        assert matmul.stored is not None
        self._source, self._tile, self._thread = source, tile, thread
        self._group, self._columns = matmul.stored.group, matmul.n
        self._last = -(-matmul.k // self._group) - 1
        self._block_k, self._block_n, self._rows = plan.parameters.block_k, plan.parameters.block_n, plan.scale_rows
        self._each = COPY_BYTES // element_bytes(str(tile.ty.dtype))

    def begin(self, first: tirx.Expr) -> None:
        self._start = T.alloc_local([1], "int32")
        column = first + self._thread % (self._block_n // self._each) * self._each
        ragged = self._columns % self._block_n != 0
        T.buffer_store(self._start, tirx.min(column, self._columns - self._each) if ragged else column, [0])

    def load(self, stage: tirx.Expr | int, k_tile: tirx.Expr | int) -> None:
        step = self._thread // (self._block_n // self._each)
        group = (k_tile * self._block_k + step * STORED_DEPTH) // self._group
        at = tirx.min(group, self._last) * self._columns + self._start[0]
        with when([self._thread < self._rows * self._block_n // self._each]):
            copy_async(self._tile.ptr_to([stage, self._thread * self._each]), self._source.ptr_to([at]))
