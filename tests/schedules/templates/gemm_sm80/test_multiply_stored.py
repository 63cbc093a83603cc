"""Quantised weights in a warp, on the CPU: the kernel's own source, over shared memory as its copies lay it out.

What the source asks of a GPU is written for a processor; the tensor cores note their operands, and NumPy multiplies
these as PTX ISA 9.0 has it for mma.m16n8k16.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.emit.device_function import last_function
from relaxtune.schedules.templates.emit.tensor_cores import chunk_place
from relaxtune.schedules.templates.gemm_sm80.multiply_stored import lane_places, load_source, multiply_source
from relaxtune.schedules.templates.gemm_sm80.plan import (
    STORED_DEPTH,
    GemmParameters,
    GemmPlan,
    chunks_together,
    make_plan,
)
from relaxtune.schedules.templates.gemm_sm80.template import STORED_TILES
from relaxtune.schedules.templates.matmul_by_rows import recognise_matmul_by_rows
from relaxtune.schedules.tir.epilogue import Quantisation
from tests.schedules.templates.gemm_sm80.warp_on_cpu import compiled, constant, laid_out, of, pointer
from tests.schedules.templates.gemv_cases import GemvCase

_HOST = """
#include <string.h>
#define __forceinline__ static inline
#define __device__
static const char* shared;
static unsigned* noted;
static inline void relaxtune_load_words_4(unsigned* r, unsigned at) { memcpy(r, shared + at, 16); }
static inline void relaxtune_load_words_2(unsigned* r, unsigned at) { memcpy(r, shared + at, 8); }
static inline void relaxtune_load_words_1(unsigned* r, unsigned at) { memcpy(r, shared + at, 4); }
static inline void relaxtune_load_twice(unsigned* r, unsigned at) {
  memcpy(r, shared + at, 2);
  memcpy((char*)r + 2, shared + at, 2);
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned places) {
  unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned made = 0;
  for (int i = 0; i < 4; ++i) made |= (unsigned)(bytes >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
  return made;
}
typedef _Float16 half;
#define PAIRWISE(expression)                                                                      \\
  half x[2], y[2], z[2], d[2];                                                                    \\
  unsigned made;                                                                                  \\
  memcpy(x, &a, 4); memcpy(y, &b, 4); memcpy(z, &c, 4);                                           \\
  for (int i = 0; i < 2; ++i) d[i] = (half)(expression);                                          \\
  memcpy(&made, d, 4);                                                                            \\
  return made;
static inline unsigned relaxtune_pair_fma(unsigned a, unsigned b, unsigned c) {
  PAIRWISE((double)x[i] * (double)y[i] + (double)z[i])
}
static inline unsigned relaxtune_pair_product(unsigned a, unsigned b) {
  unsigned c = 0;
  PAIRWISE((double)x[i] * (double)y[i])
}
static inline unsigned relaxtune_pair_sum(unsigned a, unsigned b) {
  unsigned c = 0;
  PAIRWISE((double)x[i] + (double)y[i])
}
static inline void relaxtune_mma_f16(float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                     unsigned b1) {
  unsigned operands[6] = {a0, a1, a2, a3, b0, b1};
  // The first sum tells where they are; its value is where the tile of sums starts.
  memcpy(noted, operands, 24);
  noted[6] = (unsigned)sums[0];
  noted += 7;
}
"""
_LANE = """
extern "C" void lane_{number}(const char* memory, const unsigned* at, int step, float* sums, unsigned* notes) {{
  unsigned a[{words}], b[{words}], s[{words}];
  shared = memory;
  noted = notes;
  {load}(a, b, s, at[0], at[1], at[2], step);
  {multiply}(sums, a, b, s);
}}
"""
PLANS = [(tile, bits, group) for tile in STORED_TILES[:10] for bits, group in ((4, 32), (8, 128))]


def plan_of(tile: tuple[int, ...], bits: int, group: int) -> tuple[Quantisation, GemmPlan]:
    m, n, k, warps_m, warps_n = tile
    matmul = recognise_matmul_by_rows(GemvCase((256,), 256, 256, bits, group).func())
    plan = make_plan(matmul, GemmParameters(m, n, k, 2, warps_m, warps_n), cuda_limits(resolve_target("cuda:sm_80")))
    assert isinstance(plan, GemmPlan), plan
    assert matmul.stored is not None
    return matmul.stored, plan


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the functions of all plans, compiled for this processor."""
    parts = [_HOST]
    for number, case in enumerate(PLANS):
        stored, plan = plan_of(*case)
        sources = load_source(stored, plan), multiply_source(stored, plan)
        load, multiply = (last_function(source)[1] for source in sources)
        parts += [source for source in sources if source not in parts]
        words = 16 * max(plan.m_steps, plan.n_steps)
        parts.append(_LANE.format(number=number, words=words, load=load, multiply=multiply))
    return compiled("\n".join(parts), tmp_path_factory.mktemp("lanes"))


@pytest.mark.parametrize("number", range(len(PLANS)), ids=[f"{tile}, {bits} bits" for tile, bits, _ in PLANS])
def test_a_warp_multiplies_its_rows_by_the_weights_that_the_function_names(lanes: ctypes.CDLL, number: int) -> None:
    bits, (stored, plan) = PLANS[number][1], plan_of(*PLANS[number])
    p, rng = plan.parameters, np.random.default_rng(number)
    a = rng.standard_normal((p.block_m, p.block_k)).astype(np.float16)
    levels = rng.integers(0, 2**bits, (p.block_n, p.block_k), dtype=np.uint8)
    scales = rng.uniform(1e-3, 1e-2, (plan.scale_rows, p.block_n)).astype(np.float16)
    packed = levels if bits == 8 else levels[:, ::2] | levels[:, 1::2] << 4
    tiles = laid_out(a, chunks_together(16)), laid_out(packed, chunks_together(bits)), scales.ravel()
    assert tuple(tile.nbytes for tile in tiles) == plan.tile_bytes
    starts = (0, tiles[0].nbytes, tiles[0].nbytes + tiles[1].nbytes)
    memory = np.concatenate([tile.view(np.uint8) for tile in tiles])
    of_each = scales.repeat(p.block_k // plan.scale_rows, axis=0).T.astype(np.float32)
    weight = ((levels.astype(np.float32) - 2 ** (bits - 1)) * of_each).astype(np.float16)
    warp = p.warps_m * p.warps_n - 1
    row, column = warp % p.warps_m * 16 * plan.m_steps, warp // p.warps_m * 8 * plan.n_steps
    for step in range(p.block_k // STORED_DEPTH):
        notes = np.zeros((32, 2 * plan.m_steps * plan.n_steps, 7), np.uint32)
        for lane in range(32):
            places = lane_places(stored, plan, of(warp), of(lane))
            # Elements of two bytes, of one, of two.
            at = np.array(
                [start + size * constant(one) for start, size, one in zip(starts, (2, 1, 2), places, strict=True)],
                np.uint32,
            )
            sums = np.arange(plan.accumulators, dtype=np.float32)
            getattr(lanes, f"lane_{number}")(pointer(memory), pointer(at), step, pointer(sums), pointer(notes[lane]))
        found = np.zeros((16 * plan.m_steps, 8 * plan.n_steps))
        for note in notes.transpose(1, 0, 2):
            i, j = divmod(int(note[0, 6]) // 4, plan.n_steps)
            # Lane 4 g + c: of A rows g and g + 8, of B column g, pairs c and c + 4 of 16 along K.
            halves = np.ascontiguousarray(note[:, :6]).view(np.float16).reshape(8, 4, 6, 2).astype(np.float64)
            left = np.concatenate([halves[:, :, [0, 2]], halves[:, :, [1, 3]]]).transpose(0, 2, 1, 3).reshape(16, 16)
            right = halves[:, :, 4:].transpose(0, 2, 1, 3).reshape(8, 16)
            found[16 * i : 16 * i + 16, 8 * j : 8 * j + 8] += left @ right.T
        part = slice(step * STORED_DEPTH, (step + 1) * STORED_DEPTH)
        rows, columns = slice(row, row + len(found)), slice(column, column + found.shape[1])
        right = a[rows, part].astype(np.float64) @ weight[columns, part].astype(np.float64).T
        np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("width", "together", "rows"), [(8, 4, 2), (4, 2, 4), (2, 1, 8)])
def test_rows_that_are_read_together_lie_in_different_banks(width: int, together: int, rows: int) -> None:
    for first in range(0, 16, rows):
        for part in range(0, width, together):
            places = [
                constant(chunk_place(of(first + row), of(part + chunk), width, together=together)) // 8 % 8
                for row in range(rows)
                for chunk in range(together)
            ]
            assert sorted(places) == list(range(8))
