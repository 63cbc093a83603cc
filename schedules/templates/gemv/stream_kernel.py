"""The kernel of `stream.py`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import constant_params
from relaxtune.schedules.templates.emit.async_copy import copy_async, copy_async_where, end_copies, wait_for_copies
from relaxtune.schedules.templates.emit.global_access import load_bytes
from relaxtune.schedules.templates.emit.kernel_frame import (
    build_function,
    flat_view,
    keep_loads_before,
    shared_pool,
    wait_for_predecessor,
)
from relaxtune.schedules.templates.emit.registers import when
from relaxtune.schedules.templates.gemv.multiply import LEVELS_FACTOR, emit_offsets, emit_pairs, emit_products
from relaxtune.schedules.templates.gemv.output import GemvOutput
from relaxtune.schedules.templates.gemv.plan import COLUMNS, LANES, LOAD_BYTES, TILE, WARP
from relaxtune.schedules.templates.gemv.stream_plan import SCALES, GemvStreamPlan
from relaxtune.schedules.tir.epilogue import MatmulFunction

# Elements of x in 16 bytes.
_VECTOR = 8
_WORDS = LOAD_BYTES // 4


def build_gemv_stream_kernel(func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemvStreamPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""
    blocks, dependent = plan.parameters.blocks, plan.parameters.dependent
    return build_function(
        func, blocks, plan.threads, dependent, lambda params: _Kernel(func, matmul, plan, params).emit
    )


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(
        self, func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemvStreamPlan, params: list[tirx.Var]
    ) -> None:
        self._matmul, self._plan, self._p = matmul, plan, plan.parameters
        self._stored = plan.stored
        self._x = flat_view(params[self._matmul.a])
        renamed, output = dict(zip(func.params, params, strict=True)), flat_view(params[self._matmul.output])
        factor = LEVELS_FACTOR if plan.levels else 1.0
        self._end = GemvOutput(self._matmul, renamed, output, self._p.tiles, self._p.warps, factor)
        self._weight, self._scales = flat_view(params[self._stored.packed]), flat_view(params[self._stored.scales])
        # What the kernel before does not write may be read before it has ended.
        read = {self._stored.packed, self._stored.scales}
        self._early = self._p.dependent and read <= constant_params(func)

    def emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p = self._plan, self._p
        self._block, self._warp, self._lane = block, thread // WARP, thread % WARP
        self._group, self._part = self._lane // LANES, self._lane % LANES
        pool = shared_pool()
        # Every lane copies what it reads itself: 16 bytes beside those of its neighbours.
        self._ring = pool.alloc((p.depth, p.warps, p.tiles * 2, WARP * _WORDS), "uint32", align=16)
        shape = (p.depth, p.warps, plan.scale_rows, plan.rows)
        self._ring_scales = pool.alloc(shape, "float16", align=16)
        warps, m, rows = self._end.shape
        shared = pool.alloc((plan.buffers * warps, m, rows), "float32", align=16)
        pool.commit()
        self._words_x = T.alloc_local([plan.turns * plan.column_tiles * plan.words_x], "uint32")
        self._offsets = T.alloc_local([plan.turns * plan.column_tiles * 2], "float32") if plan.levels else None
        self._words = T.alloc_local([p.tiles * 2 * _WORDS], "uint32")
        sums = T.alloc_local([p.tiles * plan.column_tiles * 4], "float32")
        first = tirx.IntImm("int32", 0)
        before = p.early or p.depth
        if self._early:
            self._begin(first, 0, before)
        wait_for_predecessor(p.dependent)
        if not self._early:
            # ptxas moves the loads of x above these copies. Held behind them, kernels of one row took 1 to 4 % less on
            # an H200, and of 16 rows 4 to 5 % more.
            self._begin(first, 0, before)
        self._load_x()
        if before < p.depth:
            # Behind x, which is needed first.
            keep_loads_before()
            self._begin(first, before, p.depth)
        self._prepare_x()
        if plan.rounds == 1:
            self._make_tile(first, sums, shared, thread)
            return
        with T.serial(plan.rounds, unroll=False) as index:
            whole = plan.row_tiles % p.blocks == 0
            with when([] if whole else [index * p.blocks + block < plan.row_tiles]):
                self._make_tile(index, sums, shared, thread)
        if plan.collected:
            T.evaluate(T.cuda.cta_sync())
            self._end.write(shared, thread, self._first_row, lambda part: part * p.warps, plan.rounds)

    def _first_row(self, index: tirx.Expr) -> tirx.Expr:
        """Return the first row of W in a tile of this block."""
        return (index * self._p.blocks + self._block) * self._plan.rows

    def _begin(self, first: tirx.Expr, start: int, stop: int) -> None:
        """Emit the asking for some of the first steps, as many as there are places at most."""
        for step in range(start, stop):
            self._fetch(first, step, step)

    def _fetch(self, index: tirx.Expr, turn: int, slot: tirx.Expr | int) -> None:
        """Emit the copies of a step of a tile, or of a later one where there are fewer turns, as one group."""
        plan = self._plan
        later = turn // plan.turns
        tile = (index + later) * self._p.blocks + self._block
        known = isinstance(index, tirx.IntImm)
        if not known or int(index) + later < plan.rounds:
            exists = known and plan.row_tiles >= (int(index) + later + 1) * self._p.blocks
            with when([] if exists else [tile < plan.row_tiles]):
                self._fetch_weights(tile, turn % plan.turns, slot)
                self._fetch_scales(tile, turn % plan.turns, slot)
        end_copies()

    def _inside(self, turn: int) -> list[tirx.Expr]:
        """Return the condition for this lane's part of a step to lie in W, none where it always does."""
        plan, p, k = self._plan, self._p, self._matmul.k
        whole = (turn + 1) * p.warps * plan.step <= k
        return [] if whole else [((turn * p.warps + self._warp) * LANES + self._part) * plan.length < k]

    def _fetch_weights(self, tile: tirx.Expr, turn: int, slot: tirx.Expr | int) -> None:
        plan, matmul, p = self._plan, self._matmul, self._p
        row_bytes = matmul.k * self._stored.bits // 8
        for half in range(2 * p.tiles):
            row = tile * plan.rows + self._group
            place = row * row_bytes + (self._warp * LANES + self._part) * LOAD_BYTES
            offset = half * COLUMNS * row_bytes + turn * p.warps * LANES * LOAD_BYTES
            conditions = self._inside(turn)
            if matmul.n % plan.rows:
                conditions.append(row + half * COLUMNS < matmul.n)
            if conditions:
                place, offset = tirx.Select(tirx.all(*conditions), place + offset, tirx.IntImm("int32", 0)), 0
            to = self._ring.ptr_to([slot, self._warp, half, self._lane * _WORDS])
            copy_async(to, self._weight.ptr_to([place]), conditions, offset)

    def _fetch_scales(self, tile: tirx.Expr, turn: int, slot: tirx.Expr | int) -> None:
        """Emit the copy of a step's scales, 8 of them by each of the first lanes."""
        plan, matmul, p, group = self._plan, self._matmul, self._p, self._stored.group
        vectors = plan.rows // SCALES
        scale_row, vector = self._lane // vectors, self._lane % vectors
        each, offset = p.warps * plan.step, 0
        if each % group == 0 and not self._inside(turn):
            turn, offset = 0, turn * each // group * matmul.n * 2
        step = turn * p.warps + self._warp
        k = step * plan.step if plan.grouped else (step * LANES + scale_row) * plan.length
        # Behind the end of K, where weights count nothing, the last scale: it has to be finite.
        k = tirx.min(k, matmul.k - 1) if self._inside(turn) else k
        row = tile * plan.rows + vector * SCALES
        conditions = [self._lane < plan.scale_rows * vectors]
        if matmul.n % plan.rows:
            conditions.append(row < matmul.n)
        source = self._scales.ptr_to([k // group * matmul.n + row])
        to = self._ring_scales.ptr_to([slot, self._warp, scale_row, vector * SCALES])
        copy_async_where(conditions, to, source, offset)

    def _load_x(self) -> None:
        """Emit the loads of the part of x that this warp multiplies by; zeros behind its end."""
        plan, matmul = self._plan, self._matmul
        count = plan.column_tiles * plan.words_x
        for turn in range(plan.turns):
            first = turn * count
            inside = self._inside(turn)
            for tile in range(plan.column_tiles):
                start = first + tile * plan.words_x
                if inside:
                    for word in range(plan.words_x):
                        T.buffer_store(self._words_x, tirx.IntImm("uint32", 0), [start + word])
                # Columns of the sums that are no rows of x are not used, whatever is in them.
                row = tile * COLUMNS + self._group
                row = row if (tile + 1) * COLUMNS <= matmul.m else tirx.min(row, matmul.m - 1)
                step = turn * self._p.warps + self._warp
                place = row * matmul.k + (step * LANES + self._part) * plan.length
                with when(inside):
                    for vector in range(plan.words_x // _WORDS):
                        to = self._words_x.ptr_to([start + vector * _WORDS])
                        load_bytes(to, self._x.ptr_to([place + vector * _VECTOR]), LOAD_BYTES)

    def _prepare_x(self) -> None:
        """Emit what products need of x beside its elements, and in which order they need them."""
        plan = self._plan
        count = plan.column_tiles * plan.words_x
        for turn in range(plan.turns):
            first = turn * count
            emit_pairs(self._matmul, self._words_x.ptr_to([first]), count)
            if self._offsets is not None:
                to = self._offsets.ptr_to([turn * plan.column_tiles * 2])
                emit_offsets(plan.column_tiles, to, self._words_x.ptr_to([first]))

    def _make_tile(self, index: tirx.Expr, sums: tirx.Var, shared: tirx.Var, thread: tirx.Expr) -> None:
        plan, p = self._plan, self._p
        for number in range(p.tiles * plan.column_tiles * 4):
            T.buffer_store(sums, tirx.FloatImm("float32", 0.0), [number])
        for turn in range(plan.turns):
            wait_for_copies(p.depth - 1)
            slot = (index * plan.turns + turn) % p.depth
            scales = self._read(slot)
            # All lanes have read the scales before they are overwritten.
            T.evaluate(T.cuda.warp_sync())
            self._fetch(index, turn + p.depth, slot)
            for tile in range(p.tiles):
                rows = [self._words.ptr_to([(tile * 2 + half) * _WORDS]) for half in range(2)]
                emit_products(
                    self._matmul,
                    plan.column_tiles,
                    plan.grouped,
                    sums.ptr_to([tile * plan.column_tiles * 4]),
                    (rows[0], rows[1]),
                    self._words_x.ptr_to([turn * plan.column_tiles * plan.words_x]),
                    (scales[tile * 2], scales[tile * 2 + 1]),
                    None if self._offsets is None else self._offsets.ptr_to([turn * plan.column_tiles * 2]),
                )
        place = index % plan.buffers * p.warps
        self._end.share(shared, sums, thread, place)
        if not plan.collected:
            T.evaluate(T.cuda.cta_sync())
            self._end.write(shared, thread, lambda _: self._first_row(index), lambda _: place)

    def _read(self, slot: tirx.Expr) -> list[tirx.Expr]:
        """Emit the reading of a step from shared memory; return its scales."""
        p = self._p
        for half in range(2 * p.tiles):
            registers = [self._words[half * _WORDS + word] for word in range(_WORDS)]
            source = self._ring.ptr_to([slot, self._warp, half, self._lane * _WORDS])
            T.evaluate(T.ptx["ld.shared.v4.u32"](*registers, source))
        halves = T.alloc_local([2 * p.tiles], "float16")
        scale_row = tirx.IntImm("int32", 0) if self._plan.grouped else self._part
        for half in range(2 * p.tiles):
            place = half // 2 * TILE + half % 2 * COLUMNS + self._group
            T.buffer_store(halves, self._ring_scales[slot, self._warp, scale_row, place], [half])
        return [halves[half] for half in range(2 * p.tiles)]
