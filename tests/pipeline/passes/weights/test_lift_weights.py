from __future__ import annotations

import numpy as np
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.kit.ir import main_of
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, make_onnx, run_lowered, small_model

RNG = np.random.default_rng(0)


def two_layers(same: bool) -> OnnxModel:
    """Return two linear layers, the weights of which are equal or not."""
    first = RNG.standard_normal((16, 16)).astype("float32")
    second = first.copy() if same else RNG.standard_normal((16, 16)).astype("float32")
    nodes = [
        helper.make_node("MatMul", ["x", "layer.0/weight"], ["a"], name="mm0"),
        helper.make_node("Add", ["a", "bias"], ["b"], name="add0"),
        helper.make_node("Relu", ["b"], ["c"], name="relu"),
        helper.make_node("MatMul", ["c", "1.weight"], ["y"], name="mm1"),
    ]
    bias = RNG.standard_normal(16).astype("float32")
    constants = {"layer.0/weight": first, "bias": bias, "1.weight": second}
    io = ("float", (2, 16))
    return make_onnx(nodes, {"x": io}, {"y": io}, constants)


def test_weights_are_named_after_initialisers() -> None:
    model = two_layers(same=False)
    lowered = lower(import_model(model), LLVM)
    assert list(lowered.weights) == ["layer_0_weight", "bias", "w_1_weight"]
    # 16 columns are one panel of `pack_weights`.
    np.testing.assert_array_equal(lowered.weights["w_1_weight"].reshape(16, 16), model.array("1.weight"))
    main = main_of(lowered.mod)
    assert [param.name for param in main.params] == ["x", *lowered.weights]
    assert int(main.attrs["num_input"]) == 1


def test_equal_weights_share_one_parameter() -> None:
    model = two_layers(same=True)
    lowered = lower(import_model(model), LLVM)
    assert list(lowered.weights) == ["layer_0_weight", "bias"]
    feeds = {"x": RNG.standard_normal((2, 16)).astype("float32")}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-5)


def test_every_weight_is_lifted_when_the_threshold_is_zero() -> None:
    lowered = lower(import_model(two_layers(same=False)), LLVM, LoweringOptions(weight_bytes_min=0))
    assert {"bias", "layer_0_weight", "w_1_weight"} <= set(lowered.weights)


def test_weights_stay_in_the_module_when_embedded() -> None:
    model = two_layers(same=False)
    lowered = lower(import_model(model), LLVM, LoweringOptions(embed_weights=True))
    assert lowered.weights == {}
    assert [param.name for param in main_of(lowered.mod).params] == ["x"]
    feeds = {"x": RNG.standard_normal((2, 16)).astype("float32")}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-5)


def test_combined_and_cast_weights_are_named_after_what_they_are_made_of() -> None:
    lowered = lower(import_model(small_model("bert-tiny")), LLVM, LoweringOptions(precision="fp16"))
    prefix = "encoder_layer_0_attention_"
    combined = "__".join(f"{prefix}{part}_weight" for part in ("query", "key", "value"))
    assert lowered.weights[combined].shape == (128, 384)
    assert lowered.weights[combined].dtype == np.float16
    assert lowered.weights["encoder_layer_0_intermediate_dense_weight"].dtype == np.float16
