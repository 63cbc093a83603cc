"""The GEMM template with 8-bit operands: what it takes, its machine code, and its results on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.float8 import float8_array
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.targets import CudaLimits, resolve_target
from relaxtune.schedules.templates.gemm_sm90.plan import DTYPES, GemmParameters, GemmPlan, make_plan, operands_of
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.cubin import (
    LOCAL_LOAD,
    LOCAL_STORE,
    MMA_SYNC,
    TMA_LOAD,
    TMA_LOAD_MULTICAST,
    WARPGROUP,
    WGMMA,
    WGMMA_FLOAT8,
    WGMMA_INTEGER,
    Cubin,
    captured_cubins,
    read_cubin,
)
from tests.schedules.templates.eightbit_cases import EXACT, FLOATS, INTEGERS, expected, poisoned, random_inputs
from tests.schedules.templates.matmul_cases import MatmulCase

TARGET = resolve_target("cuda:sm_90a")
LARGE = replace(INTEGERS, rows=(4096,), n=3072, k=768, epilogue=("dequantised", "bias", "gelu"), output="float16")
BYTES = replace(LARGE, epilogue=("corrected", "dequantised", "bias", "gelu", "requantised"), output="uint8")
FLOAT8 = MatmulCase((4096,), 3072, 768, ("bias", "gelu"), dtype="float8_e4m3fn", transposed=True)
SMALL = GemmParameters(64, 64, 4, 1)
needs_hopper = pytest.mark.skipif(
    not tvm.cuda(0).exist or str(tvm.cuda(0).compute_version) != "9.0", reason="needs a GPU of compute capability 9.0"
)


def plan(case: MatmulCase, parameters: GemmParameters) -> GemmPlan | Refusal:
    matmul = recognise_matmul(case.func())
    assert isinstance(matmul, MatmulFunction)
    return make_plan(matmul, parameters, CudaLimits(227 * 1024, 132))


@cache
def assert_reference_agrees(small: MatmulCase) -> None:
    """Check NumPy against the function itself, built for the CPU."""
    arrays = random_inputs(small, np.random.default_rng(1))
    tensors = [tvm.runtime.tensor(array) for array in (*arrays, poisoned(small))]
    module = tvm.IRModule({"main": small.func().with_attr("global_symbol", "main")})
    tvm.compile(module, target="llvm")["main"](*tensors)
    np.testing.assert_array_equal(tensors[-1].numpy(), expected(small, arrays))


@pytest.mark.parametrize(("case", "parameters"), EXACT.values(), ids=EXACT.keys())
def test_integer_case_can_be_made_and_its_reference_is_right(case: MatmulCase, parameters: GemmParameters) -> None:
    assert isinstance(GemmSm90().apply(case.func(), TARGET, parameters), tvm.tirx.PrimFunc)
    assert_reference_agrees(replace(case, rows=(3, 2)[: len(case.rows)], n=32, k=16))


@pytest.mark.parametrize(("case", "parameters"), FLOATS.values(), ids=FLOATS.keys())
def test_float8_case_can_be_made(case: MatmulCase, parameters: GemmParameters) -> None:
    assert isinstance(GemmSm90().apply(case.func(), TARGET, parameters), tvm.tirx.PrimFunc)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (replace(INTEGERS, k=200), "K is 200, expected a multiple of 16 (TMA strides are multiples of 16 bytes)"),
        (replace(INTEGERS, k=211), "K is 211, expected a multiple of 16"),
        (replace(INTEGERS, k=1), "K is 1, expected a multiple of 16"),
        (replace(INTEGERS, transposed=False), "B of int8 is [K, N], expected [N, K]"),
        (replace(FLOAT8, transposed=False), "B of float8_e4m3fn is [K, N], expected [N, K]"),
        (replace(FLOAT8, k=776), "K is 776, expected a multiple of 16"),
        (replace(INTEGERS, dtype_b="int16"), "the operands' dtypes differ: ['int16', 'int8']"),
        (replace(INTEGERS, accumulator="float32"), "the accumulator is float32, the operands are int8"),
        (replace(INTEGERS, dtype="float16"), "the accumulator is int32, the operands are float16"),
        (replace(FLOAT8, dtype_b="int8"), "the operands' dtypes differ"),
        (replace(FLOAT8, output="int8"), "the output is int8, expected one of float16, bfloat16, float32"),
        (replace(LARGE, output="int16"), "the output is int16"),
    ],
)
def test_others_are_refused_with_the_reason(case: MatmulCase, message: str) -> None:
    for found in (GemmSm90().candidates(case.func(), TARGET), GemmSm90().apply(case.func(), TARGET, SMALL)):
        assert isinstance(found, Refusal)
        assert message in found.reason


def test_operands_that_wgmma_does_not_multiply_are_refused() -> None:
    for a, b in (("int8", "float8_e4m3fn"), ("float16", "bfloat16"), ("float32", "float32")):
        assert isinstance(operands_of(a, b, transposed=True), Refusal)
    assert all(not isinstance(operands_of(dtype, dtype, transposed=True), Refusal) for dtype in DTYPES)


def test_a_stage_holds_as_many_bytes_of_k_as_of_16_bits() -> None:
    found = plan(INTEGERS, SMALL)
    assert isinstance(found, GemmPlan)
    assert (found.operands.block_k, found.k_tiles, found.stage_bytes) == (128, 2, (64 + 64) * 128)


def test_tiles_wider_than_an_instruction_of_integers_are_two() -> None:
    assert plan(INTEGERS, replace(SMALL, block_n=224)).columns == 224
    assert plan(INTEGERS, replace(SMALL, block_n=256)).columns == 128
    refused = plan(INTEGERS, replace(SMALL, block_n=240))
    assert isinstance(refused, Refusal)
    assert "block_n is 240, but neither all nor half of it is an N of wgmma for int8" in refused.reason


def test_exact_sums_of_float8_take_twice_the_registers() -> None:
    case = FLOATS["plain"][0]
    assert plan(case, GemmParameters(128, 192, 3, 2)).columns == 192
    for parameters in (GemmParameters(128, 256, 3, 2), GemmParameters(256, 128, 3, 2)):
        refused = plan(case, parameters)
        assert isinstance(refused, Refusal)
        assert "256 accumulators a thread" in refused.reason


def test_bytes_are_written_in_whole_vectors() -> None:
    """A block's share of a split tile is 16 columns or more, which 16-byte writes need."""
    assert plan(replace(BYTES, k=3072), GemmParameters(64, 32, 4, 1, split_k=4)).shares.columns == 16
    assert plan(replace(LARGE, k=3072), GemmParameters(64, 32, 4, 1, split_k=4)).shares.columns == 8


