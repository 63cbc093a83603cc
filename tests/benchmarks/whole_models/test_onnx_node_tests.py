"""ONNX's node tests: every failure of ours has its reason; no reason explains what passes or is not there."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.node_tests.arms import Arm, Outcome, Stage, run_case
from benchmarks.node_tests.cases import Form, NodeCase, list_cases
from benchmarks.node_tests.operators import CONSTANT_OPERANDS, OPERATORS
from benchmarks.node_tests.reasons import REASONS, find_reason
from benchmarks.whole_models.onnx_node_tests import RESULTS, counts_table, document, entries, explained

pytestmark = pytest.mark.slow

# Small operators of every group, some with failures that are known.
QUICK = (
    *("Clip", "DequantizeLinear", "DynamicQuantizeLinear", "Expand", "GatherND", "Gelu", "LpNormalization"),
    *("MatMulInteger", "QLinearMatMul", "QuantizeLinear", "TensorScatter", "TopK"),
)


@pytest.fixture(scope="module")
def cases() -> dict[str, NodeCase]:
    return {case.key: case for case in list_cases(OPERATORS)}


def test_operators_are_listed_once_and_have_cases(cases: dict[str, NodeCase]) -> None:
    assert len(set(OPERATORS)) == len(OPERATORS)
    assert {case.operator for case in cases.values()} == set(OPERATORS)
    assert set(CONSTANT_OPERANDS) <= set(OPERATORS)


def test_constant_form_takes_shapes_out_of_the_inputs(cases: dict[str, NodeCase]) -> None:
    shipped, constant = (cases[f"test_reshape_extended_dims/{form.value}"] for form in Form)
    assert set(shipped.inputs or {}) - set(constant.inputs or {}) == {"shape"}
    assert [tensor.name for tensor in constant.proto.graph.initializer] == ["shape"]


def test_a_wrong_number_shape_or_dtype_is_a_mismatch(cases: dict[str, NodeCase]) -> None:
    case = cases["test_relu/shipped"]
    assert case.outputs is not None
    assert run_case(case, Arm.OWN) == Outcome(Stage.PASSED)
    (want,) = case.outputs
    for wrong in (want + 1, want[None], want.astype("float64")):
        assert run_case(replace(case, outputs=(wrong,)), Arm.OWN).stage is Stage.MISMATCH


def test_failures_are_counted_by_reason_or_called_unexplained(cases: dict[str, NodeCase]) -> None:
    known, unknown, passed = (cases[f"test_{name}/shipped"] for name in ("loop11", "relu", "abs"))
    outcome_of = {
        known.key: Outcome(Stage.IMPORT, "no converter for ai.onnx.Loop (opset 11)"),
        unknown.key: Outcome(Stage.COMPILE, "boom"),
        passed.key: Outcome(Stage.PASSED),
    }
    lines = explained([known, unknown, passed], outcome_of)
    assert [line.split()[0] for line in lines] == ["1", "UNEXPLAINED"]
    results = {Arm.OWN: outcome_of, Arm.STOCK: outcome_of}
    written = document(entries([known, unknown, passed], results))
    assert written["passed"]["shipped relaxtune"] == "1/3"  # type: ignore[index]
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(counts_table([known, unknown, passed], results))
    assert "1/3" in console.export_text()


def test_the_kept_results_have_no_failure_without_a_reason() -> None:
    names = {reason.name for reason in REASONS}
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["cases"]
    failed = [case for case in kept if case["relaxtune"] != "passed"]
    assert [case["case"] for case in failed if case["reason"] not in names] == []
    assert {case["operator"] for case in kept} == set(OPERATORS)


@pytest.mark.slow
def test_every_failure_of_a_quick_subset_is_explained(cases: dict[str, NodeCase]) -> None:
    unexplained = []
    for case in cases.values():
        if case.operator in QUICK:
            outcome = run_case(case, Arm.OWN)
            if outcome.stage is not Stage.PASSED and find_reason(case, outcome) is None:
                unexplained.append((case.key, outcome))
    assert unexplained == []
