"""Work of a warp of the kernel of `template.py` on a stage where B is quantised: load, dequantise, multiply.

A step is 32 along K: two instructions. The sum over K has no order, so a lane takes 8 neighbours along K for the places
that these have for it (PTX ISA 9.0, "Matrix Fragments for mma.m16n8k16"): lane 4 g + c has places 8 c to 8 c + 7 of
rows g and g + 8 of A, 16 bytes each, and of column g of B, 4 bytes of 4 bits or 8 of 8 bits. Chunks of a row have
changed places so that rows that are read together lie in different banks (`tensor_cores.swizzle`).

Levels become halves without a conversion. A byte goes into both halves of a word, a mask leaves the even level in the
lower one and the odd level, 16 times, in the upper one; with the exponent of 1024 these are 1024 + level and 1024 + 16
level, exactly, and one multiply-add makes both level - 8. Bytes of 8 bits go beside the exponent as they are. The
product by the scale is rounded once: weights are those that a kernel of its own would have written.
"""

from __future__ import annotations

from tvm import tirx

from relaxtune.schedules.templates.emit.tensor_cores import CHUNK, chunk_place
from relaxtune.schedules.templates.gemm_sm80.plan import COLUMNS, ROWS, STORED_DEPTH, GemmPlan, chunks_together
from relaxtune.schedules.tir.epilogue import Quantisation

_A_BYTES, _SCALE_BYTES, _CHUNK_BYTES = 2, 2, 16
# Of 16 rows of A, those of one load of all lanes.
_HALF = ROWS // 2
LOADS = """
#ifndef RELAXTUNE_LOAD_WORDS
#define RELAXTUNE_LOAD_WORDS
__forceinline__ __device__ void relaxtune_load_words_4(unsigned* r, unsigned at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__forceinline__ __device__ void relaxtune_load_words_2(unsigned* r, unsigned at) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
}
__forceinline__ __device__ void relaxtune_load_words_1(unsigned* r, unsigned at) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r[0]) : "r"(at) : "memory");
}
// A half, twice.
__forceinline__ __device__ void relaxtune_load_twice(unsigned* r, unsigned at) {
  asm volatile("{ .reg .b16 one; ld.shared.b16 one, [%1]; mov.b32 %0, {one, one}; }" : "=r"(r[0]) : "r"(at) : "memory");
}
#endif
"""
PAIRS = """
#ifndef RELAXTUNE_PAIRS
#define RELAXTUNE_PAIRS
__forceinline__ __device__ unsigned relaxtune_pair_product(unsigned a, unsigned b) {
  unsigned d; asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d;
}
__forceinline__ __device__ unsigned relaxtune_pair_sum(unsigned a, unsigned b) {
  unsigned d; asm("add.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d;
}
__forceinline__ __device__ unsigned relaxtune_pair_fma(unsigned a, unsigned b, unsigned c) {
  unsigned d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d;
}
#endif
"""
# `a`, `b` and `s` are addresses in a stage: of a lane's first row of A, of its first column of B, and of its scale.
_LOAD = """
__forceinline__ __device__ void {name}(unsigned* to_a, unsigned* to_b, unsigned* to_s, unsigned a, unsigned b,
                                       unsigned s, int step) {{
#pragma unroll
  for (int i = 0; i < {rows}; ++i)
    relaxtune_load_words_4(to_a + 4 * i, (a ^ step * {step_a_bytes}) + i * {rows_a_bytes});
#pragma unroll
  for (int j = 0; j < {n_steps}; ++j) {{
    relaxtune_load_words_{words}(to_b + {words} * j, (b ^ step * {step_b_bytes}) + j * {rows_b_bytes});
    relaxtune_load_twice(to_s + j, s + step * {step_s_bytes} + j * {columns_s_bytes});
  }}
}}
"""
# 8 weights of a lane, as 4 pairs: of byte p of a word, then of bytes 2 p and 2 p + 1 of two.
_WEIGHTS = {
    4: "relaxtune_pair_fma(__byte_perm(b[j], 0u, 0x4040 + 0x101 * p) & 0x00f0000fu | 0x64006400u, 0x2c003c00u,"
    " 0xd480e408u)",
    8: "relaxtune_pair_sum(__byte_perm(b[2 * j + p / 2], 0x64646464u, p % 2 ? 0x4342 : 0x4140), 0xe480e480u)",
}
_MULTIPLY = """
__forceinline__ __device__ void {name}(float* sums, const unsigned* a, const unsigned* b, const unsigned* s) {{
#pragma unroll
  for (int j = 0; j < {n_steps}; ++j) {{
    unsigned w[4];
#pragma unroll
    for (int p = 0; p < 4; ++p)
      w[p] = relaxtune_pair_product({weight}, s[j]);
#pragma unroll
    for (int p = 0; p < 4; p += 2)
#pragma unroll
      for (int i = 0; i < {m_steps}; ++i)
        relaxtune_mma_f16(sums + (i * {n_steps} + j) * 4, a[8 * i + p], a[8 * i + 4 + p], a[8 * i + p + 1],
                          a[8 * i + 5 + p], w[p], w[p + 1]);
  }}
}}
"""


def lane_places(stored: Quantisation, plan: GemmPlan, warp: tirx.Expr, lane: tirx.Expr) -> tuple[tirx.Expr, ...]:
    """Return the elements of a stage's tiles that a lane starts at: of A (halves), of B (bytes), of scales (halves)."""
    p, bits = plan.parameters, stored.bits
    row = warp % p.warps_m * (p.block_m // p.warps_m) + lane // 4
    column = warp // p.warps_m * (p.block_n // p.warps_n) + lane // 4
    part = lane % 4
    in_row = chunk_place(row, part, p.block_k // CHUNK, together=chunks_together(16))
    width = p.block_k * bits // 8 // _CHUNK_BYTES
    chunk = chunk_place(column, part * bits // _CHUNK_BYTES, width, _CHUNK_BYTES, together=chunks_together(bits))
    return in_row, chunk + part * bits % _CHUNK_BYTES, column


def load_source(stored: Quantisation, plan: GemmPlan) -> str:
    """Return the source of the function that loads a step's operands; `LOADS` stands before it."""
    p, bits = plan.parameters, stored.bits
    name = f"relaxtune_stored_{bits}_{p.block_k}_{p.block_n}_{plan.m_steps}_{plan.n_steps}_{plan.scale_rows}"
    return _LOAD.format(
        name=name,
        rows=2 * plan.m_steps,
        n_steps=plan.n_steps,
        words=bits // 4,
        step_a_bytes=STORED_DEPTH * _A_BYTES,
        rows_a_bytes=_HALF * p.block_k * _A_BYTES,
        step_b_bytes=STORED_DEPTH * bits // 8,
        rows_b_bytes=COLUMNS * p.block_k * bits // 8,
        step_s_bytes=p.block_n * _SCALE_BYTES if plan.scale_rows > 1 else 0,
        columns_s_bytes=COLUMNS * _SCALE_BYTES,
    )


def multiply_source(stored: Quantisation, plan: GemmPlan) -> str:
    """Return the source of the function that multiplies a step's operands; `PAIRS` stands before it."""
    name = f"relaxtune_multiply_stored_{stored.bits}_{plan.m_steps}_{plan.n_steps}"
    weight = _WEIGHTS[stored.bits]
    return _MULTIPLY.format(name=name, weight=weight, m_steps=plan.m_steps, n_steps=plan.n_steps)
