"""Matrix multiplication with an elementwise epilogue for Hopper (sm_90a): TMA, mbarriers and wgmma, in TIRx.

Notation
--------
::

    C[m, n] = epilogue(sum_k A[m, k] * B[k, n], m, n)        A, B: float16 or bfloat16; the sum: float32

    A   [M, K]            row major
    B   [K, N] or [N, K]  row major ("MN-major" or "K-major" to wgmma)
    C   [M, N]            row major, any dtype; leading axes of A and C are flattened into M

One thread block makes tiles of `block_m` x `block_n`; all tiles where `persistent` (a block for each multiprocessor,
tile = block, block + blocks, ...), else one. Its threads:

- consumers: `consumers` warpgroups of 128 threads, each `block_m / consumers` rows of the tile, in `m64nNk16` wgmma
  instructions. Thread t of a warpgroup holds of rows `16 * (t / 32) + (t % 32) / 4` and 8 below, in each 8 columns,
  columns `2 * (t % 4)` and the next: 4 accumulators for every 8 columns of an instruction.
- producer: one warp after them, of which one thread issues every TMA load.

Shared memory is a ring of `stages` stages (dynamic; each tile 1024-byte aligned, which a swizzle atom needs):

    tile_a   [stages, block_m, 64]               128-byte rows of K, swizzled 128 bytes
    tile_b   [stages, block_n/w, 64, w]          [K, N]: chunks of w columns, rows of K, swizzled 2*w bytes
             [stages, block_n, 64]               [N, K]: as A
    full     [stages] mbarrier: one arrival (the producer) and the bytes of both tiles
    empty    [stages] mbarrier: one arrival by each consumer warpgroup
    patch    [4 * consumers, 16, 64]             a warp's part of C, for writing whole 128-byte rows

TMA fills what lies outside A and B with zeros, so K may be ragged; rows and columns outside C are not written.

Limits and encodings: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (shapes,
register fragments, matrix descriptors, swizzle modes) and "Tensor Memory Access" (cp.async.bulk.tensor); CUDA driver
API, cuTensorMapEncodeTiled (16-byte aligned address and strides, box sides of at most 256).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from schedules.fallback import SCHEDULED_ATTR
from schedules.targets import CudaLimits, ResolvedTarget
from schedules.templates.base import Parameters, Refusal, TemplateError
from schedules.templates.epilogue import MatmulFunction, recognise_matmul
from schedules.templates.lowering import KERNEL_ATTR
from schedules.templates.output_tile import OutputTile

BLOCK_K = 64
_WARPGROUP = 128
_ELEMENT_BYTES = 2
_PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}
# Width of a chunk of columns -> (TMA and wgmma swizzle mode), the widest first.
_SWIZZLES = {64: 3, 32: 2, 16: 1}
_TMA_ALIGNMENT = 16
_TMA_BOX_MAX = 256
_STAGES_MAX = 16
# Registers that a consumer needs beside its accumulators (addresses, descriptors, the epilogue's values), measured.
_REGISTERS_BESIDE = 40
_OUTPUT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
# Elements after each row of a patch: rows then start in different banks (2-byte pairs and 4-byte pairs alike).
_PATCH_PAD = 8
# Of H100 SXM and H200, where the target was given by name.
_SM_COUNT = 132


@dataclass(frozen=True)
class GemmParameters(Parameters):
    """Tile sizes and roles of one kernel.

    Attributes
    ----------
    block_m, block_n
        Tile of C that a block makes at a time.
    stages
        Depth of the ring of tiles in shared memory.
    consumers
        Warpgroups that compute.
    blocks
        Thread blocks, each of which makes every `blocks`-th tile; 0 for a block per tile.
    """

    template: ClassVar[str] = "gemm_sm90"

    block_m: int = 128
    block_n: int = 128
    stages: int = 4
    consumers: int = 2
    blocks: int = 0


class GemmSm90:
    """The template; see `schedules.templates.base.Template`."""

    name = GemmParameters.template

    def candidates(self, func: tirx.PrimFunc, target: ResolvedTarget) -> Sequence[GemmParameters] | Refusal:
        """Return the parameters worth measuring, the most promising first, or why there are none."""
        matmul = _recognise(func, target)
        if isinstance(matmul, Refusal):
            return matmul
        limits = _limits(target)
        fitting = [one for one in _proposals(matmul, limits) if _refusal(matmul, one, limits) is None]
        return fitting or Refusal("no tile fits this shape")

    def apply(self, func: tirx.PrimFunc, target: ResolvedTarget, parameters: Parameters) -> tirx.PrimFunc | Refusal:
        """Return the scheduled PrimFunc, or why it cannot be made."""
        if not isinstance(parameters, GemmParameters):
            raise TemplateError(f"template {self.name} got {parameters!r}; expected GemmParameters.")
        matmul = _recognise(func, target)
        if isinstance(matmul, Refusal):
            return matmul
        refusal = _refusal(matmul, parameters, _limits(target))
        return refusal or _Kernel(func, matmul, parameters).build()

    def parse(self, decision: str) -> GemmParameters:
        """Return the parameters of a decision; TemplateError when it is not one of this template's."""
        return GemmParameters.from_json(decision)


