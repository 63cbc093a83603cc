"""The sums of a warp in float32, on the CPU: the kernel's own source, over shared memory as its copies lay it out."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.emit.device_function import last_function
from relaxtune.schedules.templates.gemm_sm80.multiply_float import lane_places, load_source, multiply_source
from relaxtune.schedules.templates.gemm_sm80.plan import GemmParameters, GemmPlan, make_plan
from relaxtune.schedules.templates.gemm_sm80.template import FLOAT_TILES
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.gemm_sm80.warp_on_cpu import compiled, constant, laid_out, of, pointer
from tests.schedules.templates.matmul_cases import MatmulCase

# What the source asks of a GPU, for a processor: addresses are bytes into `shared`.
_HOST = """
#include <math.h>
#include <string.h>
#define __forceinline__ static inline
#define __device__
static const char* shared;
static inline void relaxtune_load_4(float* r, unsigned at) { memcpy(r, shared + at, 16); }
static inline void relaxtune_load_2(float* r, unsigned at) { memcpy(r, shared + at, 8); }
"""
_LANE = """
extern "C" void lane_{number}(const char* memory, const unsigned* at, int steps, float* sums) {{
  float a[{words}], b[{words}];
  shared = memory;
  for (int step = 0; step < steps; ++step) {{
    {load}(a, b, at[0], at[1], at[2], step);
    {multiply}(sums, a, b);
  }}
}}
"""
PLANS = [(tile, transposed) for tile in FLOAT_TILES for transposed in (False, True)]


def plan_of(tile: tuple[int, ...], transposed: bool) -> GemmPlan:
    m, n, k, warps_m, warps_n = tile
    matmul = recognise_matmul(MatmulCase((256,), 256, 64, (), "float32", "float32", transposed).func())
    plan = make_plan(matmul, GemmParameters(m, n, k, 2, warps_m, warps_n), cuda_limits(resolve_target("cuda:sm_86")))
    assert isinstance(plan, GemmPlan), plan
    return plan


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the functions of all plans, compiled for this processor."""
    parts = [_HOST]
    for number, (tile, transposed) in enumerate(PLANS):
        plan = plan_of(tile, transposed)
        sources = load_source(plan, rows_of_b=transposed), multiply_source(plan, rows_of_b=transposed)
        load, multiply = (last_function(source)[1] for source in sources)
        parts += [source for source in sources if source not in parts]
        words = 8 * max(plan.m_steps, plan.n_steps)
        parts.append(_LANE.format(number=number, words=words, load=load, multiply=multiply))
    return compiled("\n".join(parts), tmp_path_factory.mktemp("lanes"))


@pytest.mark.parametrize("number", range(len(PLANS)), ids=[f"{tile}{' [N, K]' * turned}" for tile, turned in PLANS])
def test_lanes_multiply_their_rows_and_columns(lanes: ctypes.CDLL, number: int) -> None:
    plan, (_, transposed) = plan_of(*PLANS[number]), PLANS[number]
    p, rng = plan.parameters, np.random.default_rng(number)
    a, b = (rng.standard_normal((rows, p.block_k)).astype(np.float32) for rows in (p.block_m, p.block_n))
    tiles = (laid_out(a, 1), laid_out(b if transposed else b.T, 1))
    memory, starts = np.concatenate(tiles), (0, tiles[0].size, tiles[0].size)
    assert not np.isnan(memory).any()
    product = a.astype(np.float64) @ b.T.astype(np.float64)
    for warp in (0, plan.threads // 32 - 1):
        for lane in range(32):
            places = lane_places(plan, of(warp), of(lane), rows_of_b=transposed)
            at = np.array([4 * (constant(one) + start) for one, start in zip(places, starts, strict=True)], np.uint32)
            sums = np.zeros(plan.accumulators, np.float32)
            call = getattr(lanes, f"lane_{number}")
            call(pointer(memory), pointer(at), p.block_k // 4, pointer(sums))
            row = warp % p.warps_m * (p.block_m // p.warps_m) + lane // 4
            column = warp // p.warps_m * (p.block_n // p.warps_n) + lane % 4 * 2
            rows = row + 8 * np.arange(2 * plan.m_steps)
            columns = column + np.add.outer(8 * np.arange(plan.n_steps), np.arange(2))
            # 4 sums of each 16 x 8: both columns of the row, then those of the row 8 below.
            right = (
                product[rows[:, None, None], columns].reshape(plan.m_steps, 2, plan.n_steps, 2).transpose(0, 2, 1, 3)
            )
            np.testing.assert_allclose(sums, right.ravel(), rtol=1e-4, atol=1e-4)
