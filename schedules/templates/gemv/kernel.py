"""The kernel of `template.py`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

import math
from contextlib import nullcontext

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import constant_params
from relaxtune.schedules.templates.emit.async_copy import (
    copy_async,
    end_copies,
    wait_for_copies,
    wait_for_copies_of_block,
)
from relaxtune.schedules.templates.emit.device_function import load_bytes
from relaxtune.schedules.templates.emit.kernel_frame import (
    EmitBody,
    build_function,
    flat_view,
    keep_loads_before,
    shared_pool,
    wait_for_predecessor,
)
from relaxtune.schedules.templates.emit.registers import clear, load_vector, when
from relaxtune.schedules.templates.emit.sums_exchange import SplitSum
from relaxtune.schedules.templates.gemv.multiply import emit_pairs, emit_products
from relaxtune.schedules.templates.gemv.norms import SharedStatistics
from relaxtune.schedules.templates.gemv.output import GemvOutput
from relaxtune.schedules.templates.gemv.plan import COLUMNS, LANES, LOAD_BYTES, WARP, X_PAD, FewRowsPlan, GemvPlan
from relaxtune.schedules.tir.epilogue import MatmulFunction

# Elements of x in 16 bytes.
_VECTOR = 8


def build_gemv_kernel(func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemvPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""

    def begin(params: list[tirx.Var]) -> tuple[int, EmitBody]:
        return plan.blocks, _Kernel(func, matmul, plan, params).emit

    return build_function(func, plan.threads, plan.parameters.dependent, begin)


class FewRowsKernel:
    """A kernel for few rows under construction; the methods emit into the current IRBuilder."""

    # Registers: the sums, two rows of W for each tile of a step, and x.
    _sums: tirx.Var
    _words: tirx.Var
    _words_x: tirx.Var

    def __init__(self, func: tirx.PrimFunc, matmul: MatmulFunction, plan: FewRowsPlan, params: list[tirx.Var]) -> None:
        self._matmul, self._stored, self._sizes = matmul, matmul.stored, plan
        self._params, self._renamed = params, dict(zip(func.params, params, strict=True))
        self._x = flat_view(params[matmul.a])
        weight = matmul.b if matmul.stored is None else matmul.stored.packed
        self._weight = flat_view(params[weight])
        self._scales = None if matmul.stored is None else flat_view(params[matmul.stored.scales])
        read = {weight} if matmul.stored is None else {weight, matmul.stored.scales}
        # Tensors that the kernel before does not write may be read before it has ended.
        self._early = plan.parameters.dependent and read <= constant_params(func)

    def _place(self, thread: tirx.Expr) -> None:
        self._thread, self._warp, self._lane = thread, thread // WARP, thread % WARP
        self._group, self._part = self._lane // LANES, self._lane % LANES

    def _products(
        self, tile: int, half: int, x: int, scales: tuple[tirx.Expr, tirx.Expr] | None, offsets: tirx.Expr | None = None
    ) -> None:
        """Emit the products of two rows of W, the `half`-th in registers and the next, by words of x from `x` on."""
        low, high = (self._words.ptr_to([(half + index) * LOAD_BYTES // 4]) for index in range(2))
        columns = self._sizes.column_tiles
        sums, words_x = self._sums.ptr_to([tile * columns * 4]), self._words_x.ptr_to([x])
        emit_products(self._matmul, columns, self._sizes.grouped, sums, (low, high), words_x, scales, offsets)


class _Kernel(FewRowsKernel):
    def __init__(self, func: tirx.PrimFunc, matmul: MatmulFunction, plan: GemvPlan, params: list[tirx.Var]) -> None:
        super().__init__(func, matmul, plan, params)
        self._plan, self._p = plan, plan.parameters

    def emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p = self._plan, self._p
        self._place(thread)
        tile, share = (block, None) if p.split == 1 else (block // p.split, block % p.split)
        self._first_row, self._first_k = tile * plan.rows, None if share is None else share * plan.k
        pool = shared_pool()
        norm = self._matmul.norm
        statistics = None if norm is None else SharedStatistics(norm, self._matmul.m, self._params, pool)
        self._end = GemvOutput(self._matmul, plan, self._renamed, self._params, statistics)
        self._shared = pool.alloc(self._end.shape, "float32", align=16)
        if p.staged:
            self._shared_x = pool.alloc((self._matmul.m, plan.span + X_PAD), self._matmul.input_dtype, align=16)
        pool.commit()
        self._sums = T.alloc_local([p.tiles * plan.column_tiles * 4], "float32")
        self._words = T.alloc_local([p.unroll * p.tiles * 2 * LOAD_BYTES // 4], "uint32")
        steps_x = 1 if p.staged else p.unroll
        self._words_x = T.alloc_local([steps_x * plan.column_tiles * plan.words_x], "uint32")
        self._halves = None if self._stored is None else T.alloc_local([p.unroll * p.tiles * 2], "float16")
        clear(self._sums)
        first = tirx.IntImm("int32", 0)
        if self._early:
            self._load_weights(first)
        wait_for_predecessor(p.dependent)
        if not self._early:
            self._load_weights(first)
        last = [] if share is None else [share == p.split - 1]
        if statistics is not None:
            with when(last):
                statistics.copy(thread, plan.threads)
        self._multiply(first)
        if plan.rounds > 1:
            with T.serial(plan.rounds - 1, unroll=False) as index:
                self._load_weights(index + 1)
                if p.staged:
                    # All warps have read the x of the round before.
                    T.evaluate(T.cuda.cta_sync())
                self._multiply(index + 1)
        split = SplitSum(p.split, plan.blocks, plan.threads, thread, block)
        count = p.tiles * plan.column_tiles * 4
        with split.of_the_last(self._sums, count) if p.split > 1 else nullcontext():
            first_warp = tirx.IntImm("int32", 0)
            self._end.share(self._shared, self._sums, thread, first_warp)
            if statistics is not None:
                wait_for_copies_of_block(0)
                statistics.finish(tile, thread, p.warps)
            T.evaluate(T.cuda.cta_sync())
            self._end.write(self._shared, thread, lambda _: self._first_row, lambda _: first_warp)

    def _along(self, k: tirx.Expr) -> tirx.Expr:
        """Return a place along K, from the place in what this block makes of it."""
        return k if self._first_k is None else self._first_k + k

    def _step(self, turn: tirx.Expr, number: int) -> tirx.Expr:
        """Return the step along K that this warp makes: those of all warps lie side by side."""
        return (turn * self._p.unroll + number) * self._p.warps + self._warp

    def _exists(self, step: tirx.Expr) -> list[tirx.Expr]:
        """Return the condition for this lane's part of a step to lie in W, none where it always does."""
        plan, p = self._plan, self._p
        whole = plan.k % plan.step == 0 and plan.steps % (p.warps * p.unroll) == 0
        return [] if whole else [(step * LANES + self._part) * plan.length < plan.k]

    def _load_weights(self, turn: tirx.Expr) -> None:
        plan, p, matmul = self._plan, self._p, self._matmul
        row_bytes = matmul.k * self._matmul.weight_bits // 8
        size = 1 if self._stored is not None else 2
        for number in range(p.unroll):
            step = self._step(turn, number)
            exists = self._exists(step)
            for half in range(2 * p.tiles):
                at = (number * p.tiles * 2 + half) * LOAD_BYTES // 4
                # Behind the last row of W, the last one.
                row = self._first_row + half * COLUMNS + self._group
                row = row if matmul.n % plan.rows == 0 else tirx.min(row, matmul.n - 1)
                # Several blocks share K of 16-bit weights alone, which are elements.
                place = row * (row_bytes // size) + self._along((step * LANES + self._part) * (LOAD_BYTES // size))
                if exists:
                    clear(self._words, at, LOAD_BYTES // 4)
                with when(exists):
                    load_bytes(self._words.ptr_to([at]), self._weight.ptr_to([place]), LOAD_BYTES)
                if self._halves is not None and self._scales is not None and self._stored is not None:
                    k = (step * LANES + self._part) * plan.length if not plan.grouped else step * plan.step
                    last = -(-matmul.k // self._stored.group) - 1
                    group = k // self._stored.group
                    scale = tirx.min(group, last) * matmul.n + row if exists else group * matmul.n + row
                    to = self._halves.ptr_to([number * p.tiles * 2 + half])
                    load_bytes(to, self._scales.ptr_to([scale]), 2)

    def _stage_x(self, turn: tirx.Expr) -> None:
        """Emit the copy of a round's part of x to shared memory, zeros behind its end, and the wait of all for it."""
        plan, matmul = self._plan, self._matmul
        vectors = plan.span // _VECTOR
        count = matmul.m * vectors
        for index in range(math.ceil(count / plan.threads)):
            place = index * plan.threads + self._thread
            row, vector = place // vectors, place % vectors
            k = turn * plan.span + vector * _VECTOR
            inside = k < plan.k
            source = self._x.ptr_to([row * matmul.k + self._along(tirx.Select(inside, k, tirx.IntImm("int32", 0)))])
            with when([place < count] if count % plan.threads else []):
                copy_async(self._shared_x.ptr_to([row, vector * _VECTOR]), source, [inside])
        end_copies()
        wait_for_copies(0)
        T.evaluate(T.cuda.cta_sync())

    def _read_staged(self, number: int) -> None:
        plan, p = self._plan, self._p
        at = ((number * p.warps + self._warp) * LANES + self._part) * plan.length
        for tile in range(plan.column_tiles):
            # Columns of the sums that are no rows of x are not used, whatever is in them.
            row = tirx.min(tile * COLUMNS + self._group, self._matmul.m - 1)
            for vector in range(plan.words_x // 4):
                source = self._shared_x.ptr_to([row, at + vector * _VECTOR])
                load_vector("shared", self._words_x, source, first=tile * plan.words_x + vector * 4)

    def _load_x(self, turn: tirx.Expr) -> None:
        """Emit the loads of a round's x, by the lanes that multiply by it; zeros behind its end."""
        plan, p, matmul = self._plan, self._p, self._matmul
        for number in range(p.unroll):
            step = self._step(turn, number)
            for tile in range(plan.column_tiles):
                start = (number * plan.column_tiles + tile) * plan.words_x
                row = tile * COLUMNS + self._group
                inside = [row < matmul.m] if (tile + 1) * COLUMNS > matmul.m else []
                conditions = [*inside, *self._exists(step)]
                if conditions:
                    clear(self._words_x, start, plan.words_x)
                place = row * matmul.k + self._along((step * LANES + self._part) * plan.length)
                with when(conditions):
                    for vector in range(plan.words_x // 4):
                        to = self._words_x.ptr_to([start + vector * 4])
                        load_bytes(to, self._x.ptr_to([place + vector * _VECTOR]), LOAD_BYTES)

    def _multiply(self, turn: tirx.Expr) -> None:
        """Emit the products of a round's weights, which have been asked for, by its x."""
        plan, p = self._plan, self._p
        if p.staged:
            self._stage_x(turn)
        else:
            # A kernel that reads weights ahead has waited for the kernel before it in between.
            if not self._early:
                keep_loads_before()
            self._load_x(turn)
        for number in range(p.unroll):
            if p.staged:
                self._read_staged(number)
            words = plan.column_tiles * plan.words_x
            x = 0 if p.staged else number * words
            emit_pairs(self._matmul, self._words_x.ptr_to([x]), words)
            for tile in range(p.tiles):
                half = number * p.tiles * 2 + tile * 2
                scales = None if self._halves is None else (self._halves[half], self._halves[half + 1])
                self._products(tile, half, x, scales)
