"""The kernel of `template.py`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import constant_params
from relaxtune.schedules.templates.emit.async_copy import (
    COPY_BYTES,
    TileChunks,
    copy_async,
    end_copies,
    wait_for_copies_of_block,
)
from relaxtune.schedules.templates.emit.kernel_frame import (
    EmitBody,
    bind_rows,
    build_function,
    flat_view,
    shared_pool,
    tile_place,
    wait_for_predecessor,
)
from relaxtune.schedules.templates.emit.registers import in_register, when
from relaxtune.schedules.templates.emit.sums_exchange import SplitSum
from relaxtune.schedules.templates.gemm_sm80.multiply import Multiply, WarpMultiply
from relaxtune.schedules.templates.gemm_sm80.multiply_float import MultiplyFloat
from relaxtune.schedules.templates.gemm_sm80.multiply_stored import MultiplyStored
from relaxtune.schedules.templates.gemm_sm80.plan import ROWS, STORED_DEPTH, WARP, GemmPlan, chunks_together, is_plain
from relaxtune.schedules.templates.output.output_tile import OutputTile
from relaxtune.schedules.templates.output.row_statistics import RowStatistics
from relaxtune.schedules.tir.blocks import Size, element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction


def build_kernel(func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemmPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""
    begin = _Kernel(func, matmul, plan).begin
    return build_function(func, plan.threads, plan.parameters.dependent, begin)


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(self, func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemmPlan) -> None:
        self._func, self._matmul, self._plan, self._p = func, matmul, plan, plan.parameters

    def begin(self, params: list[tirx.Var]) -> tuple[Size, EmitBody]:
        plan, p = self._plan, self._p
        self._params = params
        self._matmul = matmul = bind_rows(self._matmul)
        rows = matmul.extent
        self._tiles_m = plan.tiles_m if isinstance(rows, int) else T.Bind((rows + (p.block_m - 1)) // p.block_m)
        self._output = OutputTile(self._func, matmul, params, plan.shares, uniform_rows=False)
        return self._tiles_m * plan.tiles_n * p.split_k, self._emit

    def _emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p, matmul, output = self._plan, self._p, self._matmul, self._output
        tile, part = (block, 0) if p.split_k == 1 else (block // p.split_k, block % p.split_k)
        self._first_k_tile = part * plan.k_tiles
        row, column = (in_register(place) for place in tile_place(tile, self._tiles_m, plan.tiles_n, p.group))
        pool = shared_pool()
        # Rows of shared memory start where all banks do: at multiples of 128 bytes.
        dtypes = matmul.input_dtype, *((matmul.b_dtype,) if matmul.stored is None else ("uint8", "float16"))
        tiles = [
            pool.alloc((p.stages, size // element_bytes(dtype)), dtype, align=1024)
            for size, dtype in zip(plan.tile_bytes, dtypes, strict=False)
        ]
        output.allocate(pool)
        pool.commit()
        self._copies = TileCopies(matmul, plan, self._params, tiles, thread)
        self._copies.begin(row * p.block_m, column * p.block_n)
        maker = MultiplyStored if matmul.stored else MultiplyFloat if is_plain(matmul) else Multiply
        self._multiply: WarpMultiply = maker(matmul, plan, tiles, thread)
        self._fill()
        warp, lane = thread // WARP, thread % WARP
        first_row = row * p.block_m + warp % p.warps_m * (p.block_m // p.warps_m)
        each = matmul.epilogue.accumulators
        first_column = column * (p.block_n // each) + warp // p.warps_m * plan.shares.columns
        ragged = not isinstance(matmul.extent, int) or matmul.extent % p.block_m != 0
        output.begin(first_row, first_column, warp, lane, ragged_rows=ragged)
        if matmul.norm is not None:
            partials = self._params[matmul.norm.partials]
            statistics = RowStatistics(matmul, matmul.norm, partials, plan.m_steps, ROWS)
            # No sum is held yet.
            statistics.make(first_row, lane, plan.accumulators)
            output.take_statistics(matmul.norm.buffer, statistics.statistic)
            if matmul.norm.output is not None:
                with when([column == 0, warp < p.warps_m, *([part == 0] if p.split_k > 1 else [])]):
                    statistics.write(self._params[matmul.norm.output])
        self._sum()
        accumulators = self._multiply.accumulators
        blocks = plan.tiles_m * plan.tiles_n * p.split_k
        split = SplitSum(p.split_k, blocks, plan.threads, thread, block)
        with split.of_the_last(accumulators, plan.accumulators) if p.split_k > 1 else nullcontext():
            output.write(accumulators, ragged_columns=matmul.n % p.block_n != 0, column_end=matmul.columns)

    def _fill(self) -> None:
        """Emit the loads of all stages; tiles of B that no kernel writes are read before the wait for the last one."""
        p, plan, stored = self._p, self._plan, self._matmul.stored
        read = {self._matmul.b} if stored is None else {stored.packed, stored.scales}
        early = p.dependent and read <= constant_params(self._func)
        stages = range(min(p.stages, plan.k_tiles))
        if early:
            for stage in stages:
                self._copies.load_b(stage, self._first_k_tile + stage)
        wait_for_predecessor(p.dependent)
        for stage in range(p.stages):
            if stage in stages:
                self._copies.load_a(stage, self._first_k_tile + stage)
                if not early:
                    self._copies.load_b(stage, self._first_k_tile + stage)
            end_copies()

    def _sum(self) -> None:
        """Emit the loop over K: each step's fragments are loaded while the step before is multiplied.

        The next stage is waited for one step before its first fragments are loaded. All warps have this stage's
        fragments then, and its memory is loaded again.
        """
        p, plan = self._p, self._plan
        steps = p.block_k // plan.depth
        stage = T.alloc_local([1], "int32")
        T.buffer_store(stage, 0, [0])
        self._multiply.begin()
        wait_for_copies_of_block(p.stages - 1)
        self._multiply.load(0, tirx.IntImm("int32", 0), 0)
        with T.serial(plan.k_tiles, unroll=False) as turn:
            for step in range(steps):
                self._multiply.load((step + 1) % 2, stage[0], (step + 1) % steps)
                if step == steps - 2:
                    wait_for_copies_of_block(p.stages - 2)
                    ahead = turn + p.stages
                    with T.If(ahead < plan.k_tiles), T.Then():
                        self._copies.load_a(stage[0], self._first_k_tile + ahead)
                        self._copies.load_b(stage[0], self._first_k_tile + ahead)
                    end_copies()
                    following = stage[0] + 1
                    wrapped = tirx.Select(following == p.stages, tirx.IntImm("int32", 0), following)
                    T.buffer_store(stage, wrapped, [0])
                self._multiply.multiply(step)


class TileCopies:
    """Emits the copies of all threads of a block; `tiles` are the stages of A and B in shared memory.

    `TileChunks` says which thread copies what. Rows and columns outside a matrix are clamped: what they make is not
    written. Along K, zeros stand for what does not exist.
    """

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
