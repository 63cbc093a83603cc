"""Work of a warp of the kernel of `template.py` on a stage in float32: load rows, multiply by fused multiply-adds.

A thread has the sums that an instruction of 16 x 8 would give it, so that the output is written in the same way. Lane l
has, of each 8 rows, row l / 4, and of each 8 columns, columns 2 * (l % 4) and the next. A step is a chunk of 16 bytes
along K: 4 elements of each row of A; of B as [N, K] the same of each column, of B as [K, N] pairs of columns of 4 rows.
Chunks of a row have changed places by an exclusive or, which a step is too, as for `multiply.py`.
"""

from __future__ import annotations

from tvm import tirx

from relaxtune.schedules.templates.emit.tensor_cores import chunk_place
from relaxtune.schedules.templates.gemm_sm80.plan import COLUMNS, FLOAT_DEPTH, ROWS, GemmPlan

_BYTES = 4
# Of 8 rows; the pattern of chunks is the same in the next 8.
_HALF = ROWS // 2
# `a`, `b` and `c` are addresses in a stage: of a lane's first row, of its first column, and of the column beside that.
_LOAD = """
__forceinline__ __device__ void {name}(float* to_a, float* to_b, unsigned a, unsigned b, unsigned c, int step) {{
#pragma unroll
  for (int i = 0; i < {rows}; ++i)
    relaxtune_load_4(to_a + 4 * i, (a ^ step * 16) + i * {rows_a_bytes});
#pragma unroll
  for (int j = 0; j < {n_steps}; ++j) {{
    {load_b}
  }}
}}
"""
LOADS = """
#ifndef RELAXTUNE_LOAD_FLOATS
#define RELAXTUNE_LOAD_FLOATS
__forceinline__ __device__ void relaxtune_load_4(float* r, unsigned at) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3]) : "r"(at) : "memory");
}
__forceinline__ __device__ void relaxtune_load_2(float* r, unsigned at) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r[0]), "=f"(r[1]) : "r"(at) : "memory");
}
#endif
"""
_LOAD_B_ROWS = """relaxtune_load_4(to_b + 8 * j, (b ^ step * 16) + j * {rows_b_bytes});
    relaxtune_load_4(to_b + 8 * j + 4, (c ^ step * 16) + j * {rows_b_bytes});"""
_LOAD_B_DEPTHS = """#pragma unroll
    for (int k = 0; k < 4; ++k)
      relaxtune_load_2(to_b + 8 * j + 2 * k, (b ^ ((2 * j ^ (step * 4 + k)) & 7) * 16) + (j & ~3) * 32
                                                 + (step * 4 + k) * {rows_b_bytes});"""
_MULTIPLY = """
__forceinline__ __device__ void {name}(float* sums, const float* a, const float* b) {{
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int i = 0; i < {rows}; ++i)
#pragma unroll
      for (int j = 0; j < {n_steps}; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {{
          float* sum = sums + (i / 2 * {n_steps} + j) * 4 + i % 2 * 2 + e;
          *sum = fmaf(a[4 * i + k], b[8 * j + {element}], *sum);
        }}
}}
"""


def lane_places(plan: GemmPlan, warp: tirx.Expr, lane: tirx.Expr, *, rows_of_b: bool) -> list[tirx.Expr]:
    """Return the elements of the tiles that a lane starts at: its row of A, its column of B, and the one beside it."""
    p = plan.parameters
    row = warp % p.warps_m * (p.block_m // p.warps_m) + lane // 4
    column = warp // p.warps_m * (p.block_n // p.warps_n) + lane % 4 * 2
    width, none = p.block_k // FLOAT_DEPTH, tirx.IntImm("int32", 0)
    columns = [column, column + 1]
    if rows_of_b:
        columns = [chunk_place(one, none, width, FLOAT_DEPTH) for one in columns]
    return [chunk_place(row, none, width, FLOAT_DEPTH), *columns]


def load_source(plan: GemmPlan, *, rows_of_b: bool) -> str:
    """Return the source of the function that loads a step's elements; `LOADS` stands before it."""
    p = plan.parameters
    depth_bytes = p.block_k * _BYTES
    rows_b_bytes = COLUMNS * depth_bytes if rows_of_b else p.block_n * _BYTES
    load_b = (_LOAD_B_ROWS if rows_of_b else _LOAD_B_DEPTHS).format(rows_b_bytes=rows_b_bytes)
    kind = "rows" if rows_of_b else "depths"
    name = f"relaxtune_floats_{kind}_{p.block_k}_{p.block_n}_{plan.m_steps}_{plan.n_steps}"
    sizes = {"rows": 2 * plan.m_steps, "rows_a_bytes": _HALF * depth_bytes, "n_steps": plan.n_steps}
    return _LOAD.format(name=name, load_b=load_b, **sizes)


def multiply_source(plan: GemmPlan, *, rows_of_b: bool) -> str:
    """Return the source of the function that multiplies a step's elements."""
    kind, element = ("rows", "4 * e + k") if rows_of_b else ("depths", "2 * k + e")
    name = f"relaxtune_multiply_floats_{kind}_{plan.m_steps}_{plan.n_steps}"
    return _MULTIPLY.format(name=name, rows=2 * plan.m_steps, n_steps=plan.n_steps, element=element)
