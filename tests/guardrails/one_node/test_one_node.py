"""Graphs of one node are what ONNX says: those that were not, in every run; all operators, types and edges nightly."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.guardrails.graph_judge import FAULTS, Status
from tests.guardrails.graph_workers import try_graphs
from tests.guardrails.one_node import sweep
from tests.guardrails.one_node.sweep import OneNode, draw_case, list_cases

# What the sweep found, and is mended: a case each.
FOUND = (
    "BatchNormalization bfloat16 plain",
    "Cast 6 bfloat16 plain",
    "Einsum int64 none last",
    "IsInf bfloat16 special",
    "IsNaN bfloat16 special",
    "Mod fmod bfloat16 plain",
    "PRelu row bfloat16 plain",
    "PRelu same int32 plain",
    "Pow same bfloat16 plain",
    "ReduceL1 nothing float32 plain",
    "ReduceL2 all int64 scalar",
    "ReduceL2 last int64 plain",
    "ReduceL2 nothing int64 plain",
    "ReduceLogSum nothing float32 plain",
    "ReduceLogSum all int32 plain",
    "ReduceMax all bool none last",
    "ReduceMax first float32 symbolic none",
    "ReduceMin last bfloat16 special",
    "ReduceSumSquare nothing float32 plain",
    "ScatterElements max bool plain",
    "ScatterND mul bool symbolic",
    "Shape float32 symbolic",
    "Shrink uint8 plain",
    "TopK uint64 plain",
)


def seed_of(name: str) -> int:
    return next(seed for seed, case in enumerate(list_cases()) if case.name == name)


@pytest.mark.parametrize("name", FOUND)
def test_what_the_sweep_found_stays_mended(name: str) -> None:
    outcome = OneNode().attempt(seed_of(name))
    assert outcome.status is Status.RIGHT, outcome.reason


def test_wrong_answer_of_one_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = sweep.run_lowered
    monkeypatch.setattr(sweep, "run_lowered", lambda *given: [array + array.dtype.type(1) for array in run(*given)])
    names = ("Abs float32 plain", "Neg int8 plain", "Exp float64 plain", "Tanh float16 plain")
    assert {OneNode().attempt(seed_of(name)).status for name in names} == {Status.WRONG}


def test_case_is_the_same_for_its_seed() -> None:
    case = list_cases()[seed_of("Add same float32 plain")]
    (first, feeds), (second, again) = draw_case(case), draw_case(case)
    assert first.proto.SerializeToString() == second.proto.SerializeToString()
    np.testing.assert_array_equal(feeds["x"], again["x"])


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3600)
def test_each_operator_by_type_and_edge_is_what_onnx_says() -> None:
    outcomes = list(try_graphs(range(len(list_cases())), OneNode(), workers=os.cpu_count() or 1))
    assert len(outcomes) == len(list_cases())
    assert [outcome for outcome in outcomes if outcome.status in FAULTS] == []
