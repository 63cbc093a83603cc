"""A time to order the candidates of `template.py` by: the first is taken where nothing was measured.

It is what each of five things would take alone, in a sum that leans to the longest, and what comes on top::

    (arithmetic^4 + shared memory^4 + dequantisation^4 + memory^4 + chain^4)^(1/4) + blocks, one after another

`chain` is one step along K after another: a warp's own instructions, or the latency of loads as far as the ring does
not hide it. Constants are a fit (10 % root mean square) to 72 medians of an H200 without its wgmma. For another GPU,
clock, bandwidth and multiply-adds are scaled by what `schedules.targets.gpus` states of both: that is on paper, since
none was measured.
"""

from __future__ import annotations

import math

from relaxtune.schedules.targets import CudaLimits
from relaxtune.schedules.targets.gpus import H200
from relaxtune.schedules.templates.emit.tensor_cores import FLOAT8_KINDS
from relaxtune.schedules.templates.gemm_sm80.plan import COLUMNS, ROWS, GemmPlan, is_plain
from relaxtune.schedules.tir.blocks import element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction

_NORM = 4
# Cycles a microsecond; multiply-adds and bytes of shared memory of a multiprocessor in a cycle.
_CLOCK = 1700.0
_MULTIPLY_ADDS = 890.0
# In float32, by the threads themselves: four schedulers of 32 lanes, less what loads and addresses take of them.
_FLOAT_MULTIPLY_ADDS = 110.0
_SHARED_BYTES = 128.0
# A multiprocessor has as many schedulers, each with tensor cores of its own.
_SCHEDULERS = 4
# Cycles of an instruction of a warp beside those of its arithmetic, for each step along K.
_STEP_CYCLES = 40.0
# A scheduler's, to make 8 weights of a lane of 4 or 8 bits: 4 pairs by 4 instructions, some at half the rate (counted,
# not measured).
_UNPACK_CYCLES = 24.0
# From memory, in a microsecond.
_MEMORY_BYTES = 3.7e6
_LATENCY_US = 1.2
_START_US, _BLOCK_US = 1.9, 0.6


def predicted_us(matmul: MatmulFunction, plan: GemmPlan, limits: CudaLimits) -> float:
    """Return a kernel's time in microseconds as the model has it."""
    p, sm_count = plan.parameters, limits.likely_sm_count
    blocks = plan.tiles_m * plan.tiles_n * p.split_k
    resident = limits.resident_blocks(plan.threads, plan.registers, plan.shared_bytes)
    on_one = math.ceil(blocks / sm_count)
    together = min(on_one, resident)
    in_turn = math.ceil(blocks / (sm_count * resident))
    warps = plan.threads // 32
    steps, depth, element = plan.k_tiles * p.block_k // plan.depth, plan.depth, element_bytes(matmul.input_dtype)
    weight = matmul.weight_bits / 8
    # Of operands of half the bytes, twice as many; but of float8 as halves, as many as of halves.
    as_halves = matmul.input_dtype in FLOAT8_KINDS and not plan.sums_outside
    gpu = limits.gpu or H200
    clock, bandwidth = _CLOCK * gpu.clock_mhz / H200.clock_mhz, _MEMORY_BYTES * gpu.bandwidth_gb_s / H200.bandwidth_gb_s
    rate = _MULTIPLY_ADDS * gpu.multiply_adds / H200.multiply_adds * (1 if as_halves else 2 / element)
    if is_plain(matmul):
        rate = _FLOAT_MULTIPLY_ADDS * gpu.float_multiply_adds / H200.float_multiply_adds
    # A scheduler without a warp does nothing.
    used = min(1.0, together * warps / _SCHEDULERS)
    arithmetic = on_one * steps * p.block_m * p.block_n * depth / rate / used
    rows, columns = warps * plan.m_steps * ROWS + p.block_m, warps * plan.n_steps * COLUMNS + p.block_n
    shared = on_one * steps * (rows * element + columns * weight) * depth / _SHARED_BYTES
    # A lane dequantises 8 weights of each 8 columns and 32 of K.
    unpacked = on_one * steps * warps / _SCHEDULERS * plan.n_steps * _UNPACK_CYCLES / used if matmul.stored else 0.0
    own = plan.m_steps * plan.n_steps * ROWS * COLUMNS * depth / (rate / _SCHEDULERS)
    chain = max(
        in_turn * steps * (own + _STEP_CYCLES) / clock,
        in_turn * plan.k_tiles * _LATENCY_US / max(1, p.stages - 1),
    )
    moved = (matmul.m * matmul.k + matmul.m * matmul.n) * element + matmul.n * matmul.k * weight
    parts = (arithmetic / clock, shared / clock, unpacked / clock, moved / bandwidth, chain)
    longest: float = sum(part**_NORM for part in parts) ** (1 / _NORM)
    return longest + _START_US + in_turn * _BLOCK_US
