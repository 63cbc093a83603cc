"""The kernel of `template.py`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.hopper import (
    Ring,
    encode_tensor,
    initialise_barrier,
    load_tile,
    shared_descriptor,
    uniform,
)
from relaxtune.schedules.templates.emit.kernel_frame import declare_params, finish_kernel, shared_pool
from relaxtune.schedules.templates.emit.registers import in_register
from relaxtune.schedules.templates.emit.tile_order import tile_place
from relaxtune.schedules.templates.gemm_sm100.descriptors import descriptor_high, instruction_descriptor
from relaxtune.schedules.templates.output.output_shares import Shares
from relaxtune.schedules.templates.output.output_tile import OutputTile
from relaxtune.schedules.tir.epilogue import MatmulFunction

ROWS, COLUMNS, _DEPTH, _STEP = 128, 128, 64, 16
TILE_BYTES = ROWS * _DEPTH * 2
_SWIZZLE, _UNIT = 3, 16
_WARP, _LOADS, _MULTIPLIES, _WARPS = 32, 4, 5, 6
# Of a load of 16 lanes by all columns.
_LOAD_REGISTERS = COLUMNS // 2
_MMA = "tcgen05.mma.cta_group::1.kind::f16"
_LOAD = f"tcgen05.ld.sync.aligned.16x256b.x{COLUMNS // 8}.b32"


def output_shares() -> Shares:
    """Return who writes what of a tile: each of four warps 32 rows of all columns."""
    return Shares(warps=4, m_blocks=2, columns=COLUMNS, prefetched=False, row_step=16)


def build_kernel(
    func: tirx.PrimFunc, matmul: MatmulFunction, stages: int, group: int, constants: AbstractSet[int]
) -> tirx.PrimFunc:
    """Return the kernel, with the parameters and attributes of the function it computes.

    `constants` are positions of the parameters that no kernel writes.
    """
    return finish_kernel(_Kernel(func, matmul, stages, group, constants).build(), func, dependent=False)


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(
        self, func: tirx.PrimFunc, matmul: MatmulFunction, stages: int, group: int, constants: AbstractSet[int]
    ) -> None:
        self._func, self._matmul, self._constants = func, matmul, constants
        self._stages, self._group, self._k_tiles = stages, group, math.ceil(matmul.k / _DEPTH)

    def build(self) -> tirx.PrimFunc:
        matmul = self._matmul
        tiles_m, tiles_n = math.ceil(matmul.m / ROWS), math.ceil(matmul.n / COLUMNS)
        with IRBuilder() as builder, T.prim_func():
            T.func_name("main")
            params = declare_params(self._func)
            self._output = OutputTile(
                matmul, self._func.params, params, output_shares(), self._constants, uniform_rows=True
            )
            self._maps = [
                encode_tensor(
                    name, params[param], matmul.input_dtype, (matmul.k, size), (matmul.k * 2,), (_DEPTH, ROWS), _SWIZZLE
                )
                for name, param, size in (("A_map", matmul.a, matmul.m), ("B_map", matmul.b, matmul.n))
            ]
            T.device_entry()
            block = T.cta_id([tiles_m * tiles_n])
            self._thread = T.thread_id([_WARPS * _WARP])
            place = tile_place(block, tiles_m, tiles_n, self._group)
            self._row, self._column = (in_register(one, "int32") for one in place)
            self._warp = in_register(uniform(self._thread // _WARP), "int32")
            self._allocate()
            self._initialise()
            self._describe()
            self._in_warp(_LOADS, self._load)
            self._in_warp(_MULTIPLIES, self._multiply)
            with T.If(self._warp < _LOADS), T.Then():
                self._write()
            # One thread of two warps has come later than their others.
            T.evaluate(T.cuda.warp_sync())
            T.evaluate(T.ptx["tcgen05.fence::before_thread_sync"]())
            T.evaluate(T.cuda.cta_sync())
            with T.If(self._warp == _MULTIPLIES), T.Then():
                T.evaluate(T.ptx["tcgen05.fence::after_thread_sync"]())
                T.evaluate(T.ptx["tcgen05.dealloc.cta_group::1.sync.aligned.b32"](self._sums, T.uint32(COLUMNS)))
        return builder.get()

    def _allocate(self) -> None:
        pool, dtype = shared_pool(), self._matmul.input_dtype
        self._tiles = [pool.alloc((self._stages, ROWS * _DEPTH), dtype, align=1024) for _ in range(2)]
        self._output.allocate(pool)
        self._full = pool.alloc((self._stages,), "uint64", align=8)
        self._empty = pool.alloc((self._stages,), "uint64", align=8)
        self._done = pool.alloc((1,), "uint64", align=8)
        self._address = pool.alloc((1,), "uint32", align=16)
        pool.commit()

    def _in_warp(self, number: int, emit: Callable[[], None]) -> None:
        """Emit something for one thread of a warp."""
        with T.If(self._thread == number * _WARP), T.Then():
            emit()

    def _initialise(self) -> None:
        """Emit the barriers, and the allocation of tensor memory, which all threads see then."""
        with T.If(self._thread == _LOADS * _WARP), T.Then():
            for stage in range(self._stages):
                initialise_barrier(self._full.ptr_to([stage]), 1)
                initialise_barrier(self._empty.ptr_to([stage]), 1)
            initialise_barrier(self._done.ptr_to([0]), 1)
            T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
            T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
        with T.If(self._warp == _MULTIPLIES), T.Then():
            columns = T.uint32(COLUMNS)
            T.evaluate(
                T.ptx["tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"](self._address.ptr_to([0]), columns)
            )
            T.evaluate(T.ptx["tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned"]())
        T.evaluate(T.ptx["tcgen05.fence::before_thread_sync"]())
        T.evaluate(T.cuda.cta_sync())
        T.evaluate(T.ptx["tcgen05.fence::after_thread_sync"]())
        self._sums = in_register(self._address[0], "uint32")

    def _describe(self) -> None:
        """Emit the descriptors of the first stage; by whole warps, whose lanes exchange them."""
        high = descriptor_high(8 * _DEPTH * 2 // _UNIT, _SWIZZLE)
        found = [shared_descriptor(tile.ptr_to([0, 0]), 1, high) for tile in self._tiles]
        self._described = [(in_register(low, "int32"), made) for low, made in found]

    def _load(self) -> None:
        ring = Ring(self._stages)
        with T.serial(self._k_tiles, unroll=False) as k_tile:
            T.evaluate(T.cuda.mbarrier_wait(self._empty.ptr_to([ring.stage]), ring.phase ^ 1))
            full = self._full.ptr_to([ring.stage])
            T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(full, T.uint32(2 * TILE_BYTES)))
            for tile, source, first in zip(self._tiles, self._maps, (self._row, self._column), strict=True):
                load_tile(tile.ptr_to([ring.stage, 0]), source, (k_tile * _DEPTH, first * ROWS), full)
            ring.advance()

    def _multiply(self) -> None:
        ring = Ring(self._stages)
        instruction = T.uint32(instruction_descriptor(self._matmul.input_dtype, ROWS, COLUMNS))
        with T.serial(self._k_tiles, unroll=False) as k_tile:
            T.evaluate(T.cuda.mbarrier_wait(self._full.ptr_to([ring.stage]), ring.phase))
            T.evaluate(T.ptx["tcgen05.fence::after_thread_sync"]())
            for step in range(_DEPTH // _STEP):
                offset = ring.stage * (TILE_BYTES // _UNIT) + step * (_STEP * 2 // _UNIT)
                operands = [made(low + offset) for low, made in self._described]
                adds = tirx.const(True, "bool") if step else k_tile > 0
                T.evaluate(T.ptx[_MMA](self._sums, *operands, instruction, *[T.uint32(0)] * 4, adds))
            self._commit(self._empty.ptr_to([ring.stage]))
            ring.advance()
        self._commit(self._done.ptr_to([0]))

    def _commit(self, barrier: tirx.Expr) -> None:
        """Emit an arrival at a barrier that follows the instructions so far."""
        name = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
        T.evaluate(T.ptx[name](T.cuda.cvta_generic_to_shared(barrier)))

    def _write(self) -> None:
        warp, lane = self._warp, self._thread % _WARP
        ragged_rows, ragged_columns = self._matmul.m % ROWS != 0, self._matmul.n % COLUMNS != 0
        first = self._row * ROWS + warp * _WARP, self._column * COLUMNS
        self._output.begin(*first, warp, lane, ragged_rows=ragged_rows)
        T.evaluate(T.cuda.mbarrier_wait(self._done.ptr_to([0]), 0))
        T.evaluate(T.ptx["tcgen05.fence::after_thread_sync"]())
        sums = T.alloc_local([2 * _LOAD_REGISTERS], "float32")
        for half in range(2):
            at = self._sums + tirx.Cast("uint32", warp * _WARP + half * 16) * T.uint32(1 << 16)
            T.evaluate(T.ptx[_LOAD](*(sums[half * _LOAD_REGISTERS + one] for one in range(_LOAD_REGISTERS)), at))
        T.evaluate(T.ptx["tcgen05.wait::ld.sync.aligned"]())
        self._output.write(sums, ragged_columns=ragged_columns, column_end=self._matmul.columns)