def _limits(target: ResolvedTarget) -> CudaLimits:
    if not isinstance(target.limits, CudaLimits):
        raise TemplateError(f"template {GemmParameters.template} needs a CUDA target, got {target.kind}.")
    return target.limits


def _recognise(func: tirx.PrimFunc, target: ResolvedTarget) -> MatmulFunction | Refusal:
    """Return the function's matmul when this template can make it with some parameters."""
    if target.kind != "cuda" or target.arch != "sm_90a":
        return Refusal(f"the target is {target.kind} {target.arch}, expected cuda sm_90a (wgmma and TMA)")
    matmul = recognise_matmul(func)
    if isinstance(matmul, Refusal):
        return matmul
    if matmul.input_dtype not in _PTX_TYPES:
        return Refusal(f"the operands are {matmul.input_dtype}, expected one of {', '.join(_PTX_TYPES)}")
    if matmul.output_dtype not in _OUTPUT_BYTES:
        return Refusal(f"the output is {matmul.output_dtype}, expected one of {', '.join(_OUTPUT_BYTES)}")
    for name, size in (("K", matmul.k), ("N", matmul.n)):
        if size * _ELEMENT_BYTES % _TMA_ALIGNMENT:
            return Refusal(f"{name} is {size}, expected a multiple of 8 (TMA strides are multiples of 16 bytes)")
    return matmul


