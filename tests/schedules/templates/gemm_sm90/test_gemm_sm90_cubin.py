"""The machine code of the kernels, without a GPU: wgmma and TMA are there, registers and stack within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from tvm import tirx

from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.registry import TEMPLATES
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.ranges import Ranges, RangesParameters, SizeRange
from tests.schedules.templates.cubin import (
    LAUNCH_DEPENDENTS,
    LOAD,
    LOCAL_LOAD,
    LOCAL_STORE,
    MMA_SYNC,
    MOVE_TO_UNIFORM,
    TMA_LOAD,
    TMA_LOAD_MULTICAST,
    WAIT,
    WARPGROUP,
    WGMMA,
    Cubin,
    captured_cubins,
    read_cubin,
)
from tests.schedules.templates.matmul_cases import MatmulCase

WIDE = MatmulCase((4096,), 768, 768, ("bias", "residual"))
BFLOAT16 = MatmulCase((3, 43), 768, 768, dtype="bfloat16", output="float32", transposed=True)


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


def compiled(
    case: MatmulCase, parameters: GemmParameters, target: ResolvedTarget, constants: tuple[int, ...] = (1,)
) -> Cubin:
    source = case.func().with_attr(CONSTANT_PARAMS_ATTR, constants)
    if all(isinstance(size, int) for size in case.rows):
        func = GemmSm90().apply(source, target, parameters)
    else:
        table = RangesParameters((SizeRange(4096, parameters.to_json()),))
        func = Ranges(TEMPLATES).apply(source, target, table)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with captured_cubins("sm_90a") as cubins:
        tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    (data,) = cubins
    return read_cubin(data)


@pytest.mark.quick_cases("split_k", "ragged", "pingpong", "odd columns")
@pytest.mark.parametrize(
    ("case", "parameters", "registers_max"),
    [
        (replace(WIDE, rows=(128,)), GemmParameters(64, 48, 8, 1, split_k=2, dependent=True), 100),
        (replace(WIDE, rows=(1,), n=200, k=200), GemmParameters(64, 32, 3, 1), 100),
        # Three warpgroups start with 168 registers a thread; the consumers get more by setmaxnreg.
        (WIDE, GemmParameters(128, 192, 4, 2), 168),
        (replace(WIDE, n=3072, epilogue=("bias", "gelu")), GemmParameters(128, 128, 5, 2, 132, 1, True, True), 168),
        (replace(WIDE, n=3072, epilogue=("bias",)), GemmParameters(128, 256, 4, 2, 132), 168),
        (replace(WIDE, rows=(16,)), GemmParameters(64, 64, 6, 1, split_k=4, dependent=True), 100),
        (
            replace(WIDE, n=3072, epilogue=("bias", "gelu")),
            GemmParameters(128, 192, 4, 2, 66, 1, True, True, 2, 4),
            168,
        ),
        (
            replace(WIDE, n=50257, epilogue=(), transposed=True),
            GemmParameters(128, 192, 4, 2, 132, 1, True, True, 1, 8),
            168,
        ),
        (replace(WIDE, n=16384, epilogue=("gated",)), GemmParameters(128, 256, 4, 2, 132, 1, False, True, 1, 8), 168),
        (
            replace(
                WIDE,
                rows=(3, 43),
                dtype="bfloat16",
                output="float32",
                transposed=True,
                epilogue=("row_scale", "masked"),
            ),
            GemmParameters(128, 96, 3, 2),
            168,
        ),
        (replace(WIDE, k=3072), GemmParameters(128, 192, 4, 2, 132, dependent=True, stream_k=True), 168),
        (replace(WIDE, rows=(300,), k=3072), GemmParameters(64, 64, 8, 1, 132, stream_k=True), 110),
    ],
    ids=[
        "split_k",
        "ragged",
        "cooperative",
        "pingpong",
        "wide",
        "few rows",
        "multicast",
        "odd columns",
        "gated",
        "bfloat16",
        "stream",
        "small stream",
    ],
)
def test_cubin_has_wgmma_and_no_spills(
    case: MatmulCase, parameters: GemmParameters, registers_max: int, target: ResolvedTarget
) -> None:
    cubin = compiled(case, parameters, target)
    # Four instructions of 16 deep for every 64 rows, at least once; none of the slower tensor-core path.
    assert cubin.count(WGMMA) >= 4 * (parameters.block_m // 64 // (1 if parameters.pingpong else parameters.consumers))
    assert cubin.count(TMA_LOAD) + cubin.count(TMA_LOAD_MULTICAST) >= 2
    assert cubin.count(MMA_SYNC) == 0
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
    assert cubin.registers <= registers_max


@pytest.mark.quick_cases("ragged rows")
@pytest.mark.parametrize(
    ("rows", "parameters"),
    [
        ((128,), GemmParameters(64, 64, 8, 1, dependent=True)),
        # Warps without rows leave out their part: a branch that the compiler must know to be a whole warp's.
        ((8, 333), GemmParameters(128, 192, 5, 2, 132, 1, True, True)),
        ((tirx.Var("batch", "int64"), 77), GemmParameters(128, 192, 5, 2, 132, 1, True, True)),
    ],
    ids=["few rows", "ragged rows", "symbolic rows"],
)
def test_multiplications_of_a_stage_follow_each_other(
    rows: tuple[Size, ...], parameters: GemmParameters, target: ResolvedTarget
) -> None:
    """Descriptors are sums in uniform registers: no value is moved there from a thread's between two instructions."""
    cubin = compiled(replace(WIDE, rows=rows, epilogue=("bias", "gelu")), parameters, target)
    assert cubin.count(MOVE_TO_UNIFORM) < cubin.count(WGMMA)


@pytest.mark.quick_cases("32-a bias", "64-an activation")
@pytest.mark.parametrize(("constants", "early"), [((1, 2), 1), ((1,), 0)], ids=["a bias", "an activation"])
@pytest.mark.parametrize("block_n", [32, 64])
def test_only_constants_are_read_before_the_wait(
    constants: tuple[int, ...], early: int, block_n: int, target: ResolvedTarget
) -> None:
    """The compiler may move ordinary loads above the wait: of rows, whose numbers the kernel before has made."""
    case = MatmulCase((128,), 768, 768, ("bias", "row_scale", "residual"))
    cubin = compiled(case, GemmParameters(64, block_n, 12, 1, dependent=True), target, constants)
    first = cubin.opcodes.index(WAIT)
    # The consumers' part comes first: nothing is loaded by TMA between the two.
    before = cubin.opcodes[cubin.opcodes.index(LAUNCH_DEPENDENTS) : first]
    assert TMA_LOAD not in before
    assert (before.count(LOAD), cubin.opcodes[:first].count(LOAD)) == (early, early)
    assert cubin.count(LOAD) >= 3 + early


@pytest.mark.quick_cases("64", "128")
@pytest.mark.parametrize("block_n", [32, 64, 96, 128])
def test_nothing_reads_accumulators_before_the_wait_for_them(block_n: int, target: ResolvedTarget) -> None:
    """The compiler is refused where one does (`pipeline.codegen.wgmma_check`)."""
    case = MatmulCase((512,), 2304, 768, ("half_bias",))
    cubin = compiled(case, GemmParameters(128, block_n, 6, 2, 132, pingpong=True, dependent=True, group=4), target)
    # Each one waited for by itself would be right too, and slow.
    assert cubin.count(WARPGROUP) < cubin.count(WGMMA)
