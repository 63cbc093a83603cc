from __future__ import annotations

import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from schedules.context import QuietTuneContext
from schedules.errors import TargetError
from schedules.space import list_designs, make_space
from schedules.targets import resolve_target
from tests.schedules.kernel_cases import check, conv2d_case, host, loop_kinds, matmul_case, rows_case


def candidates(case, per_design: int):
    """Yield modules with freshly drawn decisions, the post-processors of the space applied by hand being none."""
    for design in list_designs(case.module, host().target):
        insts = design.trace.simplified(True).insts
        for seed in range(per_design):
            schedule = Schedule(case.module, seed=seed + 1)
            Trace(insts, {}).apply_to_schedule(schedule, remove_postproc=True)
            yield schedule.mod


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
    # dlight's matmul transforms a block's layout, a step that TVM cannot write as JSON.
    assert "TransformBlockLayout" not in {str(step.kind.name) for d in designs for step in d.trace.insts}
    assert len(context.space_generator.postprocs) >= 5


def test_space_refuses_when_the_target_is_neither_llvm_nor_cuda():
    with pytest.raises(TargetError, match="no search space for target kind 'opencl'"):
        make_space(tvm.target.Target("opencl"))