@pytest.mark.parametrize("case", [LARGE, BYTES, FLOAT8], ids=["numbers", "bytes", "float8"])
@pytest.mark.parametrize("rows", [1, 128, 4096])
def test_candidates_fit_and_differ(case: MatmulCase, rows: int) -> None:
    case = replace(case, rows=(rows,))
    found = GemmSm90().candidates(case.func(), TARGET)
    assert not isinstance(found, Refusal)
    assert len({one.to_json() for one in found}) == len(found) >= 8
    assert all(isinstance(plan(case, one), GemmPlan) for one in found)


def compiled(case: MatmulCase, parameters: GemmParameters) -> Cubin:
    func = GemmSm90().apply(case.func().with_attr(CONSTANT_PARAMS_ATTR, [1]), TARGET, parameters)
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with captured_cubins("sm_90a") as cubins:
        tvm.tirx.build(module, target=TARGET.target, pipeline=register_mixed_pipeline())
    (data,) = cubins
    return read_cubin(data)


@pytest.mark.quick_cases("split_k", "mixed signs", "float8, split_k")
@pytest.mark.parametrize(
    ("case", "parameters", "registers_max"),
    [
        (replace(LARGE, rows=(128,)), GemmParameters(64, 48, 8, 1, split_k=2, dependent=True), 110),
        (replace(INTEGERS, rows=(1,)), GemmParameters(64, 32, 3, 1), 80),
        (LARGE, GemmParameters(128, 192, 4, 2), 168),
        (LARGE, GemmParameters(128, 256, 4, 2, 132), 168),
        (LARGE, GemmParameters(128, 128, 5, 2, 132, pingpong=True, dependent=True), 168),
        (BYTES, GemmParameters(128, 128, 4, 2, 66, 1, True, True, 2, 4), 168),
        (replace(BYTES, dtype="uint8", dtype_b="int8"), GemmParameters(128, 128, 4, 2), 168),
        (FLOAT8, GemmParameters(128, 192, 4, 2, 132), 168),
        (replace(FLOAT8, output="float8_e4m3fn"), GemmParameters(128, 192, 4, 2, 132), 168),
        (replace(FLOAT8, rows=(128,)), GemmParameters(64, 64, 8, 1, split_k=2, dependent=True), 110),
        (FLOAT8, GemmParameters(128, 96, 4, 2, 132, pingpong=True, dependent=True), 168),
    ],
    ids=[
        "split_k",
        "one row",
        "cooperative",
        "two instructions",
        "pingpong",
        "bytes, multicast",
        "mixed signs",
        "float8, wide",
        "float8, to float8",
        "float8, split_k",
        "float8, pingpong",
    ],
)
def test_cubin_has_8_bit_wgmma_and_no_spills(case: MatmulCase, parameters: GemmParameters, registers_max: int) -> None:
    cubin = compiled(case, parameters)
    found = WGMMA_FLOAT8 if case.dtype.startswith("float8") else WGMMA_INTEGER
    # Four instructions of 32 deep for every 64 rows, at least once; none of 16 bits, none of the slower path.
    assert cubin.count(found) >= 4 * (parameters.block_m // 64 // (1 if parameters.pingpong else parameters.consumers))
    assert cubin.count(WGMMA) == cubin.count(MMA_SYNC) == 0
    assert cubin.count(WARPGROUP) <= cubin.count(found) // 2
    assert cubin.count(TMA_LOAD) + cubin.count(TMA_LOAD_MULTICAST) >= 2
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
    assert cubin.registers <= registers_max


def run_on_gpu(case: MatmulCase, parameters: GemmParameters):
    """Yield inputs and the output of 20 runs."""
    func = GemmSm90().apply(case.func().with_attr(CONSTANT_PARAMS_ATTR, [1]), TARGET, parameters)
    with cuda_compiler("sm_90a"):
        module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        kernel = tvm.tirx.build(module, target=TARGET.target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    for _ in range(20):
        arrays = random_inputs(case, rng)
        tensors = [tvm.runtime.tensor(array, device) for array in (*arrays, poisoned(case))]
        kernel["main"](*tensors)
        yield arrays, tensors[-1].numpy()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("case", "parameters"), EXACT.values(), ids=EXACT.keys())
def test_integers_are_exact(case: MatmulCase, parameters: GemmParameters) -> None:
    for arrays, found in run_on_gpu(case, parameters):
        np.testing.assert_array_equal(found, expected(case, arrays))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("case", "parameters"), FLOATS.values(), ids=FLOATS.keys())
def test_float8_agrees_with_float64(case: MatmulCase, parameters: GemmParameters) -> None:
    for arrays, found in run_on_gpu(case, parameters):
        right = expected(case, arrays)
        if case.output.startswith("float8"):
            right = float8_array(right).astype("float64")
        error = np.linalg.norm(found.astype("float64") - right) / np.linalg.norm(right)
        # Of sums that the tensor cores make alone, 8.6e-4 with K = 2048. Few sums are beside a tie of float8.
        assert error < {"bfloat16": 4e-3, "float8_e4m3fn": 1e-2}.get(case.output, 6e-4)
