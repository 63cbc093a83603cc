"""Work of a warp of the kernel of `template.py` on a stage: load fragments, multiply them.

Lane l gives the address of row l % 8 of matrix l / 8 of four that `ldmatrix` loads. Of A these are both halves of 16
rows, at both halves of 16 along K; of B as [N, K] both halves of K of 8 columns, then of the next 8; of B as [K, N] the
same, transposed as they are loaded; of 8 bits, whose fragments lie as those of halves do byte for byte, B is [N, K]. A
step along K moves the chunk of a row, which is an exclusive or of the address: rows start at multiples of their length,
and the pattern of a lane's rows is the same in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.async_copy import COPY_BYTES
from relaxtune.schedules.templates.emit.device_function import device_call
from relaxtune.schedules.templates.emit.registers import add_all, clear
from relaxtune.schedules.templates.emit.tensor_cores import (
    CHUNK,
    FLOAT8_KINDS,
    LDMATRIX_SOURCE,
    chunk_place,
    halves_source,
    mma_function,
    mma_source,
    shared_address,
)
from relaxtune.schedules.templates.gemm_sm80 import multiply_float, multiply_stored
from relaxtune.schedules.templates.gemm_sm80.plan import ROWS, WARP, GemmPlan, fragment_words, is_plain
from relaxtune.schedules.tir.blocks import element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction

# Fragments of a step along K: `a` and `b` are the addresses in a stage.
_LOAD = """
__forceinline__ __device__ void {name}(unsigned* to_a, unsigned* to_b, unsigned a, unsigned b, int step) {{
#pragma unroll
  for (int i = 0; i < {m_steps}; ++i)
    relaxtune_ldmatrix(to_a + 4 * i, (a ^ step * 32) + i * {rows_a_bytes});
#pragma unroll
  for (int j = 0; j < {pairs}; ++j)
    {load_b}
}}
"""
_LOAD_B_ROWS = "relaxtune_ldmatrix(to_b + 4 * j, (b ^ step * 32) + j * {rows_b_bytes});"
_LOAD_B_DEPTHS = """relaxtune_ldmatrix_trans(to_b + 4 * j,
                             (b ^ (2 * j & {mask}) * 16) + (2 * j & ~{mask}) * 16 + step * {rows_b_bytes});"""
# Every other row of instructions goes backwards: two that follow each other share a fragment.
_MULTIPLY = """
__forceinline__ __device__ void {name}({sum}* sums, const unsigned* a, const unsigned* b) {{
#pragma unroll
  for (int i = 0; i < {m_steps}; ++i) {{
#pragma unroll
    for (int step = 0; step < {n_steps}; ++step) {{
      int j = i % 2 ? {n_steps} - 1 - step : step;
      {mma}(sums + (i * {n_steps} + j) * 4, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                           b[2 * j], b[2 * j + 1]);
    }}
  }}
}}
"""
# Of float8. The sum over K has no order: the first instruction takes bytes 0 and 1 of each word, the second the others.
_MULTIPLY_AS_HALVES = """
__forceinline__ __device__ void {name}(float* sums, const unsigned* a, const unsigned* b) {{
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {{
    unsigned w[{words}];
#pragma unroll
    for (int j = 0; j < {words}; ++j)
      w[j] = relaxtune_halves_{b}(b[j] >> 16 * pair);
#pragma unroll
    for (int i = 0; i < {m_steps}; ++i) {{
      unsigned v[4];
#pragma unroll
      for (int part = 0; part < 4; ++part)
        v[part] = relaxtune_halves_{a}(a[4 * i + part] >> 16 * pair);
#pragma unroll
      for (int j = 0; j < {n_steps}; ++j)
        relaxtune_mma_f16(sums + (i * {n_steps} + j) * 4, v[0], v[1], v[2], v[3], w[2 * j], w[2 * j + 1]);
    }}
  }}
}}
"""


class WarpMultiply:
    """Emits the work of a warp into the current IRBuilder: loads of a step's operands, and their multiplication.

    Operands are multiplied by tensor cores, as they are or dequantised, or by fused multiply-adds in float32; each kind
    has functions of its own. `tiles` are the stages of A, of B and, where B is quantised, of its scales in shared
    memory; `accumulators` has 4 sums for each instruction, those of 16 rows one after another.
    """

    def __init__(self, matmul: MatmulFunction, plan: GemmPlan, tiles: Sequence[tirx.Var], thread: tirx.Expr) -> None:
        self._matmul, self._plan, self._tiles = matmul, plan, tiles
        warp, lane, by_rows = thread // WARP, thread % WARP, matmul.b_transposed
        self._words = fragment_words(matmul, plan.m_steps, plan.n_steps)
        self._register = "float32" if is_plain(matmul) else "uint32"
        # The elements of the tiles that a lane starts at; of several in B's tile, those come last.
        self._places: Sequence[tirx.Expr]
        if matmul.stored is not None:
            self._places = multiply_stored.lane_places(matmul.stored, plan, warp, lane)
            self._load = multiply_stored.LOADS + multiply_stored.load_source(matmul.stored, plan)
            source = multiply_stored.PAIRS + multiply_stored.multiply_source(matmul.stored, plan)
            self._multiply = mma_source("float16") + source
        elif is_plain(matmul):
            self._places = multiply_float.lane_places(plan, warp, lane, rows_of_b=by_rows)
            self._load = multiply_float.LOADS + multiply_float.load_source(plan, rows_of_b=by_rows)
            self._multiply = multiply_float.multiply_source(plan, rows_of_b=by_rows)
        else:
            self._places = _lane_places(matmul, plan, warp, lane)
            self._load, self._multiply = _load_source(matmul, plan), _multiply_source(matmul, plan)

    def begin(self) -> None:
        """Emit the addresses of a lane in the first stage, and sums of zero."""
        plan = self._plan
        # Sums in int32 are held as uint32, as for wgmma.
        held = "uint32" if self._matmul.sums == "int32" else "float32"
        self.accumulators = T.alloc_local([plan.accumulators], held)
        clear(self.accumulators)
        # Of float8, what tensor cores sum up is a stage's.
        self._sums = T.alloc_local([plan.accumulators], held) if plan.sums_outside else self.accumulators
        # Two steps along K.
        self._fragments = [T.alloc_local([2 * words], self._register) for words in self._words]
        self._at, last = T.alloc_local([len(self._places)], "uint32"), len(self._tiles) - 1
        self._stage_bytes = [plan.tile_bytes[min(index, last)] for index in range(len(self._places))]
        for index, place in enumerate(self._places):
            T.buffer_store(self._at, shared_address(self._tiles[min(index, last)].ptr_to([0, place])), [index])

    def load(self, half: int, stage: tirx.Expr, step: int) -> None:
        """Emit the loads of a step's operands into one half of the registers for them."""
        at = [self._at[index] + tirx.Cast("uint32", stage * size) for index, size in enumerate(self._stage_bytes)]
        T.evaluate(device_call(self._load, *self._registers(half), *at, tirx.IntImm("int32", step)))

    def multiply(self, step: int) -> None:
        """Emit the multiplication of a step's operands."""
        plan = self._plan
        if plan.sums_outside and step == 0:
            clear(self._sums)
        T.evaluate(device_call(self._multiply, self._sums.ptr_to([0]), *self._registers(step % 2)))
        if plan.sums_outside and step == plan.parameters.block_k // plan.depth - 1:
            add_all(self.accumulators, self._sums)

    def _registers(self, half: int) -> list[tirx.Expr]:
        return [held.ptr_to([half * words]) for held, words in zip(self._fragments, self._words, strict=True)]


