"""Tasks of matmuls that norms were taken into: each output is checked, and those with sums are not searched."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.tasks.extract import as_workload
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.local.backend import LocalBackend
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.measure.arguments import ArgumentSpec, make_arrays, with_column_sums, with_partial_sums
from relaxtune.pipeline.tuning.measure.backend import Outcome
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.workload_spec import WorkloadSpec
from relaxtune.pipeline.tuning.measure.wrong_result import find_mismatch
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.session import tune
from relaxtune.pipeline.tuning.task_start import TaskStart, own_tolerances
from relaxtune.pipeline.validate.tolerances import KernelTolerance
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.tir.dependent_arguments import column_sums_of_weights, partial_sums_of_rows
from relaxtune.tuning_db.records import Route, Status
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.tuning.tuning_cases import Place, all_records, built, measure, task_of
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import OUTPUTS, NormCase

QUICK = MeasureOptions(repeats=3, contender_repeats=0, min_repeat_s=0.0005, threads=1)
STATISTICS = NormCase(MatmulCase((2, 24), 64, 256, ("bias",)), operand=True, shifted=True, keeps=True)
SUMS = NormCase(MatmulCase((2, 24), 64, 256, ("bias", "residual")), sums=True)
BOTH = NormCase(MatmulCase((2, 24), 64, 256, ("bias",), transposed=True), operand=True, keeps=True, sums=True)
GATED = NormCase(MatmulCase((2, 24), 64, 256, ("gated",)), operand=True, centred=False, keeps=True)
CASES = {"statistics": STATISTICS, "partial sums": SUMS, "both": BOTH, "gated": GATED}
_ELEMENT = "epilogue[v_i1, v_i2, v_i0 * T.int64(16) + v_c]"
# In a function's text, what the first is replaced by: the output named is wrong, the product within its tolerance.
FAULTS = {
    "variance of K - 1 elements": (
        STATISTICS,
        "row_statistics",
        "row_squares[v_i0, v_i1] / T.float32(256.0)",
        "row_squares[v_i0, v_i1] / T.float32(255.0)",
    ),
    "no epsilon": (STATISTICS, "row_statistics", "T.float32(1.0000000000000001e-05)", "T.float32(0.0)"),
    "sums of other columns": (SUMS, "partial_sums", " + v_c]", " + (v_c + T.int64(1)) % T.int64(15)]"),
    "sums too small, squares right": (
        SUMS,
        "partial_sums",
        f'T.int64(0), T.Cast("float32", {_ELEMENT}),',
        f'T.int64(0), T.float32(0.97) * T.Cast("float32", {_ELEMENT}),',
    ),
}


def make_task(case: NormCase) -> TuningTask:
    return task_of("norms", as_workload(case.func()))


def position(task: TuningTask, name: str) -> int:
    return [str(param.name) for param in task.mod["main"].params].index(name)


def planted(mod: tvm.IRModule, before: str, after: str) -> tvm.IRModule:
    text = mod.script(show_meta=False)
    assert before in text
    return tvm.script.from_source(text.replace(before, after))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def backend(place: Place) -> Iterator[LocalBackend]:
    with closing(LocalBackend(["cpu:0"], place.environment, QUICK, timeout_s=20.0)) as opened:
        yield opened


def outcome_of(pool: BuildPool, backend: LocalBackend, place: Place, task: TuningTask, mod: tvm.IRModule) -> Outcome:
    """Return what comes of a module as a candidate of a task."""
    start, target = TaskStart(task, place.target, frozenset()), place.target.target
    spec = replace(start.spec, reference=built(pool, target, start.reference))
    (outcome,) = measure(backend, (built(pool, target, mod), spec))
    return outcome


@pytest.mark.quick_cases("both", "gated")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_right_candidates_pass_on_every_output(
    pool: BuildPool, backend: LocalBackend, place: Place, case: NormCase
) -> None:
    task = make_task(case)
    scheduled = apply_fallback(task.mod, place.target.target)
    assert outcome_of(pool, backend, place, task, scheduled).status is Status.OK


@pytest.mark.quick_cases("variance of K - 1 elements", "sums of other columns")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_wrong_second_output_is_a_wrong_result(
    pool: BuildPool, backend: LocalBackend, place: Place, fault: tuple[NormCase, str, str, str]
) -> None:
    case, output, before, after = fault
    task = make_task(case)
    outcome = outcome_of(pool, backend, place, task, planted(task.mod, before, after))
    assert outcome.status is Status.WRONG_RESULT
    assert f"output parameter {position(task, output)}: " in str(outcome.error)


def test_statistics_and_sums_have_tolerances_of_their_own() -> None:
    task = make_task(BOTH)
    own = own_tolerances(task.mod["main"])
    statistics, sums = (own[position(task, name)] for name in OUTPUTS[1::-1])
    assert statistics.rtol < 1e-5 < 1e-3 < sums.rtol
    assert (statistics.quantities, sums.quantities) == (1, 2)
    assert statistics.accumulated == 0
    assert own_tolerances(as_workload(NormCase(BOTH.matmul).func())["main"]) == {}


def test_quantities_of_different_size_are_each_held_against_their_own() -> None:
    expected = np.array([[1.0, 1000.0], [2.0, 2000.0]], np.float32)
    wrong = expected + np.array([[0.5, 0.0], [0.0, 0.0]], np.float32)
    accepted = KernelTolerance(0.0, 1e-3)
    spec = WorkloadSpec("any", (), (0,), tolerance=accepted)
    assert find_mismatch(wrong, expected, spec.tolerance_of(0)) is None
    spec = replace(spec, own_tolerances={0: replace(accepted, quantities=2)})
    assert str(find_mismatch(wrong, expected, spec.tolerance_of(0))).startswith("[..., 0]: 1 of 2 elements")
    assert find_mismatch(expected, expected, spec.tolerance_of(0)) is None


@pytest.mark.parametrize("case", [STATISTICS, BOTH], ids=["[K, N]", "[N, K]"])
def test_column_sums_are_those_of_the_matrix(case: NormCase) -> None:
    func = case.func()
    specs = [ArgumentSpec(tuple(int(size) for size in p.ty.shape), str(p.ty.dtype)) for p in func.params]
    arrays = with_partial_sums(make_arrays(specs, {}, 3), partial_sums_of_rows(func))
    names = [str(param.name) for param in func.params]
    made = dict(zip(names, with_column_sums(arrays, column_sums_of_weights(func)), strict=True))
    weights = made["B"].astype(np.float64)
    np.testing.assert_allclose(made["column_sums"], weights.sum(1 if case.matmul.transposed else 0), rtol=1e-4)
    assert made["B"] is arrays[names.index("B")]
    plain = NormCase(case.matmul, operand=True, centred=False).func()
    assert column_sums_of_weights(plain) == column_sums_of_weights(SUMS.func()) == {}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_work_counts_the_product_and_each_buffer_once(case: NormCase) -> None:
    task = make_task(case)
    product = 2 * math.prod(case.matmul.rows) * case.matmul.n * case.matmul.k
    assert product < task.flops < 1.05 * product
    sizes = [math.prod(int(size) for size in p.ty.shape) for p in task.mod["main"].params]
    widths = [2 if str(p.ty.dtype) == "float16" else 4 for p in task.mod["main"].params]
    assert task.bytes == sum(size * width for size, width in zip(sizes, widths, strict=True))
    assert task.family == "matmul"


def test_tune_says_why_it_does_not_search(
    place: Place, database: TuningDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        summary = tune(
            [make_task(STATISTICS)],
            target=place.target,
            database=database,
            environment=place.environment,
            still_true=all_records,
            options=TuningOptions(trials=8, workers=1, measure=QUICK, routes=frozenset({Route.METASCHEDULE})),
        )
    (result,) = summary.tasks
    assert str(result.ended).startswith("no search: a matmul that makes statistics of its rows is left to its template")
    assert (result.valid, result.failed, result.skipped) == (0, 0, None)
    assert result.before_us is not None
    assert not caplog.records
