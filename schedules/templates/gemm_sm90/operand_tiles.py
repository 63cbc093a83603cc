"""The tiles of A and B of the kernel of `template.py` in shared memory: how they lie, are copied and are multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.barriers import Barriers
from relaxtune.schedules.templates.emit.tma import encode_tensor, load_tile, prefetch_maps
from relaxtune.schedules.templates.emit.wgmma import ROW_UNITS, ROWS, STEP_UNITS, Descriptor, multiply
from relaxtune.schedules.templates.gemm_sm90.plan import SWIZZLES, GemmPlan
from relaxtune.schedules.tir.blocks import Size
from relaxtune.schedules.tir.epilogue import MatmulFunction


class OperandTiles:
    """Emits the copies and multiplications of a ring of tiles; creating it emits their tensor maps (host code).

    A, and B as [N, K], are "K-major" to wgmma: rows of K of 128 bytes. B as [K, N] (16-bit operands) lies in rows of a
    chunk of w columns: 8 rows of K are 16 * w bytes apart ("stride"), chunks of w columns 64 such rows ("leading"), and
    16 elements of K are 16 rows further. What each block of a `multicast` cluster loads, 64 / `multicast` rows of all
    columns, is laid out so by itself. Where chunks divide B, it is seen as [N / w, K, w]: one load brings a tile.

    `params` are the kernel's.
    """

    def __init__(self, matmul: MatmulFunction, plan: GemmPlan, params: Sequence[tirx.Var]) -> None:
        self._plan, self._p, self._transposed = plan, plan.parameters, matmul.b_transposed
        self._block_k, self._size, self._dtype = plan.operands.block_k, plan.operands.bytes, plan.operands.tensor_map
        p, chunk, depth, row = self._p, plan.chunk, (matmul.k * self._size,), matmul.n * self._size
        a = (matmul.k, matmul.extent), depth, (self._block_k, plan.rows_a), 3
        b: tuple[tuple[Size, ...], tuple[int, ...], tuple[int, ...], int]
        if matmul.b_transposed:
            b = (matmul.k, matmul.n), depth, (self._block_k, p.block_n // p.multicast), 3
        elif plan.chunked:
            box = chunk, plan.rows_b, p.block_n // chunk
            b = (chunk, matmul.k, matmul.n // chunk), (row, chunk * self._size), box, SWIZZLES[chunk]
        else:
            b = (matmul.n, matmul.k), (row,), (chunk, plan.rows_b), SWIZZLES[chunk]
        self._map_a = encode_tensor("map_a", params[matmul.a], self._dtype, *a)
        self._map_b = encode_tensor("map_b", params[matmul.b], self._dtype, *b)

    def allocate(self, pool: T.SMEMPool) -> None:
        """Take shared memory for all stages."""
        p = self._p
        self._tile_a = pool.alloc((p.stages, self._plan.rows_a * self._block_k), self._dtype, align=1024)
        self._tile_b = pool.alloc((p.stages, p.block_n * self._block_k), self._dtype, align=1024)

    def prefetch(self) -> None:
        """Emit the fetching of the tensor maps."""
        prefetch_maps(self._map_a, self._map_b)

    def load_a(self, stage: tirx.Expr | int, k_tile: tirx.Expr, row: tirx.Expr, full: Barriers) -> None:
        """Emit the load of a tile of A, by its place in tiles, to a stage."""
        at = k_tile * self._block_k, row * self._p.block_m
        load_tile(self._tile_a.ptr_to([stage, 0]), self._map_a, at, full.at(stage))

    def load_b(
        self, stage: tirx.Expr | int, k_tile: tirx.Expr, column: tirx.Expr, rank: tirx.Expr, full: Barriers
    ) -> None:
        """Emit the loads of a tile of B, or of the part of a block of a rank for all of the cluster."""
        p, plan = self._p, self._plan

        def load(offset: tirx.Expr | int, *at: tirx.Expr | int) -> None:
            load_tile(self._tile_b.ptr_to([stage, offset]), self._map_b, at, full.at(stage), p.multicast)

        part = p.block_n // p.multicast if self._transposed else plan.rows_b
        first = rank * part if p.multicast > 1 else 0
        if self._transposed:
            load(first * self._block_k, k_tile * self._block_k, column * p.block_n + first)
            return
        row = k_tile * self._block_k + first
        if plan.chunked:
            load(first * p.block_n, 0, row, column * (p.block_n // plan.chunk))
            return
        for start in range(0, p.block_n, plan.chunk):
            load(first * p.block_n + start * plan.rows_b, column * p.block_n + start, row)

    def describe(self, first_row: tirx.Expr | int) -> None:
        """Emit the descriptors of B's tiles, and of A's from a row of the tile on."""
        plan, chunk_units = self._plan, self._plan.chunk * self._size // 16
        self._a = Descriptor(self._tile_a.ptr_to([0, first_row * self._block_k]))
        fields = (plan.rows_b * chunk_units, 8 * chunk_units, SWIZZLES[plan.chunk])
        self._b = Descriptor(self._tile_b.ptr_to([0, 0]), *(() if self._transposed else fields))

    def multiply(self, sums: tirx.Var, stage: tirx.Expr, adds: tirx.Expr) -> None:
        """Emit the products of a stage, not waited for; they are added to the sums or overwrite them.

        An instruction has 64 rows, 32 bytes along K, and all columns of the tile, or half of them.
        """
        plan, block_n = self._plan, self._p.block_n

        def products() -> Iterator[list[tirx.Expr]]:
            for step in range(ROW_UNITS // STEP_UNITS):
                for block in range(plan.m_blocks):
                    for column in range(0, block_n, plan.columns):
                        first = (block * block_n + column) // 2
                        registers = [sums[first + lane] for lane in range(plan.columns // 2)]
                        a = stage * (plan.rows_a * ROW_UNITS) + block * (ROWS * ROW_UNITS) + step * STEP_UNITS
                        b = stage * (block_n * ROW_UNITS) + self._units_b(step, column)
                        yield [*registers, self._a.at(a), self._b.at(b), tirx.const(True) if step else adds]

        modifiers = plan.operands.modifiers(transposed=self._transposed)
        multiply(plan.operands.instruction(plan.columns), products(), modifiers)

    def _units_b(self, step: int, column: int) -> int:
        """Return where a step along K, from a column on, begins in B's tile, in units of 16 bytes."""
        if self._transposed:
            return step * STEP_UNITS + column * ROW_UNITS
        rows, k = self._plan.rows_b, step * 16
        return (k // rows * rows * self._p.block_n + k % rows * self._plan.chunk) * self._size // 16
