"""The kernel of `template.py` on a page, over the words of `schedules.templates.emit`; the notation is that module's.

::

    all threads    copy the first tiles of A and B to the stages of a ring (cp.async)
                   for each tile of K: for each step of it: load the next step's fragments (ldmatrix); multiply (mma)
                                       await the next stage; copy another tile of A and B to this one
                   add what other blocks have of the tile's sum; evaluate the epilogue; write
"""

from __future__ import annotations

from contextlib import nullcontext

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import constant_params
from relaxtune.schedules.templates.emit.async_copy import Stages, end_copies, wait_for_copies_of_block
from relaxtune.schedules.templates.emit.kernel_frame import (
    EmitBody,
    bind_rows,
    build_function,
    shared_pool,
    tile_place,
    wait_for_predecessor,
)
from relaxtune.schedules.templates.emit.registers import in_register, when
from relaxtune.schedules.templates.emit.sums_exchange import SplitSum
from relaxtune.schedules.templates.gemm_sm80.copies import tile_copies
from relaxtune.schedules.templates.gemm_sm80.multiply import WarpMultiply
from relaxtune.schedules.templates.gemm_sm80.plan import ROWS, WARP, GemmPlan
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
        """Emit the host's part: the rows of tiles in the grid."""
        plan, p, self._params = self._plan, self._p, params
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
        first = row * p.block_m, column * p.block_n
        self._load_a, self._load_b = tile_copies(matmul, plan, self._params, tiles, first, thread)
        self._multiply = WarpMultiply(matmul, plan, tiles, thread)
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
        sums = self._multiply.accumulators
        split = SplitSum(p.split_k, plan.tiles_m * plan.tiles_n * p.split_k, plan.threads, thread, block)
        with split.of_the_last(sums, plan.accumulators) if p.split_k > 1 else nullcontext():
            output.write(sums, ragged_columns=matmul.n % p.block_n != 0, column_end=matmul.columns)

    def _fill(self) -> None:
        """Emit the loads of all stages; tiles of B that no kernel writes are read before the wait for the last one."""
        p, plan, stored = self._p, self._plan, self._matmul.stored
        read = {self._matmul.b} if stored is None else {stored.packed, stored.scales}
        early = p.dependent and read <= constant_params(self._func)
        stages = range(min(p.stages, plan.k_tiles))
        for stage in stages if early else ():
            self._load_b(stage, self._first_k_tile + stage)
        wait_for_predecessor(p.dependent)
        for stage in range(p.stages):
            if stage in stages:
                self._load_a(stage, self._first_k_tile + stage)
                if not early:
                    self._load_b(stage, self._first_k_tile + stage)
            end_copies()

    def _sum(self) -> None:
        """Emit the loop over K: each step's fragments are loaded while the step before is multiplied.

        The next stage is waited for one step before its first fragments are loaded. All warps have this stage's
        fragments then, and its memory is loaded again.
        """
        p, plan = self._p, self._plan
        steps, ring = p.block_k // plan.depth, Stages(p.stages, 0)
        (stage,) = ring.at
        self._multiply.begin()
        wait_for_copies_of_block(p.stages - 1)
        self._multiply.load(0, tirx.IntImm("int32", 0), 0)
        with T.serial(plan.k_tiles, unroll=False) as turn:
            for step in range(steps):
                self._multiply.load((step + 1) % 2, stage, (step + 1) % steps)
                if step == steps - 2:
                    wait_for_copies_of_block(p.stages - 2)
                    ahead = turn + p.stages
                    with T.If(ahead < plan.k_tiles), T.Then():
                        self._load_a(stage, self._first_k_tile + ahead)
                        self._load_b(stage, self._first_k_tile + ahead)
                    end_copies()
                    ring.advance()
                self._multiply.multiply(step)
