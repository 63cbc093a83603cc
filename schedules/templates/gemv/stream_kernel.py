"""The kernel of `GemvStream` in `template.py`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.async_copy import copy_async, copy_async_where, end_copies, wait_for_copies
from relaxtune.schedules.templates.emit.device_function import load_bytes
from relaxtune.schedules.templates.emit.kernel_frame import (
    EmitBody,
    build_function,
    keep_loads_before,
    shared_pool,
    wait_for_predecessor,
)
from relaxtune.schedules.templates.emit.registers import clear, load_vector, when
from relaxtune.schedules.templates.emit.sums_exchange import SplitSum
from relaxtune.schedules.templates.emit.tensor_cores import MMA_KINDS
from relaxtune.schedules.templates.gemv.kernel import FewRowsKernel
from relaxtune.schedules.templates.gemv.multiply import LEVELS_FACTOR, emit_offsets, emit_pairs
from relaxtune.schedules.templates.gemv.norms import StatisticsOfRegisters
from relaxtune.schedules.templates.gemv.output import GemvOutput
from relaxtune.schedules.templates.gemv.plan import COLUMNS, LANES, LOAD_BYTES, SCALES, TILE, WARP, GemvStreamPlan
from relaxtune.schedules.tir.epilogue import MatmulFunction, Quantisation

# Elements of x in 16 bytes.
_VECTOR = 8
_WORDS = LOAD_BYTES // 4


def build_gemv_stream_kernel(func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemvStreamPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""

    def begin(params: list[tirx.Var]) -> tuple[int, EmitBody]:
        return plan.parameters.blocks, _Kernel(func, matmul, plan, params).emit

    return build_function(func, plan.threads, plan.parameters.dependent, begin)


class _Kernel(FewRowsKernel):
    def __init__(
        self, func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemvStreamPlan, params: list[tirx.Var]
    ) -> None:
        super().__init__(func, matmul, plan, params)
        self._plan, self._p = plan, plan.parameters

    def emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p = self._plan, self._p
        self._block = block if p.split == 1 else block // p.split
        self._share = None if p.split == 1 else block % p.split
        self._place(thread)
        pool = shared_pool()
        # Every lane copies what it reads itself: 16 bytes beside those of its neighbours.
        self._ring = pool.alloc((p.depth, p.warps, p.tiles * 2, WARP * _WORDS), "uint32", align=16)
        if plan.scale_rows:
            shape = (p.depth, p.warps, plan.scale_rows, plan.rows)
            self._ring_scales = pool.alloc(shape, "float16", align=16)
        factor = LEVELS_FACTOR if plan.levels else 1.0
        norm = self._matmul.norm
        rows = self._matmul.m
        self._statistics = None if norm is None else StatisticsOfRegisters(norm, rows, self._params, pool, p.warps)
        self._end = GemvOutput(self._matmul, plan, self._renamed, self._params, self._statistics, factor)
        warps, m, rows = self._end.shape
        self._shared = pool.alloc((plan.buffers * warps, m, rows), "float32", align=16)
        pool.commit()
        self._words_x = T.alloc_local([plan.held * plan.column_tiles * plan.words_x], "uint32")
        self._offsets = T.alloc_local([plan.turns * plan.column_tiles * 2], "float32") if plan.levels else None
        self._words = T.alloc_local([p.tiles * 2 * _WORDS], "uint32")
        self._sums = T.alloc_local([p.tiles * plan.column_tiles * 4], "float32")
        first = tirx.IntImm("int32", 0)
        before = p.early or p.depth
        if self._early:
            self._begin(first, 0, before)
        wait_for_predecessor(p.dependent)
        if not self._early:
            # ptxas moves the loads of x above these copies. Held behind them, kernels of one row took 1 to 4 % less on
            # an H200, and of 16 rows 4 to 5 % more.
            self._begin(first, 0, before)
        for turn in range(plan.held):
            self._load_x(turn)
        if before < p.depth:
            # Behind x, which is needed first.
            keep_loads_before()
            self._begin(first, before, p.depth)
        # Pairs and offsets of x, in the order in which the products need them.
        count = plan.column_tiles * plan.words_x
        for turn in range(plan.turns):
            emit_pairs(self._matmul, self._words_x.ptr_to([turn * count]), count)
            if self._offsets is not None:
                to = self._offsets.ptr_to([turn * plan.column_tiles * 2])
                emit_offsets(plan.column_tiles, to, self._words_x.ptr_to([turn * count]))
        if plan.rounds == 1:
            self._make_tile(first)
        else:
            with T.serial(plan.rounds, unroll=False) as index:
                whole = plan.row_tiles % p.groups == 0
                with when([] if whole else [index * p.groups + self._block < plan.row_tiles]):
                    self._make_tile(index)
        if plan.collected or p.split > 1:
            self._write_all()

    def _write_all(self) -> None:
        """Emit the writing of all tiles of this block, or of the blocks that share their sums, by the last of them."""
        plan, p, shared, thread = self._plan, self._p, self._shared, self._thread

        def first(part: tirx.Expr) -> tirx.Expr:
            return part * p.warps

        T.evaluate(T.cuda.cta_sync())
        if self._share is None:
            self._end.write(shared, thread, self._first_row, first, plan.rounds)
            return
        split = SplitSum(p.split, p.blocks, plan.threads, thread, self._block * p.split + self._share)
        with self._end.of_the_last(split, shared, thread, first, plan.rounds):
            T.evaluate(T.cuda.cta_sync())
            self._end.write(shared, thread, self._first_row, first, plan.rounds, warps=1)

    def _first_row(self, index: tirx.Expr) -> tirx.Expr:
        return (index * self._p.groups + self._block) * self._plan.rows

    def _begin(self, first: tirx.Expr, start: int, stop: int) -> None:
        for step in range(start, stop):
            self._fetch(first, step, step)

    def _fetch(self, index: tirx.Expr, turn: int, slot: tirx.Expr | int) -> None:
        """Emit the copies of a step of a tile, or of a later one where there are fewer turns, as one group."""
        plan = self._plan
        later = turn // plan.turns
        tile = (index + later) * self._p.groups + self._block
        known = isinstance(index, tirx.IntImm)
        if not known or int(index) + later < plan.rounds:
            exists = known and plan.row_tiles >= (int(index) + later + 1) * self._p.groups
            with when([] if exists else [tile < plan.row_tiles]):
                self._fetch_weights(tile, turn % plan.turns, slot)
                if self._stored is not None and self._scales is not None:
                    self._fetch_scales(self._stored, self._scales, tile, turn % plan.turns, slot)
        end_copies()

    def _inside(self, turn: int) -> list[tirx.Expr]:
        """Return the condition for this lane's part of a step to lie in W, none where it always does."""
        plan, p = self._plan, self._p
        whole = (turn + 1) * p.warps * plan.step <= plan.k
        return [] if whole else [((turn * p.warps + self._warp) * LANES + self._part) * plan.length < plan.k]

    def _along(self, k: tirx.Expr, elements: int) -> tirx.Expr:
        """Return a place along K, from the place in what this block makes of it, of so many elements."""
        return k if self._share is None else self._share * elements + k

    def _fetch_weights(self, tile: tirx.Expr, turn: int, slot: tirx.Expr | int) -> None:
        plan, matmul, p = self._plan, self._matmul, self._p
        row_bytes, size = matmul.k * matmul.weight_bits // 8, 1 if self._stored is not None else 2
        vector, share = LOAD_BYTES // size, row_bytes // size // p.split
        for half in range(2 * p.tiles):
            row = tile * plan.rows + self._group
            place = row * (row_bytes // size) + self._along((self._warp * LANES + self._part) * vector, share)
            offset = half * COLUMNS * row_bytes + turn * p.warps * LANES * LOAD_BYTES
            conditions = self._inside(turn)
            if matmul.n % plan.rows:
                conditions.append(row + half * COLUMNS < matmul.n)
            if conditions:
                place = tirx.Select(tirx.all(*conditions), place + offset // size, tirx.IntImm("int32", 0))
                offset = 0
            to = self._ring.ptr_to([slot, self._warp, half, self._lane * _WORDS])
            # A step is half a line of 16-bit weights, and another warp's copy has the other half.
            copy_async(to, self._weight.ptr_to([place]), conditions, offset, lines=self._stored is None)

    def _fetch_scales(
        self, stored: Quantisation, scales: tirx.Var, tile: tirx.Expr, turn: int, slot: tirx.Expr | int
    ) -> None:
        """Emit the copy of a step's scales, 8 of them by each of the first lanes."""
        plan, matmul, p, group = self._plan, self._matmul, self._p, stored.group
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
        source = scales.ptr_to([k // group * matmul.n + row])
        to = self._ring_scales.ptr_to([slot, self._warp, scale_row, vector * SCALES])
        copy_async_where(conditions, to, source, offset)

    def _load_x(self, turn: int) -> None:
        """Emit the loads of a step of the x that this warp multiplies by; zeros behind its end."""
        plan, matmul = self._plan, self._matmul
        first, inside = self._place_of_x(turn), self._inside(turn)
        for tile in range(plan.column_tiles):
            start = first + tile * plan.words_x
            if inside:
                clear(self._words_x, start, plan.words_x)
            # Columns of the sums that are no rows of x are not used, whatever is in them.
            row = tile * COLUMNS + self._group
            row = row if (tile + 1) * COLUMNS <= matmul.m else tirx.min(row, matmul.m - 1)
            step = turn * self._p.warps + self._warp
            place = row * matmul.k + self._along((step * LANES + self._part) * plan.length, plan.k)
            with when(inside):
                for vector in range(plan.words_x // _WORDS):
                    to = self._words_x.ptr_to([start + vector * _WORDS])
                    load_bytes(to, self._x.ptr_to([place + vector * _VECTOR]), LOAD_BYTES)

    def _place_of_x(self, turn: int) -> int:
        return turn % self._plan.held * self._plan.column_tiles * self._plan.words_x

    def _make_tile(self, index: tirx.Expr) -> None:
        plan, p, sums = self._plan, self._p, self._sums
        clear(sums)
        for turn in range(plan.turns):
            wait_for_copies(p.depth - 1)
            slot = (index * plan.turns + turn) % p.depth
            scales = self._read(slot)
            if scales:
                # All lanes have read the scales before they are overwritten.
                T.evaluate(T.cuda.warp_sync())
            self._fetch(index, turn + p.depth, slot)
            for tile in range(p.tiles):
                pair = (scales[tile * 2], scales[tile * 2 + 1]) if scales else None
                offsets = None if self._offsets is None else self._offsets.ptr_to([turn * plan.column_tiles * 2])
                self._products(tile, tile * 2, self._place_of_x(turn), pair, offsets)
            if plan.held < plan.turns and (plan.rounds > 1 or turn + plan.held < plan.turns):
                self._load_x((turn + plan.held) % plan.turns)
        if self._statistics is not None:
            # At the end of the first tile: the steps of the next one are on their way.
            with when([] if plan.rounds == 1 else [index == 0]):
                kind = MMA_KINDS[self._matmul.input_dtype]
                self._statistics.make(self._words_x, plan.turns * plan.words_x, kind, self._block, self._thread)
        place = index % plan.buffers * p.warps
        self._end.share(self._shared, sums, self._thread, place)
        if self._share is None and not plan.collected:
            T.evaluate(T.cuda.cta_sync())
            self._end.write(self._shared, self._thread, lambda _: self._first_row(index), lambda _: place)

    def _read(self, slot: tirx.Expr) -> list[tirx.Expr]:
        """Emit the reading of a step from shared memory; return its scales, where W has some."""
        p = self._p
        for half in range(2 * p.tiles):
            source = self._ring.ptr_to([slot, self._warp, half, self._lane * _WORDS])
            load_vector("shared", self._words, source, first=half * _WORDS)
        if not self._plan.scale_rows:
            return []
        halves = T.alloc_local([2 * p.tiles], "float16")
        scale_row = tirx.IntImm("int32", 0) if self._plan.grouped else self._part
        for half in range(2 * p.tiles):
            place = half // 2 * TILE + half % 2 * COLUMNS + self._group
            T.buffer_store(halves, self._ring_scales[slot, self._warp, scale_row, place], [half])
        return [halves[half] for half in range(2 * p.tiles)]