def _refusal(matmul: MatmulFunction, p: GemmParameters, limits: CudaLimits) -> Refusal | None:
    """Return why parameters are not possible, or None."""
    if p.consumers < 1 or p.block_m % (64 * p.consumers) or p.block_m > _TMA_BOX_MAX:
        return Refusal(f"block_m is {p.block_m}, expected a multiple of 64 for each of {p.consumers} consumers, <= 256")
    if p.block_n % 16 or not 16 <= p.block_n <= 256:
        return Refusal(f"block_n is {p.block_n}, expected a multiple of 16 up to 256 (wgmma's N)")
    if not 2 <= p.stages <= _STAGES_MAX:
        return Refusal(f"stages is {p.stages}, expected 2 to {_STAGES_MAX}")
    if p.blocks < 0:
        return Refusal(f"blocks is {p.blocks}, expected 0 or more")
    threads = _threads(p)
    if threads > limits.max_threads_per_block:
        return Refusal(f"{threads} threads, the target has {limits.max_threads_per_block}")
    accumulators = p.block_m * p.block_n // (_WARPGROUP * p.consumers)
    registers = min(limits.registers_per_thread, limits.registers_per_block // threads)
    if accumulators + _REGISTERS_BESIDE > registers:
        return Refusal(f"{accumulators} accumulators a thread beside {_REGISTERS_BESIDE} registers, {registers} exist")
    if _shared_bytes(matmul, p) > limits.shared_bytes_optin:
        return Refusal(f"{_shared_bytes(matmul, p)} bytes of shared memory, the target has {limits.shared_bytes_optin}")
    return None


def _threads(p: GemmParameters) -> int:
    return p.consumers * _WARPGROUP + 32


def _shared_bytes(matmul: MatmulFunction, p: GemmParameters) -> int:
    """Return the dynamic shared memory of a block, alignment included."""
    ring = p.stages * (p.block_m + p.block_n) * BLOCK_K * _ELEMENT_BYTES
    patches = 4 * p.consumers * 16 * (_patch_width(p) + _PATCH_PAD) * _OUTPUT_BYTES[matmul.output_dtype]
    return ring + patches + 2 * 8 * p.stages + 1024


def _patch_width(p: GemmParameters) -> int:
    return min(p.block_n, 64)


def _chunk_width(p: GemmParameters) -> int:
    """Return the columns of B that one swizzled row holds: the widest of 64, 32 and 16 that divides the tile."""
    return next(width for width in _SWIZZLES if p.block_n % width == 0)


def _proposals(matmul: MatmulFunction, limits: CudaLimits) -> list[GemmParameters]:
    """Return tiles by predicted time: waves of blocks times the longer of a tile's loads and its arithmetic."""
    sm_count = limits.sm_count or _SM_COUNT
    proposals = []
    for block_m, consumers in ((64, 1), (128, 2), (128, 1), (256, 2)):
        if block_m >= 2 * matmul.m and block_m > 64:
            continue
        for block_n in (32, 64, 96, 128, 192, 256):
            if block_n >= 2 * matmul.n and block_n > 32:
                continue
            tiles = math.ceil(matmul.m / block_m) * math.ceil(matmul.n / block_n)
            for stages in (4, 6, 8, 12):
                for blocks in (0, sm_count) if tiles > sm_count else (0,):
                    proposals.append(GemmParameters(block_m, block_n, stages, consumers, blocks))
    return sorted(proposals, key=lambda p: _predicted(matmul, p, sm_count))


def _predicted(matmul: MatmulFunction, p: GemmParameters, sm_count: int) -> float:
    """Return a time to order by, in cycles of a multiprocessor: rough, only the order counts."""
    waves = math.ceil(math.ceil(matmul.m / p.block_m) * math.ceil(matmul.n / p.block_n) / sm_count)
    # 1024 float16 multiply-adds a cycle at 64 rows or more; about 64 bytes a cycle from L2.
    arithmetic = p.block_m * p.block_n * BLOCK_K / 4096 * (1.0 if p.block_n >= 64 else 1.5)
    loads = (p.block_m + p.block_n) * BLOCK_K * _ELEMENT_BYTES / 64
    shallow = 1.0 + 0.5 / p.stages
    return waves * (math.ceil(matmul.k / BLOCK_K) * max(arithmetic, loads) * shallow + 1500)


_TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"

# Keeps the compiler from moving a use of an accumulator above the wait for the wgmma that writes it.
_PIN = "relaxtune_pin"
_PIN_SOURCE = """
__forceinline__ __device__ void relaxtune_pin(float& value) { asm volatile("" : "+f"(value) :: "memory"); }
"""


class _Kernel:
    """One kernel under construction; the methods emit into the current IRBuilder."""

    def __init__(self, func: tirx.PrimFunc, matmul: MatmulFunction, parameters: GemmParameters) -> None:
        self._func = func
        self._matmul = matmul
        self._p = parameters
        self._tiles_n = math.ceil(matmul.n / parameters.block_n)
        self._tiles = math.ceil(matmul.m / parameters.block_m) * self._tiles_n
        self._blocks = min(parameters.blocks or self._tiles, self._tiles)
        self._k_tiles = math.ceil(matmul.k / BLOCK_K)
        self._rows = parameters.block_m // parameters.consumers
        self._chunk = _chunk_width(parameters)

    def build(self) -> tirx.PrimFunc:
        with IRBuilder() as builder, T.prim_func():
            T.func_name("main")
            self._params = [_declare(param) for param in self._func.params]
            self._encode_maps()
            T.device_entry()
            self._block = T.cta_id([self._blocks])
            self._thread = T.thread_id([_threads(self._p)])
            self._allocate()
            self._initialise()
            with T.If(self._thread >= self._p.consumers * _WARPGROUP):
                with T.Then(), T.If(self._thread == self._p.consumers * _WARPGROUP), T.Then():
                    self._produce()
                with T.Else():
                    self._consume()
        made = builder.get()
        attrs = dict(self._func.attrs.items()) if self._func.attrs else {}
        for key, value in attrs.items():
            made = made.with_attr(key, value)
        return made.with_attr(SCHEDULED_ATTR, True).with_attr(KERNEL_ATTR, True)

    def _encode_maps(self) -> None:
        matmul, p = self._matmul, self._p
        self._map_a = self._encode(matmul.a, (matmul.m, matmul.k), (p.block_m, BLOCK_K), 3)
        if matmul.b_transposed:
            self._map_b = self._encode(matmul.b, (matmul.n, matmul.k), (p.block_n, BLOCK_K), 3)
        else:
            box = (BLOCK_K, self._chunk)
            self._map_b = self._encode(matmul.b, (matmul.k, matmul.n), box, _SWIZZLES[self._chunk])

    def _encode(self, param: int, shape: tuple[int, int], box: tuple[int, int], swizzle: int) -> tirx.Var:
        """Emit the encoding of a row-major matrix's tensor map (host code) and return the map.

        After the address: sizes and byte strides, box and element strides, all innermost first; interleave 0, the
        swizzle mode, L2 promotion 2 (128 bytes), fill 0 (zeros).
        """
        rows, columns = shape
        encoded = T.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap"))
        sizes = (columns, rows, columns * _ELEMENT_BYTES, box[1], box[0], 1, 1, 0, swizzle, 2, 0)
        call = T.call_packed(
            "runtime.cuTensorMapEncodeTiled", encoded, self._matmul.input_dtype, 2, self._params[param].data, *sizes
        )
        T.evaluate(call)
        return encoded

    def _allocate(self) -> None:
        p, dtype = self._p, self._matmul.input_dtype
        pool = T.SMEMPool()
        self._tile_a = pool.alloc((p.stages, p.block_m * BLOCK_K), dtype, align=1024)
        self._tile_b = pool.alloc((p.stages, p.block_n * BLOCK_K), dtype, align=1024)
        stride = _patch_width(p) + _PATCH_PAD
        self._patch = pool.alloc((4 * p.consumers, 16, stride), self._matmul.output_dtype, align=128)
        self._full = pool.alloc((p.stages,), "uint64", align=8)
        self._empty = pool.alloc((p.stages,), "uint64", align=8)
        pool.commit()

    def _initialise(self) -> None:
        with T.If(self._thread == 0), T.Then():
            for stage in range(self._p.stages):
                T.evaluate(T.ptx.mbarrier.init.shared.b64(self._full.ptr_to([stage]), T.uint32(1)))
                T.evaluate(T.ptx.mbarrier.init.shared.b64(self._empty.ptr_to([stage]), T.uint32(self._p.consumers)))
            T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
        T.evaluate(T.cuda.cta_sync())

    def _ring(self) -> _Ring:
        return _Ring(self._p.stages)

    def _each_tile(self, make: Callable[[tirx.Expr, tirx.Expr], None]) -> None:
        """Emit the loop over this block's tiles; `make` gets the tile's row and column in tiles."""

        def emit(tile: tirx.Expr) -> None:
            make(tile // self._tiles_n, tile % self._tiles_n)

        if self._blocks == self._tiles:
            emit(self._block)
            return
        with T.serial(T.ceildiv(self._tiles - self._block, self._blocks)) as turn:
            emit(self._block + turn * self._blocks)

    def _produce(self) -> None:
        p = self._p
        ring = self._ring()
        tile_bytes = (p.block_m + p.block_n) * BLOCK_K * _ELEMENT_BYTES

        def load_tile(row: tirx.Expr, column: tirx.Expr) -> None:
            with T.serial(self._k_tiles) as k_tile:
                T.evaluate(T.cuda.mbarrier_wait(self._empty.ptr_to([ring.stage]), ring.phase ^ 1))
                full = self._full.ptr_to([ring.stage])
                T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(full, T.uint32(tile_bytes)))
                destination = self._tile_a.ptr_to([ring.stage, 0])
                self._load(destination, self._map_a, k_tile * BLOCK_K, row * p.block_m, full)
                self._load_b(ring, k_tile, column, full)
                ring.advance()

        self._each_tile(load_tile)

    def _load_b(self, ring: _Ring, k_tile: tirx.Expr, column: tirx.Expr, full: tirx.Expr) -> None:
        p = self._p
        if self._matmul.b_transposed:
            destination = self._tile_b.ptr_to([ring.stage, 0])
            self._load(destination, self._map_b, k_tile * BLOCK_K, column * p.block_n, full)
            return
        for start in range(0, p.block_n, self._chunk):
            destination = self._tile_b.ptr_to([ring.stage, start * BLOCK_K])
            self._load(destination, self._map_b, column * p.block_n + start, k_tile * BLOCK_K, full)

    def _load(self, to: tirx.Expr, source: tirx.Var, inner: tirx.Expr, outer: tirx.Expr, full: tirx.Expr) -> None:
        T.evaluate(T.ptx[_TMA_LOAD](to, T.address_of(source), inner, outer, full))

    def _consume(self) -> None:
        p = self._p
        ring = self._ring()
        group = self._thread // _WARPGROUP
        m_blocks = self._rows // 64
        accumulators = T.alloc_local([m_blocks * p.block_n // 2], "float32")
        multiply = _Multiply(self._matmul, p, self._chunk)
        base_a, base_b = T.alloc_local([1], "uint64")[0], T.alloc_local([1], "uint64")[0]
        multiply.describe_a(base_a, self._tile_a.ptr_to([0, group * self._rows * BLOCK_K]))
        multiply.describe_b(base_b, self._tile_b.ptr_to([0, 0]))
        first = self._thread % _WARPGROUP == 0

        def make_tile(row: tirx.Expr, column: tirx.Expr) -> None:
            with T.serial(self._k_tiles) as k_tile:
                T.evaluate(T.cuda.mbarrier_wait(self._full.ptr_to([ring.stage]), ring.phase))
                multiply.emit(accumulators, base_a, base_b, ring.stage, k_tile)
                # The multiplications of the stage before are done: its memory may be overwritten.
                T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
                with T.If(tirx.all(first, k_tile > 0)), T.Then():
                    self._release((ring.stage + p.stages - 1) % p.stages)
                ring.advance()
            T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
            for index in range(m_blocks * p.block_n // 2):
                T.evaluate(T.cuda.func_call(_PIN, accumulators[index], source_code=_PIN_SOURCE))
            with T.If(first), T.Then():
                self._release((ring.stage + p.stages - 1) % p.stages)
            self._write(accumulators, row, column)

        self._each_tile(make_tile)

    def _write(self, accumulators: tirx.Var, row: tirx.Expr, column: tirx.Expr) -> None:
        """Emit the epilogue of this warpgroup's rows."""
        p, matmul = self._p, self._matmul
        warp, lane = self._thread // 32, self._thread % 32
        tile = OutputTile(matmul, self._func.params, self._params, self._patch, _patch_width(p), warp, lane)
        ragged = (matmul.m % p.block_m != 0, matmul.n % p.block_n != 0)
        for block in range(self._rows // 64):
            first_row = row * p.block_m + warp // 4 * self._rows + block * 64 + warp % 4 * 16
            tile.emit(
                accumulators,
                block * p.block_n // 2,
                first_row,
                column * p.block_n,
                ragged=ragged,
                columns=p.block_n,
            )

    def _release(self, stage: tirx.Expr) -> None:
        T.evaluate(T.ptx.mbarrier.arrive.shared.b64(self._empty.ptr_to([stage]), T.uint32(1)))


def _declare(param: tirx.Var) -> tirx.Var:
    shape = [int(size) for size in param.ty.shape]
    return T.arg(param.name, T.Buffer(shape, str(param.ty.dtype)))


class _Ring:
    """Stage and parity of a ring of mbarriers, in two registers."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._stage = T.alloc_local([1], "int32")
        self._phase = T.alloc_local([1], "int32")
        T.buffer_store(self._stage, 0, [0])
        T.buffer_store(self._phase, 0, [0])

    @property
    def stage(self) -> tirx.Expr:
        return self._stage[0]

    @property
    def phase(self) -> tirx.Expr:
        return self._phase[0]

    def advance(self) -> None:
        T.buffer_store(self._stage, self.stage + 1, [0])
        with T.If(self.stage == self._depth), T.Then():
            T.buffer_store(self._stage, 0, [0])
            T.buffer_store(self._phase, self.phase ^ 1, [0])


class _Multiply:
    """The wgmma instructions of one stage.

    Matrix descriptors hold addresses and byte offsets in units of 16 bytes. With rows of K swizzled 128 bytes, 8 rows
    ("stride") are 1024 bytes apart, and 16 elements of K are 32 bytes further along the row. With rows of N swizzled
    2*w bytes, 8 rows of K are 16*w bytes apart ("stride"), chunks of w columns 64 such rows ("leading"), and 16
    elements of K are 16 rows further.
    """

    def __init__(self, matmul: MatmulFunction, p: GemmParameters, chunk: int) -> None:
        self._p = p
        self._transposed = matmul.b_transposed
        self._chunk = chunk
        kind = _PTX_TYPES[matmul.input_dtype]
        self._instruction = f"wgmma.mma_async.sync.aligned.m64n{p.block_n}k16.f32.{kind}.{kind}"

    def describe_a(self, descriptor: tirx.Expr, address: tirx.Expr) -> None:
        T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptor), address, 1, 64, 3))

    def describe_b(self, descriptor: tirx.Expr, address: tirx.Expr) -> None:
        row_units = self._chunk * _ELEMENT_BYTES // 16
        fields = (1, 64, 3) if self._transposed else (BLOCK_K * row_units, 8 * row_units, _SWIZZLES[self._chunk])
        T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptor), address, *fields))

    def emit(
        self, accumulators: tirx.Var, base_a: tirx.Expr, base_b: tirx.Expr, stage: tirx.Expr, k_tile: tirx.Expr
    ) -> None:
        p = self._p
        units_a, units_b = (size * BLOCK_K * _ELEMENT_BYTES // 16 for size in (p.block_m, p.block_n))
        step_b = 2 if self._transposed else 16 * self._chunk * _ELEMENT_BYTES // 16
        lanes = p.block_n // 2
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        for step in range(BLOCK_K // 16):
            for block in range(p.block_m // p.consumers // 64):
                offset_a = stage * units_a + block * (64 * BLOCK_K * _ELEMENT_BYTES // 16) + step * 2
                offset_b = stage * units_b + step * step_b
                accumulate = tirx.const(True, "bool") if step else k_tile > 0
                T.evaluate(
                    T.ptx[self._instruction](
                        *(accumulators[block * lanes + lane] for lane in range(lanes)),
                        base_a + tirx.Cast("uint64", offset_a),
                        base_b + tirx.Cast("uint64", offset_b),
                        accumulate, 1, 1, 0, int(not self._transposed),
                    )
                )  # fmt: skip
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
