"""The kernel of `schedules.templates.gemv_stream`, emitted with TIRx's IRBuilder; the notation is that module's."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from schedules.fallback import SCHEDULED_ATTR
from schedules.templates.blocks import static_shape
from schedules.templates.expressions import dtype_of
from schedules.templates.gemv_function import GemvFunction
from schedules.templates.gemv_kernel import copy_async
from schedules.templates.gemv_multiply import emit_pairs, emit_products
from schedules.templates.gemv_output import GemvOutput, flat_view
from schedules.templates.gemv_plan import COLUMNS, LANES, LOAD_BYTES, TILE, WARP
from schedules.templates.gemv_stream_plan import SCALES, GemvStreamPlan
from schedules.templates.global_access import load_bytes
from schedules.templates.kernel_frame import constant_params, wait_for_predecessor
from schedules.templates.lowering import KERNEL_ATTR
from schedules.templates.registers import when

# On a PrimFunc made of blocks, which a kernel is not.
_BLOCKS_ATTR = "s_tir"
# Launch attributes of a PrimFunc; the spelling is TVM's.
_LAUNCH_ATTR, _DEPENDENT_LAUNCH = "tirx.kernel_launch_params", "tirx.use_programtic_dependent_launch"
# Elements of x in 16 bytes.
_VECTOR = 8
_WORDS = LOAD_BYTES // 4
_COMMIT = "relaxtune_copies_end_group"
_COMMIT_SOURCE = f"""
__forceinline__ __device__ void {_COMMIT}() {{ asm volatile("cp.async.commit_group;" ::: "memory"); }}
"""
# All groups of copies but the last `pending` have arrived, those of the warp's other lanes too.
_ARRIVED = """
__forceinline__ __device__ void relaxtune_copies_but_{pending}() {{
  asm volatile("cp.async.wait_group {pending};" ::: "memory");
  __syncwarp();
}}
"""


def build_gemv_stream_kernel(func: tirx.PrimFunc, function: GemvFunction, plan: GemvStreamPlan) -> tirx.PrimFunc:
    """Return the kernel of a plan, with the parameters and attributes of the function it computes."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("main")
        params = [T.arg(p.name, T.Buffer(list(static_shape(p) or ()), dtype_of(p))) for p in func.params]
        kernel = _Kernel(func, function, plan, params)
        T.device_entry()
        block = T.cta_id([plan.parameters.blocks])
        thread = T.thread_id([plan.threads])
        kernel.emit(block, thread)
    made = builder.get()
    for key, value in func.attrs.items() if func.attrs else ():
        if key != _BLOCKS_ATTR:
            made = made.with_attr(key, value)
    if plan.parameters.dependent:
        made = made.with_attr(_LAUNCH_ATTR, [_DEPENDENT_LAUNCH])
    return made.with_attr(SCHEDULED_ATTR, True).with_attr(KERNEL_ATTR, True)


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(
        self, func: tirx.PrimFunc, function: GemvFunction, plan: GemvStreamPlan, params: list[tirx.Var]
    ) -> None:
        self._function, self._plan, self._p = function, plan, plan.parameters
        self._matmul, self._stored = function.matmul, plan.stored
        self._x = flat_view(params[self._matmul.a])
        renamed, output = dict(zip(func.params, params, strict=True)), flat_view(params[self._matmul.output])
        self._end = GemvOutput(self._matmul, renamed, output, self._p.tiles, self._p.warps)
        self._weight, self._scales = flat_view(params[self._stored.packed]), flat_view(params[self._stored.scales])
        # What the kernel before does not write may be read before it has ended.
        read = {self._stored.packed, self._stored.scales}
        self._early = self._p.dependent and read <= constant_params(func)

    def emit(self, block: tirx.Expr, thread: tirx.Expr) -> None:
        plan, p = self._plan, self._p
        self._block, self._warp, self._lane = block, thread // WARP, thread % WARP
        self._group, self._part = self._lane // LANES, self._lane % LANES
        pool = T.SMEMPool()
        # Every lane copies what it reads itself: 16 bytes beside those of its neighbours.
        self._ring = pool.alloc((p.depth, p.warps, p.tiles * 2, WARP * _WORDS), "uint32", align=16)
        shape = (p.depth, p.warps, plan.scale_rows, plan.rows)
        self._ring_scales = pool.alloc(shape, "float16", align=16)
        warps, m, rows = self._end.shape
        shared = pool.alloc((plan.buffers * warps, m, rows), "float32", align=16)
        pool.commit()
        self._words_x = T.alloc_local([plan.turns * plan.column_tiles * plan.words_x], "uint32")
        self._words = T.alloc_local([p.tiles * 2 * _WORDS], "uint32")
        sums = T.alloc_local([p.tiles * plan.column_tiles * 4], "float32")
        first = tirx.IntImm("int32", 0)
        if self._early:
            self._begin(first)
        wait_for_predecessor(p.dependent)
        if not self._early:
            self._begin(first)
        self._load_x()
        if plan.rounds == 1:
            self._make_tile(first, sums, shared, thread)
            return
        with T.serial(plan.rounds, unroll=False) as index:
            whole = plan.row_tiles % p.blocks == 0
            with when([] if whole else [index * p.blocks + block < plan.row_tiles]):
                self._make_tile(index, sums, shared, thread)

    def _begin(self, first: tirx.Expr) -> None:
        """Emit the asking for as many steps as there are places."""
        for step in range(self._p.depth):
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
                step = (turn % plan.turns) * self._p.warps + self._warp
                self._fetch_weights(tile, step, slot)
                self._fetch_scales(tile, step, slot)
        T.evaluate(T.cuda.func_call(_COMMIT, source_code=_COMMIT_SOURCE))

    def _inside(self, step: tirx.Expr) -> list[tirx.Expr]:
        """Return the condition for this lane's part of a step to lie in W, none where it always does."""
        plan, k = self._plan, self._matmul.k
        whole = k % plan.step == 0 and plan.steps % self._p.warps == 0
        return [] if whole else [(step * LANES + self._part) * plan.length < k]

    def _fetch_weights(self, tile: tirx.Expr, step: tirx.Expr, slot: tirx.Expr | int) -> None:
        plan, matmul = self._plan, self._matmul
        row_bytes = matmul.k * self._stored.bits // 8
        for half in range(2 * self._p.tiles):
            row = tile * plan.rows + half * COLUMNS + self._group
            inside = [*self._inside(step), *([] if matmul.n % plan.rows == 0 else [row < matmul.n])]
            place = row * row_bytes + (step * LANES + self._part) * LOAD_BYTES
            copy_async(self._ring.ptr_to([slot, self._warp, half, self._lane * _WORDS]), *self._source(place, inside))

    def _source(self, place: tirx.Expr, inside: list[tirx.Expr]) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the address to copy from, one that exists, and whether to copy from it."""
        condition = tirx.all(*inside) if inside else tirx.IntImm("bool", 1)
        zero = tirx.IntImm("int32", 0)
        return self._weight.ptr_to([tirx.Select(condition, place, zero) if inside else place]), condition

    def _fetch_scales(self, tile: tirx.Expr, step: tirx.Expr, slot: tirx.Expr | int) -> None:
        """Emit the copy of a step's scales, 8 of them by each of the first lanes."""
        plan, matmul = self._plan, self._matmul
        vectors = plan.rows // SCALES
        scale_row, vector = self._lane // vectors, self._lane % vectors
        k = step * plan.step if plan.grouped else (step * LANES + scale_row) * plan.length
        row = tile * plan.rows + vector * SCALES
        conditions = [self._lane < plan.scale_rows * vectors]
        if matmul.n % plan.rows:
            conditions.append(row < matmul.n)
        # Behind the end of K, where weights count nothing, the last scale: it has to be finite.
        k = tirx.min(k, matmul.k - 1) if self._inside(step) else k
        with when(conditions):
            source = self._scales.ptr_to([k // self._stored.group * matmul.n + row])
            to = self._ring_scales.ptr_to([slot, self._warp, scale_row, vector * SCALES])
            copy_async(to, source, tirx.IntImm("bool", 1))

    def _load_x(self) -> None:
        """Emit the loads of the part of x that this warp multiplies by; zeros behind its end."""
        plan, matmul = self._plan, self._matmul
        count = plan.column_tiles * plan.words_x
        for turn in range(plan.turns):
            step = turn * self._p.warps + self._warp
            inside = self._inside(step)
            for tile in range(plan.column_tiles):
                start = turn * count + tile * plan.words_x
                if inside:
                    for word in range(plan.words_x):
                        T.buffer_store(self._words_x, tirx.IntImm("uint32", 0), [start + word])
                # Columns of the sums that are no rows of x are not used, whatever is in them.
                row = tile * COLUMNS + self._group
                row = row if (tile + 1) * COLUMNS <= matmul.m else tirx.min(row, matmul.m - 1)
                place = row * matmul.k + (step * LANES + self._part) * plan.length
                with when(inside):
                    for vector in range(plan.words_x // _WORDS):
                        to = self._words_x.ptr_to([start + vector * _WORDS])
                        load_bytes(to, self._x.ptr_to([place + vector * _VECTOR]), LOAD_BYTES)
        emit_pairs(self._function, self._words_x.ptr_to([0]), plan.turns * count)

    def _make_tile(self, index: tirx.Expr, sums: tirx.Var, shared: tirx.Var, thread: tirx.Expr) -> None:
        plan, p = self._plan, self._p
        for number in range(p.tiles * plan.column_tiles * 4):
            T.buffer_store(sums, tirx.FloatImm("float32", 0.0), [number])
        for turn in range(plan.turns):
            source = _ARRIVED.format(pending=p.depth - 1)
            T.evaluate(T.cuda.func_call(f"relaxtune_copies_but_{p.depth - 1}", source_code=source))
            slot = (index * plan.turns + turn) % p.depth
            scales = self._read(slot)
            # All lanes have read the scales before they are overwritten.
            T.evaluate(T.cuda.warp_sync())
            self._fetch(index, turn + p.depth, slot)
            for tile in range(p.tiles):
                rows = [self._words.ptr_to([(tile * 2 + half) * _WORDS]) for half in range(2)]
                emit_products(
                    self._function,
                    plan.column_tiles,
                    plan.grouped,
                    sums.ptr_to([tile * plan.column_tiles * 4]),
                    (rows[0], rows[1]),
                    self._words_x.ptr_to([turn * plan.column_tiles * plan.words_x]),
                    (scales[tile * 2], scales[tile * 2 + 1]),
                )
        first_warp = index % plan.buffers * p.warps
        self._end.share(shared, sums, thread, first_warp)
        T.evaluate(T.cuda.cta_sync())
        self._end.write(shared, thread, (index * p.blocks + self._block) * plan.rows, first_warp)

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
