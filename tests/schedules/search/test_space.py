from __future__ import annotations

import pytest
import tvm
from tvm import tirx
from tvm.s_tir import Schedule, meta_schedule as ms
from tvm.s_tir.schedule import Trace

from relaxtune.schedules.errors import TargetError
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.search.space import QuietTuneContext, find_refusal, list_designs, make_space
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.metaschedule import replay_decision, trace_to_json
from tests.schedules.attention_cases import PLAIN
from tests.schedules.kernel_cases import check, conv2d_case, host, loop_kinds, matmul_case, rows_case
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import NormCase


def candidates(case, per_design: int):
    """Yield modules with freshly drawn decisions, the post-processors of the space applied by hand being none."""
    for design in list_designs(case.module, host().target):
        insts = design.trace.simplified(True).insts
        for seed in range(per_design):
            schedule = Schedule(case.module, seed=seed + 1)
            Trace(insts, {}).apply_to_schedule(schedule, remove_postproc=True)
            yield schedule.mod


@pytest.mark.quick_cases("fits", "prime-rows", "convolution")
@pytest.mark.parametrize(
    "case",
    [
        matmul_case(32, 96, 24, epilogue="bias"),
        matmul_case(37, 64, 12, epilogue="gelu"),
        matmul_case(13, 50, 8),
        matmul_case(16, 32, 8, batch=3, transposed=True),
        conv2d_case(1, 3, 32, 48, 8, 8, 0),
    ],
    ids=["fits", "prime-rows", "odd-columns", "batched-transposed", "convolution"],
)
def test_candidates_of_a_contraction_are_right_when_decisions_are_drawn(case):
    for module in candidates(case, per_design=2):
        check(case, module, host().target)
        assert loop_kinds(module) >= {"vectorized", "unrolled"}


def test_designs_cover_packing_and_both_orders_when_the_right_operand_is_contiguous():
    designs = list_designs(matmul_case(64, 96, 24).module, host().target)
    assert len(designs) == 5
    assert sum("B_global" in design.mod.script(show_meta=False) for design in designs) == 2


@pytest.mark.parametrize(
    ("case", "target"),
    [(conv2d_case(1, 3, 32, 48, 8, 8, 0), "llvm"), (matmul_case(64, 64, 64), "cuda:sm_90a")],
    ids=["convolution: TransformLayout", "dlight's matmul: TransformBlockLayout"],
)
def test_designs_that_change_a_layout_are_the_same_when_written_and_replayed(case, target):
    target = host().target if target == "llvm" else resolve_target(target).target
    designs = list_designs(case.module, target)
    changed = [d for d in designs if any("Layout" in str(step.kind.name) for step in d.trace.insts)]
    assert changed
    for design in changed:
        with target:
            replayed = replay_decision(case.module, trace_to_json(design.trace))
        tvm.ir.assert_structural_equal(replayed.mod, design.mod)


def test_space_searches_and_finds_valid_candidates_when_tuned_in_process():
    case = matmul_case(64, 96, 32, epilogue="bias")
    strategy = ms.search_strategy.EvolutionarySearch(
        population_size=8, init_measured_ratio=0.0, init_min_unmeasured=4, genetic_num_iters=1, max_fail_count=20
    )
    context = QuietTuneContext(case.module, host().target, make_space(host().target), strategy, seed=1)
    context.pre_tuning(
        max_trials=4,
        num_trials_per_iter=4,
        design_spaces=context.generate_design_space(),
        database=ms.database.MemoryDatabase(),
        cost_model=ms.cost_model.RandomModel(),
    )
    found = context.generate_measure_candidates()
    context.post_tuning()
    assert len(found) == 4
    for candidate in found:
        check(case, candidate.sch.mod, host().target)


def test_space_uses_rules_and_keeps_the_fallback_when_the_kernel_is_no_contraction():
    case = rows_case("softmax", 24, 64)
    designs = list_designs(case.module, host().target)
    assert len(designs) >= 2
    check(case, designs[0].mod, host().target)


def test_space_binds_threads_when_on_cuda():
    target = resolve_target("cuda:sm_90a").target
    case = matmul_case(64, 64, 64)
    context = QuietTuneContext(case.module, target, make_space(target))
    designs = context.generate_design_space()
    assert designs
    assert all("threadIdx.x" in design.mod.script(show_meta=False) for design in designs)
    assert any("shared" in design.mod.script(show_meta=False) for design in designs)
    assert len(context.space_generator.postprocs) >= 5


ADDS_NORM = MatmulCase((2, 24), 64, 96, ("bias", "residual"))
LEFT_TO_TEMPLATES = {
    "statistics of rows": (NormCase(ADDS_NORM, operand=True, keeps=True).func(), "makes statistics of its rows"),
    "RMS, statistics not kept": (NormCase(ADDS_NORM, operand=True, centred=False).func(), "makes statistics"),
    "partial sums": (NormCase(ADDS_NORM, sums=True).func(), "sums up its result's rows"),
    "normalised residual, partial sums": (NormCase(ADDS_NORM, residual=True, sums=True).func(), "sums up"),
    "attention": (attention_function(*PLAIN.made()), "attention is left to its template"),
}


@pytest.mark.parametrize("target", ["llvm", "cuda:sm_90a"])
@pytest.mark.parametrize(("func", "reason"), LEFT_TO_TEMPLATES.values(), ids=LEFT_TO_TEMPLATES.keys())
def test_functions_left_to_templates_are_refused_with_a_reason(func: tirx.PrimFunc, reason: str, target: str) -> None:
    refusal = find_refusal(func)
    assert refusal is not None
    assert reason in refusal.reason
    assert list_designs(tvm.IRModule({"main": func}), resolve_target(target).target) == []


def test_a_matmul_that_reads_statistics_is_searched() -> None:
    func = NormCase(ADDS_NORM, residual=True, shifted=True).func().with_attr("global_symbol", "main")
    target = resolve_target("cuda:sm_90a").target
    mod, space = tvm.IRModule({"main": func}), make_space(target)
    assert find_refusal(func) is None
    QuietTuneContext(mod, target, space)
    _, design = list_designs(mod, target)
    for seed in range(1, 9):
        schedule = Schedule(mod, seed=seed)
        Trace(design.trace.simplified(True).insts, {}).apply_to_schedule(schedule, remove_postproc=True)
        schedule.enter_postproc()
        assert all(rule.apply(schedule) for rule in space.postprocs)


def test_space_refuses_when_the_target_is_neither_llvm_nor_cuda():
    with pytest.raises(TargetError, match="no search space for target kind 'opencl'"):
        make_space(tvm.target.Target("opencl"))
