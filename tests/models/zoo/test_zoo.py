"""The zoo's graphs are valid ONNX and compute what NumPy computes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from relaxtune.models import ModelError, OnnxModel, get_preset, list_models, load_model, random_inputs
from tests.models.numpy_forward import forward

TINY = tuple(name for name in list_models() if "-tiny" in name and "outliers" not in name)
ENCODERS_AND_PREFILL = tuple(
    name for name in TINY if name.endswith("-tiny") and name not in ("vit-tiny", "whisper-tiny")
)
# float32 against float64 through two layers; float16 activations are near 1, where a step is 0.001.
TOLERANCE = {"fp32": 2e-5, "fp16": 2e-2}


def run_ort(model: OnnxModel, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.serialize(), options, providers=["CPUExecutionProvider"])
    names = [spec.name for spec in model.outputs]
    return dict(zip(names, session.run(names, inputs), strict=True))


def symbolic_shapes(name: str) -> dict[str, tuple[int | str, ...]]:
    return {spec.name: spec.shape for spec in get_preset(name).inputs}


def assert_agree(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], atol: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        np.testing.assert_allclose(got[name].astype(np.float64), value, rtol=atol, atol=atol, err_msg=name)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", TINY)
def test_graph_passes_full_checker_and_strict_inference(name: str, precision: str) -> None:
    for shapes in ({}, symbolic_shapes(name)):
        model = load_model(name, shapes=shapes, precision=precision)
        onnx.checker.check_model(model.proto, full_check=True)
        if not shapes:
            dims = [dim for value in model.proto.graph.value_info for dim in value.type.tensor_type.shape.dim]
            unknown = [dim for dim in dims if not dim.HasField("dim_value")]
            assert len(unknown) < len(dims) / 10
        onnx.shape_inference.infer_shapes(model.proto, check_type=True, strict_mode=True, data_prop=True)
        assert {entry.domain: entry.version for entry in model.proto.opset_import} == {"": 18}
        assert all(spec.is_static for spec in model.inputs) == (not shapes)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("sample", [0, 1])
def test_graph_agrees_with_numpy_at_several_shapes(name: str, precision: str, sample: int) -> None:
    model = load_model(name, shapes=symbolic_shapes(name), precision=precision, seed=3)
    for dims in ({"batch": 1, "sequence": 1, "past_sequence": 0}, {"batch": 3, "sequence": 37, "past_sequence": 19}):
        inputs = random_inputs(model, seed=5, sample=sample, dims=dims)
        assert_agree(run_ort(model, inputs), forward(model, inputs), TOLERANCE[precision])


@pytest.mark.parametrize("name", ["bert-tiny", "t5-tiny", "gpt2-tiny", "llama-tiny"])
def test_long_sequence_agrees_with_numpy(name: str) -> None:
    # 300 tokens reach every bucket of T5's position bias, its borders at 16, 32 and 64 included.
    model = load_model(name, shapes={"input_ids": (2, 300)})
    inputs = random_inputs(model, seed=1)
    assert_agree(run_ort(model, inputs), forward(model, inputs), TOLERANCE["fp32"])


@pytest.mark.parametrize("name", TINY)
def test_static_graph_equals_symbolic_graph(name: str) -> None:
    dims = {"batch": 2, "sequence": 24, "past_sequence": 9}
    symbolic = load_model(name, shapes=symbolic_shapes(name))
    inputs = random_inputs(symbolic, seed=2, dims=dims)
    static = load_model(name, shapes={key: value.shape for key, value in inputs.items()})
    got, expected = run_ort(static, inputs), run_ort(symbolic, inputs)
    for spec in static.outputs:
        assert got[spec.name].shape == spec.shape
    # Runtimes fuse the two differently, so the last bits may differ.
    assert_agree(got, expected, 5e-6)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_chained_decode_steps_equal_prefill(name: str) -> None:
    length, batch = 11, 2
    prefill = load_model(name, shapes={"input_ids": (batch, length)}, seed=4)
    step = load_model(f"{name}-decode", shapes=symbolic_shapes(f"{name}-decode"), seed=4)
    ids = random_inputs(prefill, seed=0)["input_ids"]
    expected = run_ort(prefill, {"input_ids": ids, "attention_mask": np.ones_like(ids)})["logits"]
    session = ort.InferenceSession(step.serialize(), providers=["CPUExecutionProvider"])
    caches = [spec for spec in step.inputs if spec.name.startswith("past_key_values")]
    past = {spec.name: np.zeros((batch, spec.shape[1], 0, spec.shape[3]), np.float32) for spec in caches}
    for position in range(length):
        feed = {
            "input_ids": ids[:, position : position + 1],
            "attention_mask": np.ones((batch, position + 1), np.int64),
            "position_ids": np.full((batch, 1), position),
        }
        logits, *grown = session.run(None, {**feed, **past})
        past = dict(zip(past, grown, strict=True))
        np.testing.assert_allclose(logits[:, 0], expected[:, position], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS_AND_PREFILL)
def test_padding_does_not_reach_kept_tokens(name: str) -> None:
    model = load_model(name, shapes={"input_ids": (1, 12)}, precision="fp16")
    inputs = random_inputs(model, seed=0, sample=1)
    inputs["attention_mask"][:, 7:] = 0
    changed = {**inputs, "input_ids": inputs["input_ids"].copy()}
    changed["input_ids"][:, 7:] = (changed["input_ids"][:, 7:] + 1) % 1000
    first, second = run_ort(model, inputs), run_ort(model, changed)
    output = next(iter(first))
    np.testing.assert_array_equal(first[output][:, :7], second[output][:, :7])
    assert not np.array_equal(first[output][:, 7:], second[output][:, 7:])


@pytest.mark.parametrize("name", ["bert-tiny", "llama-tiny"])
def test_fully_masked_row_stays_finite_in_fp16(name: str) -> None:
    model = load_model(name, shapes={"input_ids": (1, 8)}, precision="fp16")
    inputs = random_inputs(model, seed=0)
    inputs["attention_mask"][:] = 0
    assert all(np.isfinite(value).all() for value in run_ort(model, inputs).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_every_weight_changes_the_output(name: str) -> None:
    model = load_model(name, shapes=symbolic_shapes(name))
    inputs = random_inputs(model, seed=0, dims={"batch": 1, "sequence": 40, "past_sequence": 5})
    weights = {key for key in dict(model.arrays()) if not key.startswith("constant_")}
    read = {name for node in model.proto.graph.node for name in node.input}
    assert weights <= read
    plain = forward(model, inputs).values()
    for layer in ("0", "1"):
        # One bias or gain of every kind a layer, set to zero, must be seen.
        for key in sorted(k for k in weights if f".{layer}." in k and len(model.array(k).shape) == 1):
            changed = load_model(name, shapes=symbolic_shapes(name))
            tensor = next(t for t in changed.proto.graph.initializer if t.name == key)
            tensor.raw_data = bytes(len(tensor.raw_data))
            different = any(
                not np.allclose(a, b, atol=1e-4) for a, b in zip(plain, forward(changed, inputs).values(), strict=True)
            )
            # softmax(q (k + c)) does not depend on c: the key's bias is the one that cannot be seen.
            assert different != key.endswith("attention.key.bias"), key


@pytest.mark.parametrize("name", ["bert-tiny", "llama-tiny-decode"])
def test_weights_follow_the_seed(name: str) -> None:
    first, again, other = load_model(name, seed=1), load_model(name, seed=1), load_model(name, seed=2)
    assert first.sha256 == again.sha256
    assert first.sha256 != other.sha256
    assert first.proto.SerializeToString(deterministic=True) == again.proto.SerializeToString(deterministic=True)


def test_weights_are_the_same_in_another_process() -> None:
    code = "from models import load_model; print(load_model('gpt2-tiny').sha256)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == load_model("gpt2-tiny").sha256


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_prefill_and_decode_share_their_weights(name: str) -> None:
    prefill, step = dict(load_model(name).arrays()), dict(load_model(f"{name}-decode").arrays())
    shared = {key for key in prefill if not key.startswith("constant_")}
    assert shared == {key for key in step if not key.startswith("constant_")}
    assert all(np.array_equal(prefill[key], step[key]) for key in shared)


def test_query_key_value_are_three_named_matmuls() -> None:
    names = {node.name: node.op_type for node in load_model("bert-tiny").proto.graph.node}
    for which in ("query", "key", "value"):
        assert names[f"/encoder/layer.0/attention/{which}/MatMul"] == "MatMul"
        assert names[f"/encoder/layer.0/attention/{which}/Add"] == "Add"
    assert len(names) == len(load_model("bert-tiny").proto.graph.node)


def test_fp16_weights_are_the_rounded_fp32_weights() -> None:
    wide, narrow = load_model("bert-tiny"), load_model("bert-tiny", precision="fp16")
    key = "encoder.layer.1.intermediate.dense.weight"
    np.testing.assert_array_equal(wide.array(key).astype(np.float16), narrow.array(key))
    assert narrow.outputs[0].dtype == "float16"


@pytest.mark.parametrize(
    ("name", "million"),
    [
        ("bert-base", 109.5),
        ("bert-large", 335.1),
        ("gpt2-small", 124.4),
        ("vit-base", 86.6),
        ("t5-small", 35.3),
        ("whisper-base", 72.6),
    ],
)
@pytest.mark.slow
def test_base_models_have_the_true_size(name: str, million: float) -> None:
    model = load_model(name)
    count = sum(np.prod(t.dims) for t in model.proto.graph.initializer if not t.name.startswith("constant_"))
    assert count / 1e6 == pytest.approx(million, abs=0.1)


def test_list_models_names_every_preset() -> None:
    assert {"bert-base", "gpt2-small-decode", "llama-1b", "llama-1b-decode", "vit-base", "t5-small"} <= set(
        list_models()
    )
    for name in list_models():
        assert get_preset(name).name == name


@pytest.mark.parametrize(
    "name", ["bert-base", "gpt2-small", "gpt2-small-decode", "llama-1b-decode", "vit-base", "t5-small"]
)
def test_a_name_may_say_how_many_layers(name: str) -> None:
    whole, short = get_preset(name), get_preset(f"{name}-3-layers")
    assert short.name == f"{name}-3-layers"
    assert short.config == dataclasses.replace(whole.config, layers=3)
    assert [spec for spec in short.inputs if "past" not in spec.name] == [
        spec for spec in whole.inputs if "past" not in spec.name
    ]
    assert len([spec for spec in short.inputs if "past" in spec.name]) == (6 if name.endswith("-decode") else 0)
    assert short.limits == whole.limits


@pytest.mark.parametrize("name", ["bert-base-0-layers", "bert-large-outliers-2-layers", "bert-bas-2-layers"])
def test_a_number_of_layers_needs_a_plain_model(name: str) -> None:
    with pytest.raises(ModelError, match="no zoo model is called"):
        get_preset(name)


def test_unknown_name_lists_close_and_all_names() -> None:
    with pytest.raises(
        ModelError, match=r"'bert-bas'.* Did you mean bert-base.*Zoo models: bert-tiny, bert-base.*\.onnx"
    ):
        get_preset("bert-bas")
    with pytest.raises(ModelError, match=r"called 'zzzz'\. Zoo models"):
        load_model("zzzz")


def test_models_imports_without_tvm_and_torch() -> None:
    code = "import models, sys; print([m for m in ('tvm', 'torch', 'onnxruntime') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_sizes_that_nobody_gave_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="relaxtune")
    load_model("bert-tiny", any_operator=True)
    load_model("bert-tiny", shapes={"input_ids": ("batch", 32)})
    assert not caplog.messages
    load_model("bert-tiny", shapes={"sequence": (32,)})
    assert caplog.messages == [
        "zoo model bert-tiny: batch 1; --dim AXIS=SIZE sets another size, --shape IN=AxB leaves A and B free"
    ]
