"""Forms that exporters write and TVM alone refuses: computed operands, constant branches, functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import relaxtune
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from tests.pipeline.importer.converters.test_contrib_converters import floats
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model, run_reference, run_relax
from tests.pipeline.passes.pass_cases import LLVM, make_onnx, run_lowered


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_unsorted_holds_the_same_elements(largest: int) -> None:
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"], sorted=0, largest=largest)
    outputs = {"v": ("float32", (3, 4)), "i": ("int64", (3, 4))}
    model = make_model([node], {"x": ("float32", (3, 9))}, outputs, {"k": np.array([4])})
    x = floats(3, 9)
    values, places = run_relax(import_model(model), {"x": x})
    want = np.sort(x, axis=1)[:, -4:] if largest else np.sort(x, axis=1)[:, :4]
    np.testing.assert_array_equal(np.sort(values, axis=1), want)
    np.testing.assert_array_equal(np.take_along_axis(x, places, 1), values)


def test_top_k_of_none_is_empty() -> None:
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"])
    outputs = {"v": ("float32", (3, 0)), "i": ("int64", (3, 0))}
    model = make_model([node], {"x": ("float32", (3, 9))}, outputs, {"k": np.array([0])})
    found = run_lowered(lower(import_model(model), LLVM), {"x": floats(3, 9)})
    assert [(one.shape, str(one.dtype)) for one in found] == [((3, 0), "float32"), ((3, 0), "int64")]


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint32"])
def test_top_k_of_integers_that_tvm_does_not_sort(dtype: str) -> None:
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"])
    outputs = {"v": (dtype, (2,)), "i": ("int64", (2,))}
    model = make_model([node], {"x": (dtype, (5,))}, outputs, {"k": np.array([2])})
    x = np.array([3, np.iinfo(dtype).max, 0, np.iinfo(dtype).min, 7], dtype)
    values, places = run_lowered(lower(import_model(model), LLVM), {"x": x})
    assert (values.dtype, list(values), list(places)) == (np.dtype(dtype), [x[1], 7], [1, 4])


@pytest.mark.parametrize("width", [5, 6])
def test_pads_computed_from_a_static_shape(width: int) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["all"]),
        helper.make_node("Gather", ["all", "one"], ["width"]),
        helper.make_node("Mod", ["width", "four"], ["rest"]),
        helper.make_node("Sub", ["four", "rest"], ["more"]),
        helper.make_node("Mod", ["more", "four"], ["end"]),
        helper.make_node("Concat", ["zeros", "end"], ["pads"], axis=0),
        helper.make_node("Pad", ["x", "pads"], ["y"]),
    ]
    constants = {"one": np.array([1]), "four": np.array([4]), "zeros": np.zeros(3, "int64")}
    model = make_model(nodes, {"x": ("float32", (2, width))}, {"y": ("float32", (2, 8))}, constants)
    assert_agrees(model, {"x": floats(2, width)})


@pytest.mark.parametrize("condition", [True, False])
def test_if_with_a_constant_condition_leaves_one_branch(condition: bool) -> None:
    def branch(op_type: str) -> object:
        node = helper.make_node(op_type, ["x"], [op_type], name=op_type)
        return helper.make_graph([node], op_type, [], [helper.make_tensor_value_info(op_type, 1, [3])])

    node = helper.make_node("If", ["c"], ["y"], name="choose", then_branch=branch("Neg"), else_branch=branch("Abs"))
    constants = {"c": np.array(condition)}
    model = make_model([node], {"x": ("float32", (3,))}, {"y": ("float32", (3,))}, constants)
    graph = assert_agrees(model, {"x": floats(3)})
    text = graph.mod.script()
    assert ("R.negative" in text, "R.abs" in text, "if " in text) == (condition, not condition, False)


@pytest.mark.quick_cases("True-3", "False-0")
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("flag", [True, False])
def test_branches_are_converted_as_the_nodes_outside(past: int, flag: bool, tmp_path: Path) -> None:
    """Negative indices, sizes, several kernels, and a branch inside of a branch: all of it our own converters do."""
    node = helper.make_node

    def branch(name: str, nodes: Sequence[onnx.NodeProto]) -> onnx.GraphProto:
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, 1, ["b", "s", 8])])

    zeros = [node("Shape", ["x"], ["size"]), node("ConstantOfShape", ["size"], ["zeros"])]
    inner = {
        "then_branch": branch("doubled", [node("Add", ["x", "x"], ["doubled"])]),
        "else_branch": branch("less", [*zeros, node("Sub", ["zeros", "x"], ["less"])]),
    }
    rows, again = (node("Gather", ["words", "ids"], [name]) for name in ("rows", "again"))
    then = [rows, node("Softmax", ["rows"], ["soft"]), node("LayerNormalization", ["soft", "scale"], ["then"])]
    other = [again, node("If", ["flag"], ["inner"], **inner), node("Mul", ["again", "inner"], ["other"])]
    branches = {"then_branch": branch("then", then), "else_branch": branch("other", other)}
    nodes = [
        node("Gather", ["words", "ids"], ["x"]),
        node("Shape", ["past"], ["sizes"], start=1, end=2),
        node("Greater", ["sizes", "zero"], ["long"]),
        node("If", ["long"], ["chosen"], **branches),
        node("Relu", ["chosen"], ["y"]),
    ]
    inputs = {"ids": ("int64", ("b", "s")), "past": ("float32", ("b", "p", 1)), "flag": ("bool", ())}
    constants = {"words": floats(50, 8), "scale": floats(8), "zero": np.array([0])}
    model = make_model(nodes, inputs, {"y": ("float32", ("b", "s", 8))}, constants)
    onnx.save(model.proto, tmp_path / "branches.onnx")
    loaded = relaxtune.load(
        relaxtune.compile(tmp_path / "branches.onnx", tmp_path / "out", target="llvm", samples=0).directory
    )
    feeds = {"ids": np.array([[1, -1], [-50, 49]]), "past": np.zeros((2, past, 1), "float32"), "flag": np.array(flag)}
    np.testing.assert_allclose(loaded.run(feeds)["y"], run_reference(model, feeds)[0], rtol=1e-5, atol=1e-5)


def test_function_with_attributes_and_constants_of_every_kind() -> None:
    body = [
        helper.make_node("Constant", [], ["half"], value_float=0.5),
        helper.make_node("Constant", [], ["bias"], value_floats=[1.0, 2.0, 3.0]),
        helper.make_node("Constant", [], ["axes"], value_ints=[1]),
        helper.make_node("Mul", ["a", "half"], ["m"]),
        helper.make_node("Add", ["m", "bias"], ["s"]),
        helper.make_node("LeakyRelu", ["s"], ["r"]),
        helper.make_node("ReduceSum", ["r", "axes"], ["b"], keepdims=0),
    ]
    attribute = body[5].attribute.add()
    attribute.name, attribute.ref_attr_name, attribute.type = "alpha", "slope", 1
    function = helper.make_function("local", "Block", ["a"], ["b"], body, [helper.make_opsetid("", 18)], ["slope"])
    model = make_model(
        [helper.make_node("Block", ["x"], ["y"], domain="local", slope=0.3)],
        {"x": ("float32", (2, 3))},
        {"y": ("float32", (2,))},
        domains={"local": 1},
        functions=[function],
    )
    assert_agrees(model, {"x": floats(2, 3) * 5})


@pytest.mark.parametrize("end", [-(2**63) + 1, -(2**63), -(2**31) + 1])
@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
def test_a_symbolic_axis_is_read_from_the_last_element_to_the_first(end: int, axes: list[int]) -> None:
    count = len(axes)
    bounds = {"start": [-1] * count, "end": [end] * count, "axes": axes, "step": [-1] * count}
    constants = {name: np.array(numbers, np.int64) for name, numbers in bounds.items()}
    node = helper.make_node("Slice", ["x", *bounds], ["y"], name="slice")
    model = make_onnx([node], {"x": ("float", ("b", "s"))}, {"y": ("float", ("b", "s"))}, constants)
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)}
    lowered = lower(import_model(model), LLVM)
    np.testing.assert_array_equal(run_lowered(lowered, feeds)[0], run_reference(model, feeds)[0])


def test_shapes_in_32_bits_are_followed_as_values() -> None:
    """Paddle and jax2tf compute shapes in int32: Shape, Cast, Slice, Concat, Cast, Reshape."""
    names = ("zero", "one", "axis")
    constants = {name: np.array([number], np.int64) for name, number in zip(names, (0, 1, 0), strict=True)}
    constants |= {"rest": np.array([-1], np.int32), "four": np.array([4], np.int32)}
    steps = [
        ("Shape", ["x"], {}),
        ("Cast", ["Shape"], {"to": TensorProto.INT32}),
        ("Slice", ["Cast", *names], {}),
        ("Concat", ["Slice", "rest", "four"], {"axis": 0}),
        ("Add", ["Slice", "given"], {}),
    ]
    nodes = [helper.make_node(kind, inputs, [kind], name=kind, **attributes) for kind, inputs, attributes in steps]
    nodes += [
        helper.make_node("Cast", ["Concat"], ["shape"], name="wide", to=TensorProto.INT64),
        helper.make_node("Reshape", ["x", "shape"], ["y"], name="reshape"),
    ]
    inputs = {"x": ("float", ("b", "s", 12)), "given": ("int32", (2,))}
    outputs = {"y": ("float", ("b", "n", 4)), "Add": ("int32", (2,)), "Slice": ("int32", (1,))}
    model = make_onnx(nodes, inputs, outputs, constants)
    feeds = {"x": floats(3, 5, 12), "given": np.array([7, 8], np.int32)}
    lowered = lower(import_model(model), LLVM)
    for got, want in zip(run_lowered(lowered, feeds), run_reference(model, feeds), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype
