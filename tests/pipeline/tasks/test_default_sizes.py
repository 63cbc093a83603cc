"""Sizes that kernels are tuned at where the user names none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.spec import AxisRelation, TensorSpec
from relaxtune.pipeline.tasks.default_sizes import default_points
from relaxtune.pipeline.tasks.sizes_of_tables import sizes_text, tuned_sizes

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def model_of(folder: Path, inputs: dict[str, tuple[int, list[int | str]]], weights: int = 1) -> OnnxModel:
    """Return a model of some inputs, each of which is its own output, and of many weights."""
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [f"{name}_out"]) for name in inputs],
        "inputs",
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in inputs.items()],
        [helper.make_tensor_value_info(f"{name}_out", dtype, shape) for name, (dtype, shape) in inputs.items()],
        [numpy_helper.from_array(np.zeros((weights, 1), np.float32), "weight")],
    )
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return load_model(path)


def names(model: OnnxModel, kind: str = "cuda") -> list[str]:
    return [str(point) for point in default_points(model, kind)]


IDS = {"input_ids": (INT, ["batch", "sequence"]), "attention_mask": (INT, ["batch", "sequence"])}


def test_an_encoder_has_batches_and_parts_of_its_limit(tmp_path: Path) -> None:
    model = replace(model_of(tmp_path, IDS), relations=(AxisRelation("sequence", "<=", "64"),))
    points = default_points(model, "cuda")
    assert [dict(point.sizes)["sequence"] for point in points if dict(point.sizes)["batch"] == 1] == [8, 16, 64]
    assert {dict(point.sizes)["batch"] for point in points} == {1, 8, 32}
    # 8 tokens beside 2,048: the square root of 256.
    assert points[0].count == 16
    assert points[-1].count == 1


def test_without_a_limit_lengths_are_parts_of_512(tmp_path: Path) -> None:
    found = names(model_of(tmp_path, IDS))
    assert [one for one in found if "batch=1 " in one] == [f"batch=1 sequence={length}" for length in (64, 128, 512)]


@pytest.mark.slow
def test_calls_that_take_long_are_left_out_but_for_one(tmp_path: Path) -> None:
    assert names(model_of(tmp_path, IDS, 10_000_000), "llvm")[-1] == "batch=8 sequence=128"
    assert names(model_of(tmp_path, IDS, 100_000_000), "llvm") == ["batch=1 sequence=64", "batch=1 sequence=128"]
    assert names(model_of(tmp_path, IDS, 10**8), "cuda")[-1] == "batch=32 sequence=512"


@pytest.mark.parametrize("axes", [("batch", "sequence"), ("logits_dim_0", "logits_dim_1")])
def test_calls_whose_results_have_more_elements_than_kernels_count_are_left_out(tmp_path: Path, axes) -> None:
    model = model_of(tmp_path, IDS)
    logits = TensorSpec("logits", "float32", (*axes, 262_144))
    assert "batch=32 sequence=512" in names(model)
    assert names(replace(model, outputs=(logits,))) == [one for one in names(model) if one != "batch=32 sequence=512"]


def test_a_decoder_has_steps_after_its_cache_and_prefills(tmp_path: Path) -> None:
    inputs = {
        "input_ids": (INT, ["batch", "new"]),
        "attention_mask": (INT, ["batch", "past + new"]),
        "past_key_values.0.key": (FLOAT, ["batch", 4, "past", 16]),
    }
    model = replace(model_of(tmp_path, inputs), relations=(AxisRelation("past + new", "<=", "128"),))
    found = [one for one in names(model) if one.startswith("batch=1 ")]
    assert found == [
        "batch=1 past=32 new=1", "batch=1 past=127 new=1", "batch=1 past=1 new=32", "batch=1 past=1 new=127"
    ]  # fmt: skip


def test_images_have_batches(tmp_path: Path) -> None:
    assert names(model_of(tmp_path, {"pixels": (FLOAT, ["batch", 3, 32, 32])})) == ["batch=1", "batch=8", "batch=32"]


def test_known_sizes_need_none(tmp_path: Path) -> None:
    assert default_points(model_of(tmp_path, {"input_ids": (INT, [1, 64])}), "cuda") == ()


@pytest.mark.parametrize("kind", ["cuda", "llvm"])
def test_the_line_of_the_sizes_says_how_to_change_them(tmp_path: Path, kind: str) -> None:
    text = sizes_text(tuned_sizes(model_of(tmp_path, IDS), {}, (), kind), ())
    assert text.startswith("compared at ")
    assert "9 sizes: batch=1 sequence=64; " in text
    assert text.endswith("--profile batch=MIN:TYPICAL:MAX,sequence=MIN:TYPICAL:MAX")
