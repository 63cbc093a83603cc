"""The GEMM template with norms inside: what it takes, its machine code, and its results on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.registry import TEMPLATES
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters, GemmPlan, make_plan
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.output.row_statistics import statistics_registers
from relaxtune.schedules.templates.ranges import RangesParameters, SizeRange
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, WGMMA, Cubin, captured_cubins, read_cubin
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import OUTPUTS, NormCase, assert_right, known

TARGET = resolve_target("cuda:sm_90a")
RAGGED = MatmulCase((129,), 208, 208, ("bias",))
ADDED = replace(RAGGED, epilogue=("bias", "residual"))
CASES = {
    "operand": (NormCase(RAGGED, operand=True, keeps=True), GemmParameters(64, 64, 3, 1, dependent=True)),
    "operand, one row": (NormCase(replace(RAGGED, rows=(1,)), operand=True), GemmParameters(64, 32, 3, 1)),
    "operand, leading axes": (
        NormCase(replace(RAGGED, rows=(3, 43)), operand=True, shifted=True, keeps=True),
        GemmParameters(128, 96, 3, 2, 2),
    ),
    "RMS norm, split": (
        NormCase(replace(RAGGED, k=1040, epilogue=()), operand=True, centred=False, keeps=True),
        GemmParameters(64, 64, 3, 1, 0, 3, dependent=True),
    ),
    "operand, split with two consumers": (
        NormCase(replace(RAGGED, k=1040), operand=True, keeps=True),
        GemmParameters(128, 64, 3, 2, 0, 2),
    ),
    "operand by turns": (
        NormCase(replace(RAGGED, rows=(1000,), n=776, k=528), operand=True, keeps=True),
        GemmParameters(64, 128, 3, 2, 7, 1, True, True),
    ),
    "operand, multicast": (
        NormCase(replace(RAGGED, rows=(700,)), operand=True, keeps=True),
        GemmParameters(128, 96, 3, 2, 0, multicast=2, group=2),
    ),
    "operand, large tiles": (
        NormCase(replace(RAGGED, rows=(700,), n=400, k=768), group=32, operand=True, keeps=True),
        GemmParameters(256, 192, 3, 2, 3),
    ),
    "operand, bfloat16, weights turned": (
        NormCase(replace(RAGGED, n=257, dtype="bfloat16", output="bfloat16", transposed=True), operand=True),
        GemmParameters(128, 64, 3, 2, dependent=True),
    ),
    "sums": (NormCase(ADDED, sums=True), GemmParameters(64, 64, 3, 1, dependent=True)),
    "sums, two consumers": (NormCase(ADDED, sums=True), GemmParameters(128, 96, 3, 2, 2)),
    "sums, uneven shares": (
        NormCase(replace(ADDED, k=1040), sums=True),
        GemmParameters(64, 96, 3, 1, 0, 4, dependent=True),
    ),
    "sums by turns": (
        NormCase(replace(ADDED, rows=(1000,), n=768, k=520), group=32, sums=True),
        GemmParameters(64, 128, 3, 2, 7, 1, True, True),
    ),
    "residual": (NormCase(ADDED, residual=True, shifted=True), GemmParameters(64, 96, 3, 1, dependent=True)),
    "residual and sums": (
        NormCase(replace(ADDED, rows=(3, 43), k=1040), residual=True, sums=True),
        GemmParameters(64, 64, 5, 1, 0, 3, dependent=True),
    ),
    "residual and sums, large tiles": (
        NormCase(replace(ADDED, rows=(300,), n=768), group=32, residual=True, sums=True),
        GemmParameters(128, 192, 3, 2),
    ),
    "operand, stream": (
        NormCase(replace(RAGGED, k=1040), operand=True, keeps=True),
        GemmParameters(64, 64, 3, 1, 50, dependent=True, stream_k=True),
    ),
    "sums, stream": (
        NormCase(replace(ADDED, rows=(300,), n=768, k=528), group=32, residual=True, sums=True),
        GemmParameters(128, 192, 3, 2, 7, dependent=True, stream_k=True),
    ),
    "operand and sums": (NormCase(RAGGED, operand=True, sums=True, keeps=True), GemmParameters(64, 64, 3, 1)),
}
LARGE = MatmulCase((4096,), 3072, 768, ("bias", "gelu"))


@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_case_can_be_made(case: NormCase, parameters: GemmParameters) -> None:
    assert isinstance(GemmSm90().apply(case.func(), TARGET, parameters), tvm.tirx.PrimFunc)


def test_first_candidates_are_proposed_as_without_norms() -> None:
    plain = replace(LARGE, rows=(128,))
    cases = (plain.func(), NormCase(plain, operand=True).func(), NormCase(plain, sums=True).func())
    first = [GemmSm90().candidates(func.with_attr(CONSTANT_PARAMS_ATTR, [1]), TARGET)[0] for func in cases]
    assert first[0] == first[1] == first[2]


def test_first_candidate_shares_sums_when_groups_do_not_divide_among_a_cluster() -> None:
    down = MatmulCase((128,), 2048, 8192, ("residual",))
    funcs = (down.func(), NormCase(down, group=32, sums=True).func())
    first = [GemmSm90().candidates(func.with_attr(CONSTANT_PARAMS_ATTR, [1]), TARGET)[0] for func in funcs]
    assert first[0] == first[1]
    assert (first[1].block_m, first[1].block_n, first[1].split_k) == (128, 64, 3)


def test_shares_of_a_cluster_are_whole_groups() -> None:
    down = MatmulCase((128,), 768, 3072, ("bias", "residual"))
    plan = make_plan(known(NormCase(down, sums=True).func()), GemmParameters(64, 96, 4, 1, split_k=4), TARGET.limits)
    assert isinstance(plan, GemmPlan)
    assert plan.shares.columns == 32
    narrow = make_plan(known(NormCase(down, group=32, sums=True).func()), GemmParameters(64, 48, 4, 1), TARGET.limits)
    assert isinstance(narrow, Refusal)
    assert narrow.reason == "block_n is 48, expected whole groups of 32 columns"


def test_partial_sums_are_added_up_at_once_when_registers_are_short() -> None:
    matmul = known(NormCase(LARGE, group=32, operand=True).func())
    assert matmul.norm is not None
    assert statistics_registers(matmul.norm, 2) == 48
    held = [make_plan(matmul, GemmParameters(128, n, 3, 1), TARGET.limits).hold_partials for n in (128, 192)]
    assert held == [True, False]


def test_statistics_are_made_beside_two_consumers_alone() -> None:
    matmul = known(NormCase(LARGE, group=32, operand=True).func())
    parameters = [
        GemmParameters(64, 128, 4, 1),
        GemmParameters(128, 128, 4, 2),
        GemmParameters(128, 192, 4, 2, 132, pingpong=True),
        GemmParameters(128, 192, 4, 2, 132, stream_k=True),
    ]
    plans = [make_plan(matmul, one, TARGET.limits) for one in parameters]
    assert [plan.statistics_apart for plan in plans] == [False, True, True, False]
    plain = known(MatmulCase((4096,), 3072, 768, ("bias",)).func())
    assert not make_plan(plain, parameters[1], TARGET.limits).statistics_apart


def compiled(case: NormCase, parameters: GemmParameters) -> Cubin:
    func = GemmSm90().apply(case.func().with_attr(CONSTANT_PARAMS_ATTR, [1]), TARGET, parameters)
    with captured_cubins("sm_90a") as cubins:
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        tvm.tirx.build(mod, target=TARGET.target, pipeline=register_mixed_pipeline())
    (data,) = cubins
    return read_cubin(data)


@pytest.mark.quick_cases("small tiles", "residual and sums")
@pytest.mark.parametrize(
    ("case", "parameters", "registers_max"),
    [
        (NormCase(replace(LARGE, rows=(128,)), operand=True), GemmParameters(64, 64, 12, 1, dependent=True), 110),
        (NormCase(LARGE, group=32, operand=True), GemmParameters(256, 192, 3, 2, 132, dependent=True), 168),
        (NormCase(LARGE, group=32, operand=True), GemmParameters(128, 256, 4, 2, 132, dependent=True), 168),
        (
            NormCase(MatmulCase((4096,), 768, 3072, ("bias", "residual")), group=32, residual=True, sums=True),
            GemmParameters(128, 192, 5, 2, dependent=True),
            168,
        ),
    ],
    ids=["small tiles", "tall tiles", "wide tiles", "residual and sums"],
)
def test_machine_code_has_no_spills(case: NormCase, parameters: GemmParameters, registers_max: int) -> None:
    cubin = compiled(case, parameters)
    assert cubin.count(WGMMA) > 0
    assert cubin.registers <= registers_max
    assert (cubin.frame_bytes, cubin.count(LOCAL_LOAD), cubin.count(LOCAL_STORE)) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(
    not tvm.cuda(0).exist or str(tvm.cuda(0).compute_version) != "9.0", reason="needs a GPU of compute capability 9.0"
)
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float32_and_with_itself(case: NormCase, parameters: GemmParameters) -> None:
    func = GemmSm90().apply(case.func().with_attr(CONSTANT_PARAMS_ATTR, [1]), TARGET, parameters)
    with cuda_compiler("sm_90a"):
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        kernel = tvm.tirx.build(mod, target=TARGET.target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    for _ in range(20):
        inputs = case.inputs(rng)
        runs = []
        for _again in range(2):
            poisoned = {
                str(param.name): np.full([int(size) for size in param.ty.shape], np.nan, _numpy(str(param.ty.dtype)))
                for param in func.params
                if param.name in OUTPUTS
            }
            tensors = {name: tvm.runtime.tensor(array, device) for name, array in {**inputs, **poisoned}.items()}
            kernel["main"](*(tensors[str(param.name)] for param in func.params))
            runs.append({name: tensors[name].numpy() for name in poisoned})
        assert_right(case, inputs, runs[0], 4e-3 if case.matmul.output == "bfloat16" else 6e-4)
        assert all(np.array_equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_statistics_of_symbolic_rows_can_be_made(case: NormCase, parameters: GemmParameters) -> None:
    made = symbolic(case, parameters)
    assert isinstance(made, Refusal if parameters.stream_k else tvm.tirx.PrimFunc), made


@pytest.mark.gpu
@pytest.mark.skipif(
    not tvm.cuda(0).exist or str(tvm.cuda(0).compute_version) != "9.0", reason="needs a GPU of compute capability 9.0"
)
@pytest.mark.parametrize(
    ("case", "parameters"),
    [one for one in CASES.values() if not one[1].stream_k],
    ids=[name for name, one in CASES.items() if not one[1].stream_k],
)
def test_statistics_of_any_number_of_rows_agree_with_float32(case: NormCase, parameters: GemmParameters) -> None:
    with cuda_compiler("sm_90a"):
        mod = tvm.IRModule({"main": symbolic(case, parameters).with_attr("global_symbol", "main")})
        kernel = tvm.tirx.build(mod, target=TARGET.target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    for rows in (1, 7, 16, 50, 64, 100, 128, 333, 512, 1000, 4097):
        known_rows = replace(case, matmul=replace(case.matmul, rows=(1, rows)))
        func, inputs = known_rows.func(), known_rows.inputs(rng)
        poisoned = {
            str(param.name): np.full([int(size) for size in param.ty.shape], np.nan, _numpy(str(param.ty.dtype)))
            for param in func.params
            if param.name in OUTPUTS
        }
        tensors = {name: tvm.runtime.tensor(array, device) for name, array in {**inputs, **poisoned}.items()}
        kernel["main"](*(tensors[str(param.name)] for param in func.params))
        found = {name: tensors[name].numpy() for name in poisoned}
        assert_right(known_rows, inputs, found, 4e-3 if case.matmul.output == "bfloat16" else 8e-4)


def symbolic(case: NormCase, parameters: GemmParameters) -> tvm.tirx.PrimFunc | Refusal:
    """Return the kernel of a case for any number of rows."""
    rows = tuple(tvm.tirx.Var(name, "int64") for name in ("batch", "length"))
    func = replace(case, matmul=replace(case.matmul, rows=rows)).func().with_attr(CONSTANT_PARAMS_ATTR, [1])
    return TEMPLATES["ranges"].apply(func, TARGET, RangesParameters((SizeRange(4096, parameters.to_json()),)))


def _numpy(dtype: str) -> type | str:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