def _lane_places(matmul: MatmulFunction, plan: GemmPlan, warp: tirx.Expr, lane: tirx.Expr) -> list[tirx.Expr]:
    p = plan.parameters
    first_row = warp % p.warps_m * (p.block_m // p.warps_m)
    first_column = warp // p.warps_m * (p.block_n // p.warps_n)
    each = COPY_BYTES // element_bytes(matmul.input_dtype)
    half, depths = lane // 16, p.block_k // each
    if matmul.b_transposed:
        b = chunk_place(first_column + lane % 8 + half * 8, lane // 8 % 2, depths, each)
    else:
        b = chunk_place(lane % 16, first_column // CHUNK + half, p.block_n // CHUNK, each)
    return [chunk_place(first_row + lane % 16, half, depths, each), b]


def _load_source(matmul: MatmulFunction, plan: GemmPlan) -> str:
    p, size = plan.parameters, element_bytes(matmul.input_dtype)
    depth_bytes = p.block_k * size
    if matmul.b_transposed:
        load_b = _LOAD_B_ROWS.format(rows_b_bytes=ROWS * depth_bytes)
    else:
        mask = min(p.block_n // CHUNK, 8) - 1
        load_b = _LOAD_B_DEPTHS.format(mask=mask, rows_b_bytes=ROWS * p.block_n * size)
    kind = "rows" if matmul.b_transposed else "depths"
    name = f"relaxtune_fragments_{kind}_{depth_bytes}_{p.block_n}_{plan.m_steps}_{plan.n_steps}"
    sizes = {"m_steps": plan.m_steps, "rows_a_bytes": ROWS * depth_bytes, "pairs": plan.n_steps // 2}
    return LDMATRIX_SOURCE + _LOAD.format(name=name, load_b=load_b, **sizes)


def _multiply_source(matmul: MatmulFunction, plan: GemmPlan) -> str:
    mma, source = mma_function(matmul.input_dtype, matmul.b_dtype)
    name = f"{mma.replace('mma', 'multiply')}_{plan.m_steps}_{plan.n_steps}"
    sizes = {"name": name, "m_steps": plan.m_steps, "n_steps": plan.n_steps}
    if matmul.input_dtype in FLOAT8_KINDS and not plan.sums_outside:
        a, b = (FLOAT8_KINDS[dtype] for dtype in (matmul.input_dtype, matmul.b_dtype))
        source = mma_source("float16") + halves_source(a) + halves_source(b)
        return source + _MULTIPLY_AS_HALVES.format(a=a, b=b, words=2 * plan.n_steps, **sizes)
    return source + _MULTIPLY.format(sum="unsigned" if matmul.sums == "int32" else "float", mma=mma, **sizes)
