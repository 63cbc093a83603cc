"""Ranges of activations: what each method finds, what is refused, and the record's way to an artifact's scales."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from relaxtune.models import OnnxModel, load_model, random_inputs
from relaxtune.pipeline.errors import PipelineError, UsageError
from relaxtune.pipeline.jobs.calibrate import calibrate_model, samples_of_texts
from relaxtune.pipeline.passes import LoweringOptions
from relaxtune.pipeline.precision.calibration import CalibrationRecord, Method, TensorRange, graph_key
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from tests.pipeline.passes.pass_cases import make_onnx

W = np.random.default_rng(0).standard_normal((8, 8)).astype("float32")
SAMPLE = {"x": np.random.default_rng(1).standard_normal((4, 8)).astype("float32")}


def two_matmuls(rows: int | str = "n", weight: np.ndarray = W) -> OnnxModel:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Exp", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w"], ["y"]),
    ]
    shape = ("float", [rows, 8])
    return make_onnx(nodes, {"x": shape}, {"y": shape}, {"w": weight})


def test_limits_are_of_what_matmuls_read_over_all_samples() -> None:
    samples = [SAMPLE, {"x": SAMPLE["x"][:2] * np.float32(0.5)}]
    record = calibrate_model(two_matmuls(), samples)
    most = float(np.abs(SAMPLE["x"]).max())
    assert record.ranges["x"] == TensorRange(most, most, 0.0)
    exact = np.exp(np.concatenate([one["x"] for one in samples]) @ W).max()
    assert record.ranges["b"].limit == pytest.approx(exact, rel=1e-5)
    assert (set(record.ranges), record.method, record.samples) == ({"x", "b"}, "max", 2)
    assert record.data != calibrate_model(two_matmuls(), samples[:1]).data


def test_other_methods_clip_outliers() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((5000, 8)).astype("float32")
    x[0, 0] = 40_000.0
    found = {method: calibrate_model(two_matmuls(weight=W * 0), [{"x": x}], method).ranges["x"] for method in Method}
    assert {one.largest for one in found.values()} == {40_000.0}
    # All but the outlier is in the first bin of the histogram.
    assert found[Method.PERCENTILE].limit < 20
    assert found[Method.PERCENTILE].outliers == 1 / x.size
    # An error of 16 in 40,000 squared is less than that of clipping.
    assert found[Method.MSE].limit > 38_000
    assert found[Method.ENTROPY].limit <= 40_000


def test_squared_error_prefers_small_steps_where_outliers_are_near() -> None:
    # Sizes between the two largest numbers of float8, 416 and 448 of 448, are rounded by up to 16 of 448.
    x = np.full((1000, 8), 432 / 448, np.float32)
    x[0, 0] = 1.0
    limit = calibrate_model(two_matmuls(weight=W * 0), [{"x": x}], Method.MSE).ranges["x"].limit
    assert limit == pytest.approx(432 / 448, abs=0.02)


@pytest.mark.parametrize(
    ("samples", "error", "match"),
    [
        ([], UsageError, "no sample to calibrate"),
        ([{}], UsageError, "lacks inputs x; expected arrays x"),
        ([{**SAMPLE, "z": SAMPLE["x"]}], UsageError, "has unknown inputs z"),
        ([SAMPLE, {"x": SAMPLE["x"][0]}], UsageError, "sample 2 .* has shape 8, expected n x 8"),
        ([{"x": SAMPLE["x"][:, :4]}], UsageError, "has shape 4x4, expected n x 8"),
        ([{"x": SAMPLE["x"][:0]}], UsageError, "one element at least"),
        ([{"x": SAMPLE["x"].astype(np.complex64)}], UsageError, "is complex64, expected float32"),
        ([{"x": np.full((1, 8), np.nan, np.float32)}], UsageError, "has NaN; remove the sample"),
        ([{"x": np.full((1, 8), 1e30, np.float32)}], PipelineError, "tensor 'b' .* has infinite elements or NaN"),
    ],
)
def test_bad_samples_have_a_remedy(samples: list[dict[str, np.ndarray]], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        calibrate_model(two_matmuls(weight=np.abs(W)), samples)


def test_a_graph_without_matmuls_by_constants_is_refused() -> None:
    node = helper.make_node("MatMul", ["x", "x"], ["y"])
    model = make_onnx([node], {"x": ("float", [8, 8])}, {"y": ("float", [8, 8])}, {})
    with pytest.raises(UsageError, match="there is nothing to calibrate"):
        calibrate_model(model, [{"x": W}])


@dataclass
class Words:
    """Stands for a tokenizer: a token for each word."""

    truncation: dict[str, int] | None = None
    padding: dict[str, int] | None = field(default_factory=lambda: {"pad_id": 7})

    def no_padding(self) -> None:
        self.padding = None

    def enable_truncation(self, length: int) -> None:
        self.truncation = {"max_length": length}

    def encode_batch(self, texts: list[str]) -> list[Encoding]:
        assert self.truncation is not None
        return [Encoding([len(word) for word in text.split()][: self.truncation["max_length"]]) for text in texts]


@dataclass
class Encoding:
    """What a tokenizer makes of a text."""

    ids: list[int]

    @property
    def attention_mask(self) -> list[int]:
        return [1] * len(self.ids)

    type_ids = attention_mask


def test_texts_are_calls_of_one_without_padding_or_fill_a_fixed_batch() -> None:
    texts = ["a bb ccc", "dddd", ""]
    free = samples_of_texts(load_model("bert-tiny", shapes={"input_ids": ("b", "s")}), texts, Words())
    assert [one["input_ids"].tolist() for one in free] == [[[1, 2, 3]], [[4]]]
    fixed = samples_of_texts(load_model("bert-tiny", shapes={"input_ids": (3, 2)}), texts, Words())
    assert [one["input_ids"].tolist() for one in fixed] == [[[1, 2], [4, 7], [1, 2]]]
    assert fixed[0]["attention_mask"].tolist() == [[1, 1], [1, 0], [1, 1]]
    with pytest.raises(UsageError, match="record calls as"):
        samples_of_texts(two_matmuls(), texts, Words())


def test_a_record_is_of_its_graph_at_any_size_and_of_no_other(tmp_path: Path) -> None:
    small, large = (load_model("bert-tiny", shapes={"input_ids": shape}) for shape in ((1, 16), (2, 32)))
    record = calibrate_model(small, [random_inputs(small, seed=0)])
    record.write(tmp_path / "r.json")
    assert CalibrationRecord.read(tmp_path / "r.json") == record
    record.scales().require_graph(large)
    assert graph_key(large) != graph_key(load_model("bert-tiny", seed=1))
    options = LoweringOptions(precision="fp8", calibration=record.scales())
    request = ModelRequest("bert-tiny", {"input_ids": (2, 32)}, "cuda:sm_90a", options, seed=1)
    with pytest.raises(UsageError, match="run `relaxtune calibrate` on this model again"):
        prepare_model(request)
    with pytest.raises(UsageError, match="only fp8 has static scales"):
        prepare_model(replace(request, lowering=replace(options, precision="fp16")))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": "relaxtune calibration 9"}),
        json.dumps({"format": "relaxtune calibration 1", "ranges": {"x": {"limit": -1, "largest": 1, "outliers": 0}}}),
        json.dumps({"format": "relaxtune calibration 1", "ranges": {}}),
    ],
)
def test_files_that_hold_no_record_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match="is no calibration record"):
        CalibrationRecord.read(tmp_path / "r.json")
