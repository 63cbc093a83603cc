"""The GEMM template on mma.sync: what it takes, and what it proposes for each target."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.registry import list_candidates
from relaxtune.schedules.targets import CudaLimits, resolve_target
from relaxtune.schedules.targets.gpus import GPUS
from relaxtune.schedules.templates.base import TemplateError, cuda_limits
from relaxtune.schedules.templates.gemm_sm80.plan import GemmParameters, GemmPlan, make_plan
from relaxtune.schedules.templates.gemm_sm80.template import GemmSm80, predicted_us
from relaxtune.schedules.templates.matmul_by_rows import recognise_matmul_by_rows
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.gemv_cases import GemvCase
from tests.schedules.templates.matmul_cases import MatmulCase

BERT = MatmulCase((8, 128), 3072, 768, ("bias", "gelu"))
FLOAT = replace(BERT, dtype="float32", output="float32")
STORED = GemvCase((128,), 2048, 2048, 4)
TARGETS = ("cuda:sm_80", "cuda:sm_86", "cuda:sm_89", "cuda:sm_90", "cuda:sm_120")


@pytest.mark.parametrize("text", TARGETS)
@pytest.mark.parametrize(
    "case",
    [
        BERT,
        replace(BERT, rows=(17,), epilogue=("bias", "residual")),
        replace(BERT, rows=(4096,), n=50257, transposed=True, epilogue=()),
        replace(BERT, rows=(4096,), n=4096, k=4096, epilogue=(), dtype="bfloat16", output="bfloat16"),
        replace(BERT, n=6144, epilogue=("gated",)),
        FLOAT,
    ],
    ids=["BERT", "few rows", "vocabulary", "square", "gated", "float32"],
)
def test_every_proposal_fits_its_target(case: MatmulCase, text: str) -> None:
    target, func = resolve_target(text), case.func()
    limits, matmul = cuda_limits(target), recognise_matmul(func)
    found = GemmSm80().candidates(func, target)
    assert not isinstance(found, Refusal)
    assert len(set(found)) == len(found) >= 4
    for parameters in found:
        plan = make_plan(matmul, parameters, limits)
        assert isinstance(plan, GemmPlan)
        assert plan.shared_bytes <= limits.shared_bytes_optin
        assert plan.registers * plan.threads <= limits.registers_per_block
        assert not parameters.dependent


@pytest.mark.parametrize("text", TARGETS)
@pytest.mark.parametrize(
    "case",
    [
        STORED,
        replace(STORED, rows=(17,), bits=8, epilogue="residual"),
        replace(STORED, rows=(1024,), n=8192, epilogue="gated"),
        replace(STORED, rows=(4, 100), n=1000, k=800, group=32, bits=8),
    ],
    ids=["4 bits", "few rows", "gated", "ragged"],
)
def test_quantised_weights_are_read_as_they_are_stored(case: GemvCase, text: str) -> None:
    target, func = resolve_target(text), case.func()
    found, _ = list_candidates(func, target)
    assert len(found) >= 4
    limits, matmul = cuda_limits(target), recognise_matmul_by_rows(func)
    for parameters in found:
        plan = make_plan(matmul, parameters, limits)
        assert isinstance(plan, GemmPlan)
        assert plan.tile_bytes[1] == parameters.block_n * parameters.block_k * case.bits // 8
        assert plan.shared_bytes <= limits.shared_bytes_optin
    assert isinstance(GemmSm80().apply(func, target, found[0]), tirx.PrimFunc)


def test_a_stage_has_the_scales_of_its_groups() -> None:
    for group, rows in ((32, 2), (64, 1), (96, 2), (128, 1), (1920, 1), (960, 1)):
        plan = make_plan(
            recognise_matmul_by_rows(replace(STORED, k=1920, group=group).func()),
            GemmParameters(64, 64, 64, 3, 1, 2),
            cuda_limits(resolve_target("cuda:sm_80")),
        )
        assert isinstance(plan, GemmPlan)
        assert plan.scale_rows == rows
        assert plan.tile_bytes[2] == 64 * 2 * rows


def test_float32_is_made_where_halves_take_wgmma() -> None:
    found, _ = list_candidates(FLOAT.func(), resolve_target("cuda:sm_90a"))
    assert found[0].template == "gemm_sm80"
    assert isinstance(GemmSm80().apply(FLOAT.func(), resolve_target("cuda:sm_90a"), found[0]), tirx.PrimFunc)


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (BERT, "cuda:sm_90a", "the target has wgmma"),
        (BERT, "cuda:sm_75", "expected cuda sm_80 or later"),
        (BERT, "llvm", "the target is llvm"),
        (replace(BERT, dtype="int8"), "cuda:sm_80", "the accumulator is float32, the operands are int8"),
        (replace(FLOAT, k=770), "cuda:sm_80", "K is 770, expected a multiple of 4"),
        (replace(BERT, k=770), "cuda:sm_80", "K is 770, expected a multiple of 8"),
        (replace(BERT, n=3074), "cuda:sm_80", "N is 3074, expected a multiple of 8"),
        (replace(BERT, epilogue=("summed",)), "cuda:sm_80", "expected one reduction"),
        (STORED, "cuda:sm_90a", "the target has wgmma"),
        (replace(STORED, k=2032), "cuda:sm_80", "K is 2032, expected a multiple of 32"),
        (replace(STORED, n=2044), "cuda:sm_80", "N is 2044, expected a multiple of 8"),
        (replace(STORED, group=48, k=1920), "cuda:sm_80", "groups of 48 weights, expected a multiple of 32"),
    ],
)
def test_refusal_says_why(case: MatmulCase | GemvCase, target: str, reason: str) -> None:
    found = GemmSm80().candidates(case.func(), resolve_target(target))
    assert isinstance(found, Refusal)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"warps_m": 1, "warps_n": 1}, "1 x 1 warps, expected 2 to 16"),
        ({"block_m": 40}, "block_m is 40, expected a multiple of 32"),
        ({"block_n": 96}, "block_n is 96, expected 2 times 16, 32, 64 or 128"),
        ({"block_k": 16}, "block_k is 16, expected a power of 2 from 32 to 64"),
        ({"stages": 1}, "stages is 1, expected 2 to 8"),
        ({"group": 0}, "group is 0, expected 1 or more"),
        ({"block_m": 256}, "registers a thread"),
        ({"block_k": 64, "stages": 6}, "bytes of shared memory, the target has 101376"),
        ({"split_k": 5}, "split_k is 5, expected a divisor of the 24 tiles of K"),
        ({"split_k": 0}, "split_k is 0, expected a divisor"),
    ],
)
def test_parameters_that_make_no_kernel_are_refused(change: dict[str, int], reason: str) -> None:
    found = GemmSm80().apply(BERT.func(), resolve_target("cuda:sm_86"), replace(GemmParameters(), **change))
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_a_stage_of_quantised_weights_is_two_steps() -> None:
    found = GemmSm80().apply(STORED.func(), resolve_target("cuda:sm_80"), GemmParameters(64, 64, 32, 3, 1, 2))
    assert isinstance(found, Refusal)
    assert "block_k is 32, expected 64" in found.reason


def test_dependent_launch_is_refused_where_there_is_none() -> None:
    found = GemmSm80().apply(BERT.func(), resolve_target("cuda:sm_80"), GemmParameters(dependent=True))
    assert isinstance(found, Refusal)
    assert "dependent launch" in found.reason


def test_decision_is_read_again() -> None:
    parameters = GemmParameters(64, 128, 64, 3, 2, 2, 4, True)
    assert GemmSm80().parse(parameters.to_json()) == parameters
    with pytest.raises(TemplateError, match="not of template 'gemm_sm80'"):
        GemmSm80().parse(parameters.to_json().replace("gemm_sm80", "gemm_sm90"))


def test_matmuls_of_few_rows_take_the_templates_for_them_first() -> None:
    for rows, expected in ((16, "gemv_stream"), (17, "gemm_sm80")):
        found, _ = list_candidates(replace(BERT, rows=(rows,), transposed=True).func(), resolve_target("cuda:sm_89"))
        assert found[0].template == expected


@pytest.mark.parametrize("case", [BERT, FLOAT, STORED], ids=["halves", "float32", "4 bits"])
def test_blocks_share_sums_where_tiles_are_few_and_that_never_comes_first(case: MatmulCase | GemvCase) -> None:
    target = resolve_target("cuda:sm_80")
    few = replace(case, rows=(32,), n=768, k=3072)
    found = GemmSm80().candidates(few.func(), target)
    assert not isinstance(found, Refusal)
    splits = [parameters.split_k for parameters in found]
    assert splits[0] == 1
    assert set(splits) > {1}
    assert sorted(splits, key=lambda split: split > 1) == splits
    assert len(found) <= 24
    many = GemmSm80().candidates(replace(case, rows=(4096,)).func(), target)
    assert not isinstance(many, Refusal)
    assert {parameters.split_k for parameters in many} == {1}


def test_blocks_of_symbolic_rows_share_no_sums() -> None:
    func = replace(BERT, rows=(tirx.Var("rows", "int64"),)).func()
    found = GemmSm80().apply(func, resolve_target("cuda:sm_80"), GemmParameters(split_k=2), rows=512)
    assert isinstance(found, Refusal)
    assert "blocks share sums, but their number is symbolic" in found.reason


def test_decisions_of_before_blocks_shared_sums_are_read() -> None:
    text = GemmParameters().to_json()
    assert "split_k" not in text
    assert GemmSm80().parse(text).split_k == 1
    assert GemmSm80().parse(GemmParameters(split_k=3).to_json()).split_k == 3


def test_predictions_follow_the_gpu() -> None:
    matmul = recognise_matmul(replace(BERT, rows=(4096,)).func())
    times = {}
    for gpu in GPUS:
        limits = CudaLimits(99 * 1024, gpu.multiprocessors, gpu=gpu)
        plan = make_plan(matmul, GemmParameters(128, 128, 32, 3, 2, 2, 8), limits)
        assert isinstance(plan, GemmPlan)
        times[gpu.name] = predicted_us(matmul, plan, limits)
    assert times["H200"] < times["H100 SXM"] < times["A100 80GB"] < times["A100 40GB"]
    assert times["L40S"] < times["RTX 4090"] < times["A10"] < times["L4"]
    # A GPU that the table lacks is predicted as the one of the fit.
    limits = CudaLimits(99 * 1024, 132)
    assert predicted_us(matmul, plan, limits) == times["H200"]


def test_symbolic_rows_are_made_for_any_number() -> None:
    func = replace(BERT, rows=(tirx.Var("rows", "int64"),)).func()
    target = resolve_target("cuda:sm_80")
    found, _ = list_candidates(func, target)
    assert found[0].template == "ranges"
    assert isinstance(GemmSm80().apply(func, target, GemmParameters(), rows=512), tirx.PrimFunc)
