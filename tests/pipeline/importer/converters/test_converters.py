"""Every converter of our own against ONNX Runtime, and the stock ones it hands cases back to."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from tvm import relax

from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.importer.converter_input import ConverterInput, constant, tensor_attribute
from relaxtune.pipeline.importer.converters import CONVERTERS
from relaxtune.pipeline.importer.converters.shapes.shape import convert_constant_of_shape
from relaxtune.pipeline.importer.shape_values import fold_shape_value
from tests.pipeline.importer.onnx_cases import assert_agrees, float_tensor, make_model
from tests.unoptimised import UNOPTIMISED, runnable

DATA = np.random.default_rng(1).standard_normal((3, 4, 5)).astype("float32")


@pytest.mark.parametrize(
    ("axis", "indices"),
    [
        (0, np.array(1)),
        (0, np.array(-1)),
        (1, np.array([0, -1, 2], "int32")),
        (-1, np.array([[4, -5], [0, 1]])),
    ],
)
@pytest.mark.parametrize("constant_indices", [True, False])
def test_gather_agrees_when_indices_are_negative_scalar_or_constant(
    axis: int, indices: np.ndarray, constant_indices: bool
) -> None:
    out_shape = np.take(DATA, indices, axis).shape
    inputs = {"x": ("float32", DATA.shape)}
    feeds = {"x": DATA}
    if not constant_indices:
        inputs["i"] = (str(indices.dtype), indices.shape)
        feeds["i"] = indices
    model = make_model(
        [helper.make_node("Gather", ["x", "i"], ["y"], axis=axis)],
        inputs,
        {"y": ("float32", out_shape)},
        {"i": indices} if constant_indices else {},
    )
    assert_agrees(model, feeds)


@pytest.mark.parametrize("index", [0, -1, 1])
def test_gather_agrees_of_one_place_of_an_axis_of_any_size(index: int) -> None:
    model = make_model(
        [helper.make_node("Gather", ["x", "i"], ["y"], axis=1)],
        {"x": ("float32", ("batch", "length", 5))},
        {"y": ("float32", ("batch", 5))},
        {"i": np.array(index)},
    )
    graph = assert_agrees(model, {"x": DATA})
    assert ("take" in str(graph.mod)) == (index != -1)


def test_gather_reads_nothing_outside_when_an_index_is_out_of_range() -> None:
    model = make_model(
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        {"i": ("int64", (2,))},
        {"y": ("float32", (2, 2))},
        {"table": np.arange(6, dtype="float32").reshape(3, 2)},
    )
    machine = runnable(tvm.compile(import_model(model).mod, target=UNOPTIMISED))
    got = machine["main"](tvm.runtime.tensor(np.array([2**40, -(2**40)]))).numpy()
    assert got.tolist() == [[4, 5], [0, 1]]


def test_gather_has_no_run_time_shape_kernels_when_the_axis_is_static() -> None:
    model = make_model(
        [helper.make_node("Gather", ["x", "i"], ["y"], name="pick")],
        {"x": ("float32", (3, 4)), "i": ("int64", (2,))},
        {"y": ("float32", (2, 4))},
    )
    assert "shape_of" not in import_model(model).mod.script()


def test_gather_elements_agrees_when_indices_are_negative() -> None:
    indices = np.array([[[0, -1, 2, 1, 0]] * 4])
    model = make_model(
        [helper.make_node("GatherElements", ["x", "i"], ["y"], axis=0)],
        {"x": ("float32", DATA.shape), "i": ("int64", indices.shape)},
        {"y": ("float32", indices.shape)},
    )
    assert_agrees(model, {"x": DATA, "i": indices})


@pytest.mark.parametrize(("batch_dims", "indices"), [(0, [[0, -1], [2, 1]]), (1, [[[1]], [[-1]], [[0]]])])
@pytest.mark.parametrize("constant_indices", [True, False])
def test_gather_nd_agrees_when_indices_are_negative(
    batch_dims: int, indices: list[object], constant_indices: bool
) -> None:
    value = np.array(indices)
    shape = (*value.shape[:-1], *DATA.shape[batch_dims + value.shape[-1] :])
    inputs = {"x": ("float32", DATA.shape)} | ({} if constant_indices else {"i": ("int64", value.shape)})
    model = make_model(
        [helper.make_node("GatherND", ["x", "i"], ["y"], batch_dims=batch_dims)],
        inputs,
        {"y": ("float32", shape)},
        {"i": value} if constant_indices else {},
    )
    assert_agrees(model, {"x": DATA} | ({} if constant_indices else {"i": value}))


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0, 4.0, 2.5, -1.0, [[1.0, 2.0]], [[2.0]]])
def test_pow_agrees_for_every_kind_of_exponent(exponent: object) -> None:
    power = np.array(exponent, "float32")
    x = np.array([0.5, 2.0], "float32")
    shape = np.broadcast_shapes(x.shape, power.shape)
    model = make_model(
        [helper.make_node("Pow", ["x", "p"], ["y"])],
        {"x": ("float32", (2,))},
        {"y": ("float32", shape)},
        {"p": power},
    )
    assert_agrees(model, {"x": x})


def test_pow_of_negative_base_agrees_and_calls_no_power() -> None:
    model = make_model(
        [helper.make_node("Pow", ["x", "p"], ["y"])],
        {"x": ("float32", (3,))},
        {"y": ("float32", (3,))},
        {"p": np.array(3.0, "float32")},
    )
    graph = assert_agrees(model, {"x": np.array([-2, 0, 1.5], "float32")})
    assert "R.power" not in graph.mod.script()


FILL = {"value": float_tensor([2.0])}
TO_FLOAT = {"to": 1}
TO_INT64 = {"to": 7}
Step = tuple[str, str, dict[str, object]]
# Steps are (operator, inputs, attributes); `_i` is what step i computed, the last step gives the output.
SYMBOLIC_CASES: dict[str, list[Step]] = {
    "reshape-0-and-minus-1": [("Reshape", "x zero_rest", {})],
    "flatten-by-shape": [
        ("Shape", "x", {"end": 1}),
        ("Concat", "_0 rest", {"axis": 0}),
        ("Reshape", "x _1", {}),
    ],
    "merge": [
        ("Shape", "x", {}),
        ("Gather", "_0 one", {}),
        ("Gather", "_0 zero", {}),
        ("Mul", "_1 _2", {}),
        ("Unsqueeze", "_3 axis0", {}),
        ("Concat", "_4 rest", {"axis": 0}),
        ("Reshape", "x _5", {}),
    ],
    "expand": [("Shape", "x", {}), ("Expand", "row _0", {})],
    "expand-by-ones": [("Expand", "x ones5", {})],
    "expand-where": [
        ("Shape", "x", {}),
        ("Equal", "_0 minus_ones", {}),
        ("Where", "_1 ones3 _0", {}),
        ("Expand", "row _2", {}),
    ],
    "slice-to-size": [
        ("Shape", "x", {}),
        ("Gather", "_0 zero", {}),
        ("Unsqueeze", "_1 axis0", {}),
        ("Slice", "table start0 _2 axis0", {}),
    ],
    "slice-from-size": [
        ("Shape", "x", {}),
        ("Slice", "_0 start0 start1", {}),
        ("Slice", "table _1 far axis0", {}),
    ],
    "slice-half": [
        ("Shape", "x", {"start": 2}),
        ("Div", "_0 two", {}),
        ("Slice", "x _1 far axis2", {}),
    ],
    "slice-negative-end": [
        ("Shape", "x", {"start": 2}),
        ("Sub", "_0 two", {}),
        ("Slice", "x _1 minus_1 minus_1", {}),
    ],
    "slice-with-step": [
        ("Shape", "x", {"start": 2}),
        ("Slice", "x start1 _0 axis2 two", {}),
    ],
    "range": [
        ("Shape", "x", {}),
        ("Gather", "_0 zero", {}),
        ("Squeeze", "_1", {}),
        ("Range", "zero _2 one", {}),
        ("Cast", "_3", TO_FLOAT),
    ],
    "range-of-size": [("Size", "x", {}), ("Range", "zero _0 one", {}), ("Cast", "_1", TO_FLOAT)],
    "constant-of-shape": [("Shape", "x", {}), ("ConstantOfShape", "_0", FILL), ("Add", "x _1", {})],
    "size-as-data": [("Shape", "x", {}), ("Cast", "_0", TO_FLOAT)],
    "scalar-size-as-data": [
        ("Shape", "x", {}),
        ("Gather", "_0 zero", {}),
        ("Cast", "_1", TO_FLOAT),
        ("Mul", "x _2", {}),
    ],
    "product": [
        ("Shape", "x", {}),
        ("ReduceProd", "_0", {"keepdims": 0}),
        ("Cast", "_1", TO_FLOAT),
        ("Div", "x _2", {}),
    ],
    "min-max": [
        ("Shape", "x", {"end": 1}),
        ("Min", "_0 two", {}),
        ("Max", "_1 start1", {}),
        ("Slice", "x start0 _2 axis0", {}),
    ],
    "difference-divided": [
        ("Shape", "x", {"end": 1}),
        ("Sub", "_0 two", {}),
        ("Div", "_1 two", {}),
        ("Cast", "_2", TO_FLOAT),
    ],
    "gather-symbolic-axis": [("Gather", "x minus_1", {"axis": 0})],
    "gather-scalar-symbolic-axis": [("Gather", "x minus_scalar", {"axis": 2})],
    "cast-to-the-same": [
        ("Shape", "x", {}),
        ("Cast", "_0", TO_INT64),
        ("ReduceProd", "_1", {"keepdims": 0}),
        ("Unsqueeze", "_2 axis0", {}),
        ("Reshape", "_3 rest", {}),
        ("Reshape", "x _4", {}),
    ],
    "equal-of-symbols": [
        ("Shape", "x", {"end": 1}),
        ("Equal", "_0 start1", {}),
        ("Cast", "_1", TO_FLOAT),
    ],
}


@pytest.mark.parametrize("case", list(SYMBOLIC_CASES))
def test_symbolic_shape_arithmetic_agrees_at_two_sizes(case: str) -> None:
    steps = SYMBOLIC_CASES[case]
    constants = {
        "zero": np.array(0), "one": np.array(1), "two": np.array([2]), "axis0": np.array([0]), "axis2": np.array([2]),
        "start0": np.array([0]), "start1": np.array([1]), "rest": np.array([-1]), "far": np.array([2**63 - 1]),
        "minus_1": np.array([-1]), "minus_scalar": np.array(-1), "zero_rest": np.array([0, -1]),
        "ones5": np.ones(5, "int64"), "ones3": np.ones(3, "int64"), "minus_ones": -np.ones(3, "int64"),
        "row": np.ones((1, 1, 1), "float32"), "table": np.arange(40, dtype="float32").reshape(20, 2),
    }  # fmt: skip
    protos = [
        helper.make_node(op, inputs.split(), ["y" if i == len(steps) - 1 else f"_{i}"], **attributes)
        for i, (op, inputs, attributes) in enumerate(steps)
    ]
    used = {item for node in protos for item in node.input}
    model = make_model(
        protos,
        {"x": ("float32", ("n", 4, "m"))},
        {"y": ("float32", ())},
        {key: value for key, value in constants.items() if key in used},
    )
    model.proto.graph.output[0].type.tensor_type.ClearField("shape")
    for n, m in ((3, 6), (1, 8)):
        assert_agrees(model, {"x": np.random.default_rng(n).standard_normal((n, 4, m)).astype("float32")})


@pytest.mark.parametrize("shape", [(2, 6), (3, 4)])
def test_shapes_known_only_at_run_time_agree(shape: tuple[int, int]) -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["twos"], **FILL),
        helper.make_node("Gather", ["twos", "minus"], ["y"], axis=0),
    ]
    model = make_model(nodes, {"s": ("int64", (2,))}, {"y": ("float32", (1, "m"))}, {"minus": np.array([-1])})
    assert_agrees(model, {"s": np.array(shape)})


@pytest.mark.parametrize(
    ("op_type", "value"), [("Add", 9), ("Sub", 3), ("Mul", 18), ("Div", 2), ("Max", 6), ("Min", 3)]
)
def test_arithmetic_on_sizes_and_numbers_folds_to_a_number(op_type: str, value: int) -> None:
    sizes = relax.ShapeExpr([6])
    node = ConverterInput(relax.BlockBuilder(), (sizes, constant(np.array([3]))), {}, 18)
    assert fold_shape_value(op_type, node).value.numpy().tolist() == [value]


def test_division_of_sizes_rounds_towards_zero_as_onnx_does() -> None:
    node = ConverterInput(relax.BlockBuilder(), (relax.ShapeExpr([-7]), constant(np.array([2]))), {}, 18)
    assert fold_shape_value("Div", node).value.numpy().tolist() == [-3]


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"),
    [
        ("Concat", (2, 1), {"axis": 0}),
        ("Squeeze", (3,), {}),
        ("Cast", (3,), {"to": 1}),
        ("ReduceProd", (3,), {"keepdims": 1}),
        ("Reshape", (4, [2, 2]), {}),
        ("Add", (3, [1, 2]), {}),
        ("Where", (3, [1, 2], [3, 4]), {}),
        ("Equal", (3, [1, 2]), {}),
        ("Tanh", (3,), {}),
        ("Add", (3, np.zeros((1, 3), "int64")), {}),
        ("Add", (3, np.zeros(3, "float32")), {}),
    ],
)
def test_what_is_no_arithmetic_on_sizes_is_left_to_the_converters(
    op_type: str, inputs: tuple[object, ...], attributes: dict[str, object]
) -> None:
    sizes = [tvm.tirx.Var(f"n{i}", "int64") for i in range(4)]
    operands = [
        (sizes[0] if item == 1 else relax.ShapeExpr(sizes[:item]))
        if isinstance(item, int)
        else constant(np.array(item))
        for item in inputs
    ]
    node = ConverterInput(relax.BlockBuilder(), tuple(operands), attributes, 18)
    assert fold_shape_value(op_type, node) is None


def test_constant_of_shape_is_scalar_when_the_shape_is_empty() -> None:
    node = ConverterInput(relax.BlockBuilder(), (constant(np.zeros(0, "int64")),), {}, 18)
    value = convert_constant_of_shape(node).value.numpy()
    assert (value.shape, value.dtype, float(value)) == ((), np.dtype("float32"), 0.0)


def test_constant_keeps_the_dtype_of_a_scalar() -> None:
    assert constant(np.array(3, "int64")).value.numpy().dtype == np.int64


def test_converter_input_names_the_missing_input() -> None:
    node = ConverterInput(relax.BlockBuilder(), (None,), {}, 18)
    with pytest.raises(ValueError, match="input 1 is required but missing"):
        node.input(1)


def test_attribute_helpers_refuse_other_types() -> None:
    node = ConverterInput(relax.BlockBuilder(), (), {"axis": "one"}, 18)
    with pytest.raises(TypeError, match="attribute 'axis': expected an integer, got str"):
        node.integer("axis", 0)
    with pytest.raises(TypeError, match="expected a tensor attribute, got int"):
        tensor_attribute(3)


def test_every_own_converter_is_for_an_operator_that_onnx_or_onnx_runtime_defines() -> None:
    contrib = {(schema.domain, schema.name) for schema in get_all_operator_schema()}
    for domain, op_type in CONVERTERS:
        assert onnx.defs.has(op_type, domain) or (domain, op_type) in contrib
