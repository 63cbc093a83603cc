"""Random inputs respect the model, zoo graph or user's export."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import (
    InputKind,
    OnnxModel,
    TensorSpec,
    describe_inputs,
    get_preset,
    load_model,
    random_inputs,
    unpadded_inputs,
)
from relaxtune.models.errors import ModelShapeError

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT


def user_model(
    inputs: dict[str, tuple[int, tuple[int | str, ...]]],
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray] | None = None,
    functions: list[onnx.FunctionProto] | None = None,
) -> OnnxModel:
    """Return a model straight from its parts: what is tested is how the graph is read, not whether it is complete."""
    values = [helper.make_tensor_value_info(name, kind, list(shape)) for name, (kind, shape) in inputs.items()]
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", values, [helper.make_tensor_value_info("y", FLOAT, None)], tensors)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("local", 1)]
    names = {INT64: "int64", FLOAT: "float32", TensorProto.BOOL: "bool", TensorProto.INT32: "int32"}
    specs = tuple(TensorSpec(name, names[kind], shape) for name, (kind, shape) in inputs.items())
    proto = helper.make_model(graph, opset_imports=opsets, functions=functions or [], ir_version=8)
    return OnnxModel(name="user", proto=proto, path=None, sha256="", inputs=specs, outputs=())


def node(op_type: str, inputs: str, output: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], name=f"n_{output}", **attributes)


PLACES = np.arange(9).reshape(1, 1, 9)
TABLE = np.zeros((50, 4), np.float32)


@pytest.mark.parametrize(
    ("nodes", "weights", "high"),
    [
        ([node("Gather", "table ids")], {"table": TABLE}, 50),
        ([node("Gather", "table ids", axis=1)], {"table": TABLE}, 4),
        ([node("Gather", "table ids", axis=-1)], {"table": TABLE}, 4),
        ([node("GatherElements", "table ids")], {"table": TABLE}, 50),
        ([node("GatherND", "table ids")], {"table": TABLE}, 50),
        ([node("OneHot", "ids depth values")], {"depth": np.array(9), "values": np.zeros(2, np.float32)}, 9),
        # One-hot by comparison, as jax2tf writes it: magika's 257 bytes were drawn from 0 and 1.
        (
            [node("Unsqueeze", "ids last", "u"), node("Equal", "u places")],
            {"last": np.array([-1]), "places": PLACES},
            9,
        ),
        # The narrowest of two tables counts.
        ([node("Gather", "table ids", "a"), node("Gather", "small ids")], {"table": TABLE, "small": TABLE[:7]}, 7),
        # As exporters write it: cast and reshaped before, the weight dequantised or cast.
        (
            [node("Cast", "ids", "c", to=INT64), node("Reshape", "c shape", "r"), node("Gather", "table r")],
            {"table": TABLE, "shape": np.array([-1])},
            50,
        ),
        (
            [node("DequantizeLinear", "q scale", "d"), node("Cast", "d", "w", to=FLOAT), node("Gather", "w ids")],
            {"q": np.zeros((30, 4), np.uint8), "scale": np.array(0.1, np.float32)},
            30,
        ),
        # OPT adds 2 to its positions; RoBERTa's table is shifted as well.
        ([node("Add", "ids two", "p"), node("Gather", "table p")], {"table": TABLE, "two": np.array([2])}, 48),
        ([node("Sub", "ids two", "p"), node("Gather", "table p")], {"table": TABLE, "two": np.array([2])}, 52),
        (
            [
                helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.array(2))),
                helper.make_node("Constant", [], ["table"], value=numpy_helper.from_array(TABLE)),
                node("Identity", "two", "t"),
                node("Add", "t ids", "p"),
                node("Gather", "table p"),
            ],
            {},
            48,
        ),
        (
            [helper.make_node("EmbedLayerNormalization", ["ids", "types", "table"], ["y"], domain="com.microsoft")],
            {"table": TABLE},
            50,
        ),
        (
            [helper.make_node("GatherBlockQuantized", ["table", "ids", "scale"], ["y"], domain="com.microsoft")],
            {"table": TABLE, "scale": TABLE},
            50,
        ),
    ],
)
def test_index_range_is_found(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], high: int) -> None:
    model = user_model({"ids": (INT64, (4, 400))}, nodes, weights)
    (rule,) = describe_inputs(model)
    assert (rule.kind, rule.high) == (InputKind.INDEX, high)
    assert "indexes a table of" in rule.reason
    values = random_inputs(model, seed=0)["ids"]
    assert values.min() == rule.low
    assert values.max() == high - 1


def test_index_range_is_found_inside_a_local_function() -> None:
    opset = helper.make_opsetid("", 18)
    look_up = helper.make_function(
        "local", "LookUp", ["t", "i"], ["o"], [helper.make_node("Gather", ["t", "i"], ["o"])], [opset]
    )
    call = helper.make_node("LookUp", ["table", "ids"], ["y"], domain="local")
    model = user_model({"ids": (INT64, (1, 9))}, [call], {"table": TABLE}, [look_up])
    assert describe_inputs(model)[0].high == 50


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Cast", "a", "f", to=FLOAT), node("Sub", "one f")],
        [node("Cast", "a", to=TensorProto.BOOL)],
        [node("Unsqueeze", "a axes", "u"), node("Cast", "u", "b", to=TensorProto.BOOL)],
        [node("Equal", "a zero")],
        [node("Where", "a one zero")],
        [node("Not", "a")],
        [node("And", "a a")],
    ],
)
def test_mask_is_found_by_its_use(nodes: list[onnx.NodeProto]) -> None:
    weights = {"one": np.array(1, np.float32), "zero": np.array(0), "axes": np.array([1])}
    model = user_model({"a": (INT64, (2, 9))}, nodes, weights)
    (rule,) = describe_inputs(model)
    assert rule.kind is InputKind.MASK
    assert rule.reason.startswith("used as a mask by ")


def test_unknown_integer_is_zero_or_one_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    model = user_model({"lengths": (TensorProto.INT32, (64,))}, [node("Mul", "lengths lengths")])
    (rule,) = describe_inputs(model)
    assert (rule.kind, rule.low, rule.high) == (InputKind.UNKNOWN_INTEGER, 0, 2)
    with caplog.at_level(logging.WARNING):
        values = random_inputs(model, seed=0)["lengths"]
    assert "range of integer inputs lengths of 'user' is unknown; drawn from 0..1" in caplog.text
    assert values.dtype == np.int32
    assert set(values) == {0, 1}


@pytest.mark.parametrize(
    ("use", "kind", "kept", "dropped"),
    [
        ([node("Add", "scores attn_mask")], InputKind.ADDITIVE_MASK, 0.0, -1e4),
        ([node("Mul", "scores attn_mask")], InputKind.MASK, 1.0, 0.0),
    ],
)
def test_float_mask_is_added_or_multiplied(
    use: list[onnx.NodeProto], kind: InputKind, kept: float, dropped: float
) -> None:
    model = user_model({"attn_mask": (FLOAT, (3, 1, 5, 8))}, use, {"scores": np.zeros((3, 2, 5, 8), np.float32)})
    assert describe_inputs(model)[0].kind is kind
    mask = random_inputs(model, seed=0)["attn_mask"]
    assert set(np.unique(mask)) == {kept, dropped}
    assert (mask == mask[:, :, :1]).all()
    assert (random_inputs(model, seed=0, sample=1)["attn_mask"] == kept).all()


def test_masks_pad_on_the_right_and_keep_a_token() -> None:
    model = load_model("bert-tiny", shapes={"input_ids": (5, 16)})
    for sample in range(6):
        mask = random_inputs(model, seed=0, sample=sample)["attention_mask"]
        assert (np.diff(mask, axis=1) <= 0).all()
        assert (mask[:, 0] == 1).all()
        assert (mask.min() == 1) == (sample == 1)
        assert mask.sum(axis=1).min() >= 8
    assert (unpadded_inputs(model, seed=0)["attention_mask"] == 1).all()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 1)])
def test_small_masks_are_drawn(shape: tuple[int, ...]) -> None:
    mask = random_inputs(user_model({"mask": (TensorProto.BOOL, shape)}, []), seed=0)["mask"]
    assert mask.shape == shape
    assert mask.dtype == np.bool_
    assert mask.reshape(-1)[0]


@pytest.mark.parametrize("name", ["gpt2-tiny-decode", "llama-tiny-decode"])
def test_decode_step_continues_after_the_kept_tokens(name: str) -> None:
    model = load_model(
        name, shapes={"input_ids": (4, 1), "past_key_values.0.key": (4, 2, 30, 64 if "gpt2" in name else 32)}
    )
    for sample in range(3):
        inputs = random_inputs(model, seed=0, sample=sample)
        mask = inputs["attention_mask"]
        assert mask.shape == (4, 31)
        assert (mask[:, -1] == 1).all()
        assert (np.diff(mask[:, :-1], axis=1) <= 0).all()
        np.testing.assert_array_equal(inputs["position_ids"][:, 0], mask[:, :-1].sum(axis=1))
        assert mask.min() == (sample == 1)
        assert inputs["past_key_values.1.value"].std() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"position_ids": (INT64, (2, 5))}, [[0, 1, 2, 3, 4]] * 2),
        ({"cache_position": (INT64, (3,)), "past_key": (FLOAT, (1, 2, 6, 4))}, [6, 7, 8]),
        ({"position": (INT64, ()), "past_key": (FLOAT, (1, 2, 6, 4))}, 6),
        ({"position_ids": (INT64, (1, 1)), "past_key": (FLOAT, (1, 2, 6, 4)), "mask": (INT64, (1, 1))}, [[6]]),
    ],
)
def test_positions_go_up_by_one(inputs: dict[str, tuple[int, tuple[int, ...]]], expected: object) -> None:
    values = random_inputs(user_model(inputs, []), seed=0)
    np.testing.assert_array_equal(values[next(iter(inputs))], expected)


def test_positions_stay_in_their_table() -> None:
    model = user_model({"position_ids": (INT64, (1, 9))}, [node("Gather", "table position_ids")], {"table": TABLE[:6]})
    np.testing.assert_array_equal(random_inputs(model, seed=0)["position_ids"], [[0, 1, 2, 3, 4, 5, 5, 5, 5]])


def test_floats_and_flags_are_drawn_in_their_dtype() -> None:
    model = load_model("vit-tiny", precision="fp16", shapes={"pixel_values": (2, 3, 32, 32)})
    pixels = random_inputs(model, seed=0)["pixel_values"]
    assert pixels.dtype == np.float16
    assert pixels.std() == pytest.approx(1.0, abs=0.05)
    flags = random_inputs(user_model({"use_it": (TensorProto.BOOL, (64,))}, []), seed=0)["use_it"]
    assert set(flags) == {False, True}


def test_same_seed_and_sample_give_the_same_inputs() -> None:
    model = load_model("llama-tiny", shapes={"input_ids": (2, 16)})
    first, again = (random_inputs(model, seed=7, sample=2)["input_ids"] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    for seed, sample in ((8, 2), (7, 3)):
        assert not np.array_equal(first, random_inputs(model, seed=seed, sample=sample)["input_ids"])


def test_symbolic_axes_need_dims() -> None:
    model = load_model("bert-tiny", shapes={spec.name: spec.shape for spec in get_preset("bert-tiny").inputs})
    with pytest.raises(
        ModelShapeError, match=r"axis 'sequence' of input input_ids: int64\[batch x sequence\] has no number.*batch"
    ):
        random_inputs(model, seed=0, dims={"batch": 2})
    with pytest.raises(ModelShapeError, match="got dims for no axis"):
        random_inputs(model, seed=0)
    assert random_inputs(model, seed=0, dims={"batch": 2, "sequence": 3})["input_ids"].shape == (2, 3)


def test_tokens_of_every_zoo_model_are_in_its_vocabulary() -> None:
    for name in ("bert-tiny", "gpt2-tiny", "gpt2-tiny-decode", "llama-tiny", "llama-tiny-decode", "t5-tiny"):
        rules = {rule.name: rule for rule in describe_inputs(load_model(name))}
        assert rules["input_ids"].high == 1024
        assert rules["attention_mask"].kind is InputKind.MASK
        assert all(rule.kind is InputKind.CACHE for key, rule in rules.items() if key.startswith("past"))
    assert describe_inputs(load_model("bert-tiny"))[2].high == 2
    assert describe_inputs(load_model("gpt2-tiny-decode"))[2].high == 512
