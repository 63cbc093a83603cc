"""Quantised operators against ONNX Runtime, to the bit where it defines them so."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest
from onnx import helper, numpy_helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.converters.test_contrib_converters import model_of
from tests.pipeline.importer.onnx_cases import make_model, run_reference, run_relax

RNG = np.random.default_rng(11)
# Ties between two integers, both infinities, no number, and more than any integer type holds.
EDGES = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 126.5, 127.5, 254.5, 1e9, -1e9, np.inf, -np.inf, np.nan], "float32")


def integers(*shape: int, dtype: str = "uint8") -> np.ndarray:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def assert_equal(model: OnnxModel, feeds: Mapping[str, np.ndarray]) -> None:
    for got, want in zip(run_relax(import_model(model), feeds), run_reference(model, feeds), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def assert_near(model: OnnxModel, feeds: Mapping[str, np.ndarray], steps: int) -> None:
    for got, want in zip(run_relax(import_model(model), feeds), run_reference(model, feeds), strict=True):
        assert got.dtype == want.dtype
        assert np.abs(got.astype("int64") - want.astype("int64")).max() <= steps


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.7e-3])
def test_quantize_linear_is_exact_at_ties_bounds_and_infinities(dtype: str, scale: float) -> None:
    x = np.concatenate([EDGES, EDGES * np.float32(scale), floats(500) * 90])
    zero = np.array(3 if dtype.startswith("u") else -3, dtype)
    model, feeds = model_of(
        "QuantizeLinear",
        [("x", x), ("s", np.array(scale, "float32")), ("z", zero)],
        {"y": (dtype, x.shape)},
        domain="",
        opset=21,
        constants=frozenset({"s", "z"}),
    )
    assert_equal(model, feeds)


@pytest.mark.parametrize("given", [True, False])
def test_quantize_linear_with_a_scale_known_at_run_time_and_no_zero_point(given: bool) -> None:
    inputs = [("x", floats(4, 7) * 50), ("s", np.array(0.37, "float32"))]
    constants = frozenset() if given else frozenset({"s"})
    assert_equal(*model_of("QuantizeLinear", inputs, {"y": ("uint8", (4, 7))}, domain="", constants=constants))


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear"])
@pytest.mark.parametrize(("axis", "scales"), [(1, (5,)), (0, (3,)), (-1, (4,)), (1, ())])
def test_scales_along_an_axis(op: str, axis: int, scales: tuple[int, ...]) -> None:
    x = floats(3, 5, 4) * 30 if op == "QuantizeLinear" else integers(3, 5, 4, dtype="int8")
    scale = np.abs(floats(*scales)) + np.float32(0.1)
    zero = integers(*scales, dtype="int8") // 4 if scales else np.array(7, "int8")
    model, feeds = model_of(
        op,
        [("x", x), ("s", np.asarray(scale, "float32")), ("z", np.asarray(zero, "int8"))],
        {"y": ("int8" if op == "QuantizeLinear" else "float32", x.shape)},
        domain="",
        opset=21,
        constants=frozenset({"s", "z"}),
        axis=axis,
    )
    assert_equal(model, feeds)


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear"])
@pytest.mark.parametrize("zeros", [True, False])
def test_scales_of_blocks_the_last_one_cut_off(op: str, zeros: bool) -> None:
    x = floats(2, 7, 3) * 30 if op == "QuantizeLinear" else integers(2, 7, 3)
    inputs = [("x", x), ("s", np.abs(floats(2, 3, 3)) + np.float32(0.1))]
    inputs += [("z", integers(2, 3, 3))] if zeros else []
    dtype = "uint8" if op == "QuantizeLinear" else "float32"
    model, feeds = model_of(op, inputs, {"y": (dtype, x.shape)}, domain="", opset=21, axis=1, block_size=3)
    assert_equal(model, feeds)


@pytest.mark.parametrize(("name", "dtype"), [("int4", ml_dtypes.int4), ("uint4", ml_dtypes.uint4)])
def test_weights_of_four_bits_in_blocks(name: str, dtype: type) -> None:
    low, high = (-8, 8) if name == "int4" else (0, 16)
    weight = RNG.integers(low, high, (8, 6)).astype(dtype)
    zero = RNG.integers(low, high, (2, 6)).astype(dtype)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=0, block_size=4),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    constants = {"s": np.abs(floats(2, 6))}
    model = make_model(nodes, {"x": ("float32", (3, 8))}, {"y": ("float32", (3, 6))}, constants, opset=21)
    model.proto.graph.initializer.extend([numpy_helper.from_array(weight, "w"), numpy_helper.from_array(zero, "z")])
    model.proto.ir_version = 10
    feeds = {"x": floats(3, 8)}
    (got,), (want,) = run_relax(import_model(model), feeds), run_reference(model, feeds)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_activations_of_four_bits_saturate_at_their_own_bounds() -> None:
    x = floats(3, 8) * 10
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], domain="com.microsoft"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], domain="com.microsoft"),
    ]
    constants = {"s": np.array(0.9, "float32")}
    shapes = {"x": ("float32", x.shape)}, {"y": ("float32", x.shape)}
    model = make_model(nodes, *shapes, constants, opset=18, domains={"com.microsoft": 1})
    model.proto.graph.initializer.append(numpy_helper.from_array(np.array(2, ml_dtypes.uint4), "z"))
    model.proto.ir_version = 10
    assert_equal(model, {"x": x})


FLOAT8_SCALES = [np.array(1.0, "float32"), np.array(0.37, "float32"), np.array([0.01, 1.0, 30.0], "float32")]


@pytest.mark.parametrize("scale", FLOAT8_SCALES, ids=["one", "tensor", "axis"])
@pytest.mark.parametrize("constant", [True, False])
def test_float8_is_exact_at_ties_bounds_and_subnormals(scale: np.ndarray, constant: bool) -> None:
    every = np.arange(256, dtype="uint8").view(ml_dtypes.float8_e4m3fn).astype("float32")
    known = np.sort(every[np.isfinite(every)])
    ties = (known[1:] + known[:-1]) / 2
    numbers = np.concatenate([EDGES, -EDGES, every, ties, np.nextafter(ties, np.float32(np.inf)), floats(300) * 200])
    x = np.stack([numbers, numbers * np.float32(1e-3), numbers * 40])
    inputs = [("x", x), ("s", scale), ("z", np.zeros(scale.shape, ml_dtypes.float8_e4m3fn))]
    constants = {name: value for name, value in inputs if name == "s" or (constant and name == "x")}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=0),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=0),
        helper.make_node("Add", ["y", "t"], ["sum"]),
    ]
    shapes = {"t": ("float32", (1,))} if constant else {"x": ("float32", x.shape), "t": ("float32", (1,))}
    model = make_model(nodes, shapes, {"sum": ("float32", x.shape)}, constants, opset=19)
    model.proto.graph.initializer.append(numpy_helper.from_array(inputs[2][1], "z"))
    feeds = {"x": x, "t": np.zeros(1, "float32")}
    assert_equal(model, {name: feeds[name] for name in shapes})


@pytest.mark.parametrize(
    ("dtype", "zero", "message"),
    [
        (ml_dtypes.float8_e5m2, 0, r"quantised type: expected one of int2, .*got float8e5m2"),
        (ml_dtypes.float8_e4m3fn, 1, "zero point of float8: expected a constant of 0"),
    ],
)
def test_float8_of_other_kinds_is_refused(dtype: type, zero: int, message: str) -> None:
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])
    back = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])
    shapes = {"x": ("float32", (3,))}, {"y": ("float32", (3,))}
    model = make_model([node, back], *shapes, {"s": np.array(1.0, "float32")}, opset=21)
    model.proto.graph.initializer.append(numpy_helper.from_array(np.array(zero, dtype), "z"))
    with pytest.raises(ImportFailedError, match=message):
        import_model(model)


@pytest.mark.parametrize("shift", [-4.0, 0.0, 5.0])
def test_dynamic_quantize_linear_is_exact(shift: float) -> None:
    outputs = {"y": ("uint8", (6, 9)), "s": ("float32", ()), "z": ("uint8", ())}
    assert_equal(*model_of("DynamicQuantizeLinear", [("x", floats(6, 9) + np.float32(shift))], outputs, domain=""))


def test_dynamic_quantize_linear_of_zeros_has_a_scale() -> None:
    outputs = {"y": ("uint8", (4,)), "s": ("float32", ()), "z": ("uint8", ())}
    model, feeds = model_of("DynamicQuantizeLinear", [("x", np.zeros(4, "float32"))], outputs, domain="")
    quantised, scale, zero = run_relax(import_model(model), feeds)
    assert (quantised.any(), float(scale), int(zero)) == (False, 1.0, 0)


@pytest.mark.parametrize(("a", "b"), [("uint8", "int8"), ("uint8", "uint8"), ("int8", "int8")])
@pytest.mark.parametrize("columns", [True, False])
def test_matmul_integer(a: str, b: str, columns: bool) -> None:
    inputs = [
        ("a", integers(2, 3, 8, dtype=a)),
        ("b", integers(8, 5, dtype=b)),
        ("za", np.array(5, a)),
        ("zb", integers(5, dtype=b) if columns else np.array(3, b)),
    ]
    outputs = {"y": ("int32", (2, 3, 5))}
    assert_equal(*model_of("MatMulInteger", inputs, outputs, domain="", constants=frozenset({"b", "zb", "za"})))


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("columns", [True, False])
def test_qlinear_matmul_is_exact(dtype: str, columns: bool) -> None:
    inputs = [
        ("a", integers(7, 32, dtype=dtype)),
        ("sa", np.array(0.021, "float32")),
        ("za", np.array(4, dtype)),
        ("b", integers(32, 9, dtype="int8")),
        ("sb", np.abs(floats(9)) / 50 if columns else np.array(0.013, "float32")),
        ("zb", np.zeros(9, "int8") if columns else np.array(0, "int8")),
        ("sy", np.array(0.5, "float32")),
        ("zy", np.array(7, dtype)),
    ]
    constants = frozenset({"sa", "za", "b", "sb", "zb", "sy", "zy"})
    assert_equal(*model_of("QLinearMatMul", inputs, {"y": (dtype, (7, 9))}, domain="", constants=constants))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["per tensor", "per channel"])
def test_qlinear_conv_is_exact(bias: bool, kind: str) -> None:
    whole = kind == "per tensor"
    inputs = [
        ("x", integers(1, 3, 9, 8)),
        ("sx", np.array(0.03, "float32")),
        ("zx", np.array(120, "uint8")),
        ("w", integers(4, 3, 3, 2, dtype="int8")),
        ("sw", np.array(0.02, "float32") if whole else np.abs(floats(4)) / 30),
        ("zw", np.array(0, "int8") if whole else np.zeros(4, "int8")),
        ("sy", np.array(0.4, "float32")),
        ("zy", np.array(100, "uint8")),
    ]
    inputs += [("bias", RNG.integers(-999, 999, 4).astype("int32"))] if bias else []
    attributes = {"pads": [1, 0, 1, 1], "strides": [2, 1]}
    constants = frozenset(name for name, _ in inputs) - {"x"}
    model, feeds = model_of(
        "QLinearConv", inputs, {"y": ("uint8", (1, 4, 5, 8))}, domain="", constants=constants, **attributes
    )
    assert_equal(model, feeds)


@pytest.mark.parametrize("padding", [{"pads": [1, 1, 1, 1]}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}])
def test_conv_integer(padding: dict[str, object]) -> None:
    inputs = [("x", integers(1, 2, 6, 6)), ("w", integers(3, 2, 3, 3)), ("zx", np.array(9, "uint8"))]
    outputs = {"y": ("int32", (1, 3, 6, 6))}
    assert_equal(*model_of("ConvInteger", inputs, outputs, domain="", constants=frozenset({"w", "zx"}), **padding))


@pytest.mark.parametrize("bias", [True, False])
def test_dynamic_quantize_matmul_and_matmul_integer_to_float(bias: bool) -> None:
    weight, scale = integers(16, 6, dtype="int8"), np.abs(floats(6))
    tail = [("bias", floats(6))] if bias else []
    constants = frozenset({"b", "sb", "zb", "bias"})
    outputs = {"y": ("float32", (5, 6))}
    # Without zero points of its own, that of the weights is 0.
    cases = [
        ("DynamicQuantizeMatMul", [("a", floats(5, 16)), ("b", weight), ("sb", scale), None, *tail]),
        (
            "MatMulIntegerToFloat",
            [("a", integers(5, 16)), ("b", weight), ("sa", np.array(0.1, "float32")), ("sb", scale),
             ("za", np.array(9, "uint8")), None, *tail],
        ),
    ]  # fmt: skip
    for op, inputs in cases:
        model, feeds = model_of(op, inputs, outputs, constants=constants)
        (got,), (want,) = run_relax(import_model(model), feeds), run_reference(model, feeds)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("quantised", [True, False])
def test_qgemm(quantised: bool) -> None:
    inputs = [
        ("a", integers(5, 16)), ("sa", np.array(0.02, "float32")), ("za", np.array(8, "uint8")),
        ("b", integers(6, 16, dtype="int8")), ("sb", np.array(0.01, "float32")), ("zb", np.array(0, "int8")),
        ("c", RNG.integers(-99, 99, (6,)).astype("int32")),
    ]  # fmt: skip
    inputs += [("sy", np.array(0.1, "float32")), ("zy", np.array(3, "uint8"))] if quantised else []
    constants = frozenset(name for name, _ in inputs) - {"a"}
    outputs = {"y": ("uint8" if quantised else "float32", (5, 6))}
    model, feeds = model_of("QGemm", inputs, outputs, constants=constants, transB=1)
    if quantised:
        assert_equal(model, feeds)
    else:
        (got,), (want,) = run_relax(import_model(model), feeds), run_reference(model, feeds)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def scaled(name: str, value: np.ndarray, scale: float, zero: int) -> list[tuple[str, np.ndarray]]:
    return [
        (name, value),
        (f"s{name}", np.array(scale, "float32")),
        (f"z{name}", np.array(zero, value.dtype)),
    ]


RESULT = [("sy", np.array(0.04, "float32")), ("zy", np.array(11, "uint8"))]


@pytest.mark.parametrize(
    ("op", "inputs", "steps"),
    [
        ("QLinearAdd", [*scaled("a", integers(3, 20), 0.02, 9), *scaled("b", integers(20), 0.05, 100), *RESULT], 1),
        ("QLinearMul", [*scaled("a", integers(3, 20), 0.02, 9), *scaled("b", integers(20), 0.05, 100), *RESULT], 1),
        ("QLinearSigmoid", [*scaled("a", integers(3, 20), 0.05, 120), *RESULT], 1),
        ("QLinearLeakyRelu", [*scaled("a", integers(3, 20), 0.05, 120), *RESULT], 1),
    ],
)
def test_elementwise_integers_are_within_a_step(op: str, inputs: list[tuple[str, np.ndarray]], steps: int) -> None:
    constants = frozenset(name for name, _ in inputs if name[0] in "sz")
    attributes = {"alpha": 0.1} if op == "QLinearLeakyRelu" else {}
    assert_near(*model_of(op, inputs, {"y": ("uint8", (3, 20))}, constants=constants, **attributes), steps=steps)


def test_softmax_of_integers_is_within_a_step() -> None:
    result = [("sy", np.array(1 / 256, "float32")), ("zy", np.array(0, "uint8"))]
    inputs = [*scaled("a", integers(3, 20), 0.1, 120), *result]
    constants = frozenset(name for name, _ in inputs) - {"a"}
    outputs = {"y": ("uint8", (3, 20))}
    model, feeds = model_of("QLinearSoftmax", inputs, outputs, constants=constants, axis=-1)
    model.proto.graph.node[0].attribute.append(helper.make_attribute("opset", 13))
    assert_near(model, feeds, steps=1)


def test_concat_of_integers_is_exact() -> None:
    inputs = [*RESULT, *scaled("a", integers(3, 4), 0.02, 9), *scaled("b", integers(3, 2), 0.05, 100)]
    constants = frozenset(name for name, _ in inputs if name[0] in "sz")
    assert_equal(*model_of("QLinearConcat", inputs, {"y": ("uint8", (3, 6))}, constants=constants, axis=1))


def test_qattention() -> None:
    hidden = 16
    inputs = [
        ("x", integers(2, 4, hidden)),
        ("w", integers(hidden, 3 * hidden, dtype="int8")),
        ("bias", floats(3 * hidden)),
        ("sx", np.array(0.01, "float32")),
        ("sw", np.array(0.01, "float32")),
        None,
        ("zx", np.array(128, "uint8")),
        ("zw", np.array(0, "int8")),
    ]
    constants = frozenset({"w", "bias", "sx", "sw", "zx", "zw"})
    outputs = {"y": ("float32", (2, 4, hidden))}
    model, feeds = model_of("QAttention", inputs, outputs, constants=constants, num_heads=2)
    (got,), (want,) = run_relax(import_model(model), feeds), run_reference(model, feeds)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_gather_block_quantized(zeros: bool, packed: bool) -> None:
    rows, columns, block = 10, 32, 16
    table = RNG.integers(0, 16, (rows, columns)).astype("uint8")
    zero = RNG.integers(0, 16, (rows, columns // block)).astype("uint8")
    scale = np.abs(floats(rows, columns // block))
    indices = np.array([[0, 3, -1], [9, 9, 2]])
    kind = {"bits": 4} if packed else {}
    node = helper.make_node(
        "GatherBlockQuantized",
        ["t", "i", "s", *(["z"] if zeros else [])],
        ["y"],
        domain="com.microsoft",
        block_size=block,
        gather_axis=0,
        quantize_axis=1,
        **kind,
    )
    shapes = {"i": ("int64", (2, 3))}, {"y": ("float32", (2, 3, columns))}
    model = make_model([node], *shapes, {"s": scale}, opset=21, domains={"com.microsoft": 1})
    model.proto.ir_version = 10

    def held(values: np.ndarray) -> np.ndarray:
        return values[:, ::2] | values[:, 1::2] << 4 if packed else values.astype(ml_dtypes.uint4)

    model.proto.graph.initializer.append(numpy_helper.from_array(held(table), "t"))
    if zeros:
        model.proto.graph.initializer.append(numpy_helper.from_array(held(zero), "z"))
    (got,), (want,) = run_relax(import_model(model), {"i": indices}), run_reference(model, {"i": indices})
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
