"""A gate on real artifacts: equal builds pass, what grew or was not validated does not, and the three forms say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from relaxtune.pipeline.artifact.directory import load_manifest, record_validation
from relaxtune.pipeline.artifact.entries import FileEntry
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.errors import GateRefusedError, UsageError
from relaxtune.pipeline.gate import checks
from relaxtune.pipeline.gate.checks import Verdict
from relaxtune.pipeline.gate.gate import GateLimits, GateReport, run_gate
from relaxtune.pipeline.gate.latency import LatencyLimit
from relaxtune.pipeline.gate.report import render, to_junit, to_markdown
from relaxtune.pipeline.validate.builds import Arrays
from relaxtune.pipeline.validate.comparison import Comparison, compare_outputs
from relaxtune.pipeline.validate.tolerances import Tolerance

VALIDATION = {"passed": True, "samples": 3, "reference": "ort", "tolerance": {"rtol": 1e-4, "atol": 2e-4}}
# Wide, so that no neighbour on this machine decides.
LIMITS = GateLimits(LatencyLimit(9.0, seconds=0.5))


@pytest.fixture
def manifest(artifact: Path) -> Manifest:
    return load_manifest(artifact).with_validation(VALIDATION)


def gate(new: Path, baseline: Path, inputs: Arrays | Sequence[Arrays], limits: GateLimits = LIMITS) -> GateReport:
    return run_gate(new, baseline, limits, inputs=inputs)


def test_equal_builds_pass_once_both_are_validated(artifact_copy, artifact, bert_inputs) -> None:
    new = artifact_copy()
    refused = gate(new, artifact, bert_inputs)
    assert [check.name for check in refused.refusals] == ["validation"]
    with pytest.raises(GateRefusedError, match=r"may not take the place of .*validation.*relaxtune validate"):
        refused.raise_if_refused()
    record_validation(new, VALIDATION)
    report = gate(new, artifact, bert_inputs, replace(LIMITS, exact=True))
    assert report.passed
    assert {check.name: check.verdict for check in report.checks} == {
        "validation": "yes", "drift": "yes", "latency": "yes", "size": "yes", "memory": "yes",
        "compile time": "no limit",
    }  # fmt: skip
    data = report.to_json()
    assert data["passed"] is True
    assert "tvm" in report.conditions

    suite = ElementTree.fromstring(to_junit(refused))
    assert (suite.get("tests"), suite.get("failures")) == ("6", "1")
    failed = suite.find("testcase[@name='validation']/failure")
    assert failed is not None
    assert "relaxtune validate" in str(failed.get("message"))
    assert "| validation |" in to_markdown(refused)
    assert to_markdown(report).startswith("### bert-tiny: yes")
    assert len(render(report).rows) == 6


def test_artifacts_of_other_inputs_are_refused(artifact_copy, artifact, manifest, bert_inputs) -> None:
    new = artifact_copy()
    other = replace(manifest, inputs=manifest.inputs[:1])
    (new / "manifest.json").write_text(other.to_json(), encoding="utf-8")
    with pytest.raises(UsageError, match="have other inputs"):
        gate(new, artifact, bert_inputs)


def grown(manifest: Manifest, times: float) -> Manifest:
    files = {name: FileEntry(entry.sha256, int(entry.bytes * times)) for name, entry in manifest.files.items()}
    assert manifest.memory is not None
    memory = replace(manifest.memory, weights_bytes=int(manifest.memory.weights_bytes * times))
    seconds = {name: value * times for name, value in manifest.compile_seconds.items()}
    return replace(manifest, files=files, memory=memory, compile_seconds=seconds)


@pytest.mark.parametrize("check", [checks.check_size, checks.check_memory, checks.check_compile_time])
def test_growth_is_held_against_a_limit_where_there_is_one(check, manifest) -> None:
    larger = grown(manifest, 1.5)
    assert check(manifest, larger, 0.05).verdict is Verdict.NO
    assert check(manifest, larger, 0.6).verdict is Verdict.YES
    assert check(manifest, larger, None).verdict is Verdict.NO_LIMIT
    assert check(larger, manifest, 0.0).verdict is Verdict.YES


def test_memory_of_a_plan_is_not_compared_with_memory_without_one(manifest) -> None:
    unplanned = replace(manifest, memory=replace(manifest.memory, planned_bytes=None))
    assert checks.check_memory(manifest, unplanned, 0.05).verdict is Verdict.NO_LIMIT
    assert checks.check_memory(replace(manifest, memory=None), manifest, 0.05).verdict is Verdict.NO_LIMIT


def test_a_failed_validation_says_no(manifest) -> None:
    failed = manifest.with_validation({**VALIDATION, "passed": False})
    assert checks.check_validation(failed).verdict is Verdict.NO


def test_two_builds_of_one_model_may_be_apart_by_both_tolerances(manifest) -> None:
    assert checks.drift_tolerance(manifest, manifest) == Tolerance(2e-4, 4e-4)
    assert checks.drift_tolerance(manifest, replace(manifest, model_sha256="0")) is None
    assert checks.drift_tolerance(replace(manifest, validation=None), manifest) is None


def test_drift_beyond_its_limit_is_refused_and_shown_without_one() -> None:
    a, b = [{"y": np.ones(4, np.float32)}], [{"y": np.full(4, 1.1, np.float32)}]
    allowed = Tolerance(1e-3, 0.0)
    found = Comparison("a", "b", compare_outputs(a, b, tolerance=allowed), limit="rtol 0.001")
    assert checks.check_drift(found).verdict is Verdict.NO
    assert "y:" in checks.check_drift(found).reason
    assert checks.check_drift(Comparison("a", "b", compare_outputs(a, b))).verdict is Verdict.NO_LIMIT


def test_an_undecided_latency_is_a_no_for_the_strict_alone(artifact, bert_inputs, artifact_copy) -> None:
    new = artifact_copy()
    record_validation(new, VALIDATION)
    # Eight or sixteen blocks leave every doubt at this alpha.
    limits = GateLimits(LatencyLimit(9.0, alpha=1e-9, seconds=0.2))
    report = gate(new, artifact, bert_inputs, limits)
    assert next(check for check in report.checks if check.name == "latency").verdict is Verdict.UNDECIDED
    assert report.passed
    assert to_markdown(report).startswith("### bert-tiny: yes, latency undecided")
    assert [check.name for check in replace(report, strict=True).refusals] == ["latency"]
