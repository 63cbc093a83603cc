from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from rich.console import Console

from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import PipelineError, ValidationFailedError
from relaxtune.pipeline.validate.comparison import (
    Comparison,
    Difference,
    compare_manifests,
    compare_outputs,
    render,
    ulps_apart,
)
from relaxtune.pipeline.validate.tolerances import Tolerance


def test_a_build_does_not_differ_from_itself(artifact: Path, bert_inputs: dict[str, np.ndarray]) -> None:
    outputs = [Module.load(artifact).run(bert_inputs) for _ in range(2)]
    for drift in compare_outputs(outputs[:1], outputs[1:], exact=True):
        assert drift.passed
        assert (drift.identical, drift.max_abs, drift.max_ulps) == (1.0, 0.0, 0)
        assert drift.argmax_agreement == 1.0
    assert compare_manifests(load_manifest(artifact), load_manifest(artifact)) == ((), ())


def test_one_changed_element_is_counted_and_fails_where_equal_bits_are_asked_for() -> None:
    a = {"y": np.linspace(1, 2, 8, dtype=np.float32)}
    b = {"y": a["y"].copy()}
    b["y"][3] = np.nextafter(b["y"][3], np.float32(9))
    (drift,) = compare_outputs([a], [b])
    assert drift.passed
    assert drift.identical == 7 / 8
    assert drift.max_ulps == 1
    (exact,) = compare_outputs([a], [b], exact=True)
    assert exact.reason == "1 of 8 elements have other bits"
    comparison = Comparison("a", "b", (exact,), limit="no bit")
    with pytest.raises(ValidationFailedError, match="a and b differ by more than no bit: output 'y': 1 of 8"):
        comparison.raise_if_failed()
    assert "FAILED" in str(render(comparison)[0].title)


def test_a_tolerance_decides_where_one_is_asked_for() -> None:
    a, b = {"y": np.ones((2, 4), np.float32)}, {"y": np.full((2, 4), 1.01, np.float32)}
    assert compare_outputs([a], [b], tolerance=Tolerance(0.02, 0.0))[0].passed
    (drift,) = compare_outputs([a], [b], tolerance=Tolerance(0.001, 0.0))
    assert not drift.passed
    assert "largest error 0.01" in drift.reason
    assert drift.max_rel == pytest.approx(0.01, rel=1e-4)


def test_the_worst_sample_counts() -> None:
    zero, one = {"y": np.zeros((1, 4), np.float32)}, {"y": np.eye(1, 4, dtype=np.float32)}
    (drift,) = compare_outputs([zero, zero], [zero, one])
    assert drift.max_abs == 1.0
    assert drift.identical == 7 / 8


def test_builds_of_two_precisions_have_no_ulps_and_other_bits() -> None:
    a = {"y": np.linspace(0.1, 1, 6, dtype=np.float32)}
    b = {"y": a["y"].astype(np.float16)}
    (drift,) = compare_outputs([a], [b], exact=True)
    assert drift.max_ulps is None
    assert drift.dtypes == ("float32", "float16")
    assert drift.reason == "another dtype"
    assert 0 < drift.max_abs < 1e-3


def test_integers_have_no_ulps() -> None:
    (drift,) = compare_outputs([{"y": np.asarray([1, 2])}], [{"y": np.asarray([1, 5])}])
    assert drift.max_ulps is None
    assert drift.max_abs == 3.0
    assert drift.identical == 0.5


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 1000))
@example(float(np.finfo(np.float32).max), 1)
def test_ulps_count_the_steps_between_two_numbers(value: float, steps: int) -> None:
    start = np.float32(value)
    moved = start
    # Beyond the largest number is infinity, with a warning.
    with np.errstate(over="ignore"):
        for _ in range(min(steps, 20)):
            moved = np.nextafter(moved, np.float32(np.inf))
    if np.isfinite(moved):
        # Both zeros are one number, so a walk over 0 is a step shorter than its calls.
        expected = min(steps, 20)
        assert ulps_apart(np.asarray([start]), np.asarray([moved]))[0] in (expected, expected - 1, expected + 1)
        if start > 0:
            assert ulps_apart(np.asarray([start]), np.asarray([moved]))[0] == expected


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_ulps_of_every_dtype(dtype: type) -> None:
    one = np.ones(1, dtype)
    above = (one + ml_dtypes.finfo(dtype).eps).astype(dtype)
    assert ulps_apart(one, above)[0] == 1
    assert ulps_apart(np.zeros(1, dtype), -np.zeros(1, dtype))[0] == 0


