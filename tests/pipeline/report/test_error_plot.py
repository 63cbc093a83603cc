from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from relaxtune.models import OnnxModel, TensorSpec
from relaxtune.pipeline.report.page import errors_chart
from relaxtune.pipeline.validate.array_comparison import HISTOGRAM_EDGES, compare_arrays
from relaxtune.pipeline.validate.report import render
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.pipeline.validate.validation import Observation, compare, validate

TIGHT = Tolerance(1e-3, 1e-3)


def test_a_histogram_counts_every_element_in_units_of_its_tolerance() -> None:
    expected = np.ones(6, np.float32)
    allowed = 2e-3
    got = expected + np.asarray([0.0, 0.05, 0.2, 0.9, 2.0, 50.0]) * allowed
    found = compare_arrays(expected, got, TIGHT)
    bins = dict(zip((*HISTOGRAM_EDGES, "more"), found.histogram, strict=True))
    assert {edge: count for edge, count in bins.items() if count} == {0.0: 1, 0.1: 1, 0.3: 1, 1.0: 1, 3.0: 1, "more": 1}
    assert abs((found.required_factor or 0) - 50.0) < 0.01


def test_elements_that_are_not_finite_are_beyond_every_edge_and_no_factor_would_do() -> None:
    expected = np.ones(4, np.float32)
    got = expected.copy()
    got[1] = np.nan
    found = compare_arrays(expected, got, TIGHT)
    assert (found.histogram[0], found.histogram[-1]) == (3, 1)
    assert found.required_factor is None
    assert compare_arrays(np.asarray([1, 2]), np.asarray([1, 3]), TIGHT).required_factor is None
    assert compare_arrays(np.asarray([1, 2]), np.asarray([1, 2]), TIGHT).required_factor == 0.0


def test_the_factor_is_the_smallest_that_passes() -> None:
    rng = np.random.default_rng(0)
    expected = rng.normal(0, 3, 100).astype(np.float32)
    got = expected + rng.normal(0, 1e-2, 100).astype(np.float32)
    factor = compare_arrays(expected, got, TIGHT).required_factor or 0.0
    assert factor > 1
    for change, passes in ((1.001, True), (0.999, False)):
        scaled = Tolerance(TIGHT.rtol * factor * change, TIGHT.atol * factor * change)
        assert compare_arrays(expected, got, scaled).passed is passes


def test_samples_are_added_up_stored_and_drawn(artifact: Path, bert_tiny: OnnxModel) -> None:
    report = validate(artifact, bert_tiny, samples=2)
    (first, *_) = report.outputs
    assert sum(first.histogram) == 2 * int(np.prod(first.shape))
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["outputs"][0]["histogram"] == {"edges": list(HISTOGRAM_EDGES), "counts": list(first.histogram)}
    assert 0 < data["outputs"][0]["worst"]["required_factor"] < 1
    drawn = errors_chart(data)
    assert drawn.count("<title>") == len(report.outputs) * (len(HISTOGRAM_EDGES) + 1)
    assert "of the tolerance" in drawn
    assert f"{first.histogram[0]:,} elements" in drawn
    assert errors_chart({"passed": True}) == ""


def test_the_table_marks_the_tolerance_in_the_histogram() -> None:
    spec = TensorSpec("y", "float32", (2,))
    seen = [Observation({"y": np.ones(2, np.float32)}, {"y": np.asarray([1.0, 9.0], np.float32)})]
    table = render(compare(seen, (spec,), TIGHT, model="m", reference="r", seed=0))
    (row,) = table.rows
    within, beyond = row[table.columns.index("errors / tolerance")].split("|")
    assert within.strip("·")
    assert beyond.strip("·")
