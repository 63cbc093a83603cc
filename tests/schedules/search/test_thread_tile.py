from __future__ import annotations

import re

import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from relaxtune.schedules.search.space import QuietTuneContext, list_designs, make_space
from relaxtune.schedules.search.thread_tile import thread_tile_designs
from relaxtune.schedules.targets import resolve_target
from tests.schedules.kernel_cases import check, conv2d_case, host, matmul_case, rows_case

TARGET = resolve_target("cuda:sm_90a")
CASES = {
    "fits": matmul_case(32, 96, 256, epilogue="bias"),
    "one row": matmul_case(1, 64, 40, epilogue="bias"),
    "prime rows": matmul_case(37, 64, 12, epilogue="gelu"),
    "odd everything": matmul_case(13, 50, 9),
    "batched, transposed": matmul_case(16, 32, 8, batch=3, transposed=True),
}


def drawn(module: tvm.IRModule, seed: int) -> Schedule:
    (design,) = thread_tile_designs(module["main"], TARGET.limits)
    schedule = Schedule(module, seed=seed)
    Trace(design.trace.simplified(True).insts, {}).apply_to_schedule(schedule, remove_postproc=True)
    schedule.enter_postproc()
    return schedule


def on_a_cpu(module: tvm.IRModule) -> tvm.IRModule:
    """Return the module with threads as loops; before the post-processors, each thread copies all that is shared."""
    text = module.script(show_meta=False)
    text = re.sub(r'T\.thread_binding\((.*?), thread="[^"]*"\)', r"range(\1)", text)
    return tvm.script.from_source(re.sub(r', scope="(shared|local)"', "", text))


@pytest.mark.quick_cases("one row", "odd everything")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_candidates_compute_what_they_should(case):
    for seed in (1, 2, 3):
        check(case, on_a_cpu(drawn(case.module, seed).mod), host().target)


@pytest.mark.quick_cases("prime rows", "batched, transposed")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_candidate_keeps_to_the_limits_of_a_block(case):
    space = make_space(TARGET.target)
    QuietTuneContext(case.module, TARGET.target, space)
    for seed in range(1, 17):
        schedule = drawn(case.module, seed)
        assert all(rule.apply(schedule) for rule in space.postprocs)
        assert "threadIdx.x" in schedule.mod.script(show_meta=False)


def test_other_functions_get_the_rules():
    for case in (rows_case("softmax", 24, 64), conv2d_case(1, 3, 32, 48, 8, 8, 0)):
        assert thread_tile_designs(case.module["main"], TARGET.limits) == []
        assert list_designs(case.module, TARGET.target)