def test_what_cannot_be_compared_says_why() -> None:
    y = {"y": np.zeros((2, 3), np.float32)}
    with pytest.raises(PipelineError, match="other outputs: y beside z"):
        compare_outputs([y], [{"z": y["y"]}])
    with pytest.raises(PipelineError, match="shape 2x3 in the first build and 3x2 in the second"):
        compare_outputs([y], [{"y": y["y"].T}])
    with pytest.raises(PipelineError, match="1 and 2 samples"):
        compare_outputs([y], [y, y])


def test_manifests_differ_in_kernels_passes_and_versions(artifact: Path) -> None:
    a = load_manifest(artifact)
    first, *rest = a.kernels
    changed = replace(first, route="metaschedule", record_id=7, decision_sha256="0" * 64)
    b = replace(
        a,
        kernels=(changed, *rest[1:], replace(rest[0], function="another")),
        versions={**a.versions, "tvm": "9.9"},
        passes=(replace(a.passes[0], enabled=False), *a.passes[1:]),
        precision="fp16",
    )
    kernels, builds = compare_manifests(a, b)
    found = {(one.subject, one.field): (one.a, one.b) for one in (*kernels, *builds)}
    assert found[first.function, "route"] == ("fallback", "metaschedule")
    assert found[first.function, "record_id"] == ("-", "7")
    assert found[rest[0].function, "kernel"][1] == "not there"
    assert found["another", "kernel"][0] == "not there"
    assert found["version", "tvm"] == (a.versions["tvm"], "9.9")
    assert found[f"pass {a.passes[0].name}", "enabled"] == ("True", "False")
    assert found["precision", "name"] == ("-", "fp16")
    titles = [str(table.title) for table in render(Comparison("a", "b", (), kernels, builds))]
    assert titles[1:] == ["kernels that differ", "builds"]
    _, shorter = compare_manifests(a, replace(a, passes=a.passes[1:]))
    assert shorter[0].a == a.passes[0].name


def test_table_of_differences_is_short_and_shows_no_hashes() -> None:
    digest = "ab12" * 16
    kernels = [
        Difference(f"matmul{number}", field, a, b)
        for number in range(100)
        for field, a, b in (("kernel_hash", digest, "0" * 64), ("route", "template", "fallback"))
    ]
    console = Console(width=160, record=True, file=io.StringIO())
    for table in render(Comparison("a", "b", (), tuple(kernels), ())):
        console.print(table)
    shown = console.export_text()
    assert digest not in shown
    assert "kernel_hash; route: template -> fallback" in shown
    assert "and 80 more; --format json lists all" in shown
    assert len(shown.splitlines()) < 40


def test_difference_is_called_ok_only_where_something_was_asked_for() -> None:
    first = {"y": np.array([1.0, 0.0], np.float32)}
    second = {"y": np.array([1.0, 0.13], np.float32)}  # their cosine is 0.991

    def verdict(**asked: object) -> str:
        drift = compare_outputs([first], [second], **asked)
        table = render(Comparison("a", "b", drift, limit="something" if asked else ""))[0]
        return table.rows[0][-1]

    assert verdict() == "differs"
    assert verdict(tolerance=Tolerance(0.0, 1.0)) == "ok"
    assert "elements have other bits" in verdict(exact=True)
    same = render(Comparison("a", "b", compare_outputs([first], [first])))[0]
    assert [row[-1] for row in same.rows] == ["same bits"]


def test_equal_code_from_another_record_is_no_kernel_that_differs() -> None:
    records = (Difference("matmul", "record_id", "10", "-"), Difference("matmul", "decision_sha256", "ab", "-"))
    assert [str(table.title) for table in render(Comparison("a", "b", (), records, ()))] == ["drift from a to b"]
    other = (*records, Difference("matmul", "kernel_hash", "ab", "cd"))
    assert len(render(Comparison("a", "b", (), other, ()))) == 2
