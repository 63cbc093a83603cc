"""Fuzzed shapes, masks and values: a few in every run, two thousand by `-m nightly`, and golden answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.guardrails.fuzz_cases import ARTIFACTS, LENGTHS, FuzzCase, Fuzzed, draw_cases, make_inputs
from tests.guardrails.fuzz_run import HALF_TOLERANCE, Subject, make_subject, run_case, run_cases, summarise

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent / "golden.json"
CASES_EACH = 400
QUICK = [fuzzed for fuzzed in ARTIFACTS if fuzzed.model in ("bert-tiny", "llama-tiny-decode", "vit-tiny")]


@pytest.fixture(scope="module", params=QUICK, ids=lambda fuzzed: fuzzed.model)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp("fuzz") / "artifact")


def test_ten_fuzzed_cases_agree_with_onnx_runtime(subject: Subject) -> None:
    cases = [case for case in draw_cases(subject.fuzzed, 40, seed=1) if case.length <= 33 and case.batch <= 5][:10]
    assert len(cases) == 10
    mismatches, _ = run_cases(subject, cases)
    assert mismatches == []


def test_golden_answers_are_given_still(subject: Subject) -> None:
    golden = [entry for entry in json.loads(GOLDEN.read_text()) if entry["case"]["model"] == subject.fuzzed.model]
    assert golden
    for entry in golden:
        case = FuzzCase(**entry["case"])
        got = subject.module.run(make_inputs(case, subject.fuzzed, subject.model))
        for name, want in entry["outputs"].items():
            found = summarise(got[name])
            assert (found["shape"], found["finite"]) == (want["shape"], want["finite"]), f"{case}: {name}"
            near = 1e-3 * max(want["rms"], 1e-30)
            np.testing.assert_allclose(found["values"], want["values"], rtol=1e-3, atol=near, err_msg=f"{case}: {name}")


def test_a_wrong_answer_is_a_mismatch(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FuzzCase(subject.fuzzed.model, 2, 5 if subject.fuzzed.length else 0, "right", "usual", 0)
    assert run_case(subject, case) == []
    run = subject.module.run
    monkeypatch.setattr(subject.module, "run", lambda inputs: {n: y + np.float32(0.01) for n, y in run(inputs).items()})
    assert run_case(subject, case)
    half = replace(subject, tolerance=HALF_TOLERANCE)
    assert run_case(half, case) == []
    monkeypatch.setattr(subject.module, "run", lambda inputs: {n: y * np.float32(1.5) for n, y in run(inputs).items()})
    assert run_case(half, case)


def test_what_rounding_moves_is_no_mismatch_and_a_wrong_answer_still_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fuzzed,) = (one for one in QUICK if one.model == "llama-tiny-decode")
    subject = make_subject(fuzzed, tmp_path / "artifact")
    # ONNX Runtime's own logits move by as much where each float is rounded once more, or in its optimised form alone.
    for case in (
        FuzzCase(fuzzed.model, 2, 64, "right", "large", 393),
        FuzzCase(fuzzed.model, 13, 65, "ones", "large", 257),
    ):
        assert run_case(subject, case) == []
    run = subject.module.run
    monkeypatch.setattr(subject.module, "run", lambda x: {n: y * np.float32(1.005) for n, y in run(x).items()})
    assert {one.output for one in run_case(subject, case)} >= {"logits"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fuzzed", ARTIFACTS, ids=lambda fuzzed: fuzzed.model)
def test_four_hundred_fuzzed_cases_agree_with_onnx_runtime(fuzzed: Fuzzed, tmp_path: Path) -> None:
    mismatches, _ = run_cases(make_subject(fuzzed, tmp_path / "artifact"), draw_cases(fuzzed, CASES_EACH, seed=0))
    assert mismatches == []


def test_cases_are_the_same_every_time_and_reach_the_edges() -> None:
    bert = ARTIFACTS[0]
    cases = draw_cases(bert, CASES_EACH, seed=0)
    assert cases == draw_cases(bert, CASES_EACH, seed=0)
    assert cases[0].length == bert.longest
    assert {case.length for case in cases} >= set(LENGTHS)
    assert {case.mask for case in cases} >= {"none", "ragged", "one left"}
