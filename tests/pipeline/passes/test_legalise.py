"""A NaN of the input is one of the output wherever ONNX Runtime keeps it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import relax

from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of
from relaxtune.pipeline.passes.legalise_operators import legalise_operators
from tests.pipeline.importer.onnx_cases import make_model, run_reference
from tests.pipeline.passes.pass_cases import UNOPTIMISED, graph_of, operators_of, run_lowered, state_of

X = np.array([[np.nan, -2, 3, 0], [1, np.nan, -0.5, 7]], "float32")
Z = np.array([[1, 2, -3, np.nan], [4, -1, np.nan, 0]], "float32")
ROW = np.array([0.5, np.nan, 1, -1], "float32")
BOUND, LOW = np.array(0.5, "float32"), np.array(-0.5, "float32")


@pytest.mark.parametrize(
    ("operator", "feeds", "attributes"),
    [
        ("Relu", {"x": X}, {}),
        ("Sign", {"x": X}, {}),
        ("Elu", {"x": X}, {"alpha": 0.5}),
        ("LeakyRelu", {"x": X}, {"alpha": 0.0}),
        ("Celu", {"x": X}, {"alpha": 0.5}),
        ("HardSigmoid", {"x": X}, {}),
        ("Max", {"x": X, "z": Z}, {}),
        ("Min", {"z": Z, "x": X}, {}),
        ("Max", {"x": X, "z": Z, "row": ROW}, {}),
        ("Clip", {"x": X, "low": LOW}, {}),
        ("Clip", {"x": X, "low": LOW, "high": BOUND}, {}),
        ("Clip", {"x": X, "low": BOUND, "high": LOW}, {}),
    ],
)
def test_nan_comes_out(operator: str, feeds: dict[str, np.ndarray], attributes: dict[str, float]) -> None:
    node = helper.make_node(operator, list(feeds), ["y"], **attributes)
    model = make_model(
        [node], {name: ("float32", array.shape) for name, array in feeds.items()}, {"y": ("float32", X.shape)}
    )
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), feeds)
    (want,) = run_reference(model, feeds)
    np.testing.assert_allclose(got, want, rtol=1e-5, equal_nan=True)
    assert np.isnan(got).any()


def test_operators_are_looked_up_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM has thousands of operators: looking them all up took half of the lowering of a small graph."""
    graph = graph_of(lambda _, x: relax.op.nn.relu(x), {"x": ((2, 4), "float32")})
    legalise_operators(graph.mod, state_of(graph))
    monkeypatch.setattr(tvm.ir.Op, "list_op_names", None)
    assert operators_of(legalise_operators(graph.mod, state_of(graph))) == ["call_tir"]


def test_operator_over_unknown_sizes_is_refused_with_its_node() -> None:
    """TVM leaves it as it is, and the code generator would fail on it without a name."""
    x = relax.Var("x", relax.TensorType(ndim=2, dtype="float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.nn.softmax(x), name_hint="scores")
        builder.emit_func_output(result)
    state = state_of(graph_of(lambda _, given: relax.op.nn.softmax(given), {"x": ((2, 3), "float32")}))
    (known,) = state.sources
    with_unknown = builder.get()
    (binding,) = bindings_of(main_of(with_unknown))
    state.sources[binding.var.name] = state.sources[known]
    with pytest.raises(LoweringError, match=r"the sizes of what nn.softmax reads are not known \(node_.*\).*--shape"):
        legalise_operators(with_unknown, state)


def test_calls_of_the_same_sizes_get_the_function_that_was_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, call_te = [], relax.BlockBuilder.call_te

    def counted(builder: relax.BlockBuilder, *arguments: object, **options: object) -> object:
        made.append(options.get("primfunc_name_hint"))
        return call_te(builder, *arguments, **options)

    monkeypatch.setattr(relax.BlockBuilder, "call_te", counted)
    op = relax.op
    weights = [relax.const(np.full((4, 4), value, "int32")) for value in (1, 0)]

    def graph(builder: relax.BlockBuilder, x: relax.Expr, one: relax.Expr) -> relax.Expr:
        # The same work twice, then what is alike: numbers inside, division by what is 0 or not.
        for weight in weights:
            x = builder.emit(op.matmul(x, weight))
        x = builder.emit(op.add(builder.emit(op.add(x, x)), x))
        for number in (one, relax.const(2, "int32"), relax.const(3, "int32")):
            x = builder.emit(op.add(x, number))
        for weight in weights:
            x = builder.emit(op.divide(x, weight))
        return x

    given = graph_of(graph, {"x": ((4, 4), "int32"), "one": ((), "int32")})
    legalised = legalise_operators(given.mod, state_of(given))
    called = [called_function(binding.value) for binding in bindings_of(main_of(legalised))]
    names = [str(callee.name_hint) for callee in called if callee is not None]
    assert made.count("matmul") == 1
    assert names == ["matmul", "matmul", "add", "add", "add1", "add2", "add3", "divide", "divide1"]


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1, -2], "float32")


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("number", [0, np.inf, np.nan])
@pytest.mark.parametrize("operator", ["Mul", "Div", "Min", "Max"])
@pytest.mark.parametrize("first", [True, False])
def test_number_beside_a_tensor_is_no_real_number(
    operator: str, number: float, shape: tuple[int, ...], first: bool
) -> None:
    """TVM makes 0 of `x * 0` and of `0 / x`, `x` of `min(x, NaN)`, and an error of `x / 0`."""
    node = helper.make_node(operator, ["c", "x"] if first else ["x", "c"], ["y"])
    spec = ("float32", SPECIAL.shape)
    model = make_model([node], {"x": spec}, {"y": spec}, {"c": np.full(shape, number, "float32")})
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), {"x": SPECIAL})
    np.testing.assert_array_equal(got, run_reference(model, {"x": SPECIAL})[0])


def test_nan_is_not_equal_to_itself() -> None:
    nodes = [helper.make_node("Equal", ["x", "x"], ["same"]), helper.make_node("Where", ["same", "x", "c"], ["y"])]
    spec = ("float32", SPECIAL.shape)
    model = make_model(nodes, {"x": spec}, {"y": spec}, {"c": np.array(7, "float32")})
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), {"x": SPECIAL})
    np.testing.assert_array_equal(got, np.where(np.isnan(SPECIAL), 7, SPECIAL))


def test_bounds_given_when_the_model_runs_are_scalars() -> None:
    """ONNX Runtime hands a scalar over as a scalar; a row of one element is another type."""
    node = helper.make_node("Clip", ["x", "", "high"], ["y"])
    model = make_model([node], {"x": ("float32", (2, 4)), "high": ("float32", ())}, {"y": ("float32", (2, 4))})
    feeds = {"x": X, "high": BOUND}
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), feeds)
    np.testing.assert_array_equal(got, np.minimum(X, BOUND))


LINES = np.array([[np.nan, -2, np.inf, 0, 1], [1, -np.inf, -0.5, np.nan, np.inf], [-np.inf] * 5], "float32")


def run_one(operator: str, outputs: dict[str, tuple[str, tuple[int, ...]]], **attributes: int) -> list[np.ndarray]:
    constants = {"k": np.array([outputs["y"][1][1]])} if operator == "TopK" else {}
    node = helper.make_node(operator, ["x", *constants], list(outputs), **attributes)
    model = make_model([node], {"x": ("float32", LINES.shape)}, outputs, constants)
    return run_lowered(lower(import_model(model), UNOPTIMISED), {"x": LINES})


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("operator", "wanted"), [("ReduceMax", np.max), ("ReduceMin", np.min)])
def test_reduction_keeps_a_nan_as_numpy_does(operator: str, wanted: Callable[..., np.ndarray], axis: int) -> None:
    """ONNX Runtime's own keeps it or loses it by its place."""
    expected = wanted(LINES, axis)
    node = helper.make_node(operator, ["x", "axes"], ["y"], keepdims=0)
    model = make_model(
        [node], {"x": ("float32", LINES.shape)}, {"y": ("float32", expected.shape)}, {"axes": np.array([axis])}
    )
    np.testing.assert_array_equal(run_lowered(lower(import_model(model), UNOPTIMISED), {"x": LINES})[0], expected)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("operator", "wanted"), [("ArgMax", np.argmax), ("ArgMin", np.argmin)])
def test_place_is_that_of_the_first_nan_and_one_of_the_row(
    operator: str, wanted: Callable[..., np.ndarray], axis: int
) -> None:
    expected = wanted(LINES, axis)
    (got,) = run_one(operator, {"y": ("int64", expected.shape)}, axis=axis, keepdims=0)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_nan_is_above_all_in_top_k(count: int, largest: int) -> None:
    values, places = run_one("TopK", {"y": ("float32", (3, count)), "i": ("int64", (3, count))}, largest=largest)
    order = np.argsort(LINES, axis=1, kind="stable")
    expected = np.take_along_axis(LINES, order, 1)
    expected = expected[:, ::-1][:, :count] if largest else expected[:, :count]
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.take_along_axis(LINES, places, 1), expected)


def test_threshold_makes_zeros_of_what_is_not_above_it() -> None:
    """TVM's product makes NaN of -inf and NaN."""
    (got,) = run_one("ThresholdedRelu", {"y": ("float32", LINES.shape)})
    np.testing.assert_array_equal(got, np.where(LINES > 1, LINES, np.float32(0)))


def test_difference_of_a_tensor_and_itself_is_nan_where_it_is_not_finite() -> None:
    """TVM makes 0 of `x - x`."""
    node = helper.make_node("Sub", ["x", "x"], ["y"])
    model = make_model([node], {"x": ("float32", LINES.shape)}, {"y": ("float32", LINES.shape)})
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), {"x": LINES})
    np.testing.assert_array_equal(got, np.where(np.isfinite(LINES), np.float32(0), np.float32(np.nan)))


def test_functions_of_half_precision_are_computed_in_float32_and_rounded() -> None:
    names = ("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Elu", "Selu", "Sinh")
    x = np.array([0.5, -0.9, 1.0, 0.0, 2.0, np.nan], "float16")
    nodes = [helper.make_node(name, ["x"], [name]) for name in names]
    model = make_model(nodes, {"x": ("float16", x.shape)}, {name: ("float16", x.shape) for name in names})
    got = run_lowered(lower(import_model(model), UNOPTIMISED), {"x": x})
    for one, want in zip(got, run_reference(model, {"x": x}), strict=True):
        np.testing.assert_allclose(one, want, rtol=2e-3, equal_nan=True)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64"])
def test_sign_of_integers(dtype: str) -> None:
    x = np.array([0, 1, 7, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    model = make_model([helper.make_node("Sign", ["x"], ["y"])], {"x": (dtype, x.shape)}, {"y": (dtype, x.shape)})
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), {"x": x})
    np.testing.assert_array_equal(got, np.sign(x))


def test_root_of_minus_infinity_is_a_power_in_half_precision() -> None:
    x = np.array([-np.inf, np.inf, 4, 0.25, np.nan], "float16")
    model = make_model(
        [helper.make_node("Pow", ["x", "half"], ["y"])],
        {"x": ("float16", x.shape)},
        {"y": ("float16", x.shape)},
        {"half": np.array(0.5, "float16")},
    )
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), {"x": x})
    np.testing.assert_array_equal(got, run_reference(model, {"x": x})[0])


@pytest.mark.parametrize("operator", ["LayerNormalization", "RMSNormalization"])
def test_norm_over_float64(operator: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 8))
    node = helper.make_node(operator, ["x", "gamma"], ["y"], epsilon=0.01)
    specs = ({"x": ("float64", x.shape)}, {"y": ("float64", x.shape)}, {"gamma": x[0]})
    model = make_model([node], *specs, opset=23 if operator == "RMSNormalization" else 18)
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), {"x": x})
    centred = x - x.mean(-1, keepdims=True) * (operator == "LayerNormalization")
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.01) * x[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_division_of_integers_ends_no_process(dtype: str) -> None:
    """A CPU traps where the divisor is 0, and where the least number is divided by -1."""
    bounds = np.iinfo(dtype)
    a = np.array([7, 7, bounds.min, bounds.max], dtype)
    b = np.array([[0, 2, bounds.max if bounds.min == 0 else -1, 3]] * 2, dtype)
    nodes = [helper.make_node("Div", ["a", "b"], ["q"]), helper.make_node("Mod", ["a", "b"], ["r"])]
    model = make_model(
        nodes, {"a": (dtype, a.shape), "b": (dtype, b.shape)}, {"q": (dtype, b.shape), "r": (dtype, b.shape)}
    )
    quotient, rest = run_lowered(lower(import_model(model), UNOPTIMISED), {"a": a, "b": b})
    third = (bounds.min, 0)
    assert [(int(q), int(r)) for q, r in zip(quotient[1], rest[1], strict=True)] == [
        (0, 0), (3, 1), third, (bounds.max // 3, bounds.max % 3)
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_batch_norm_is_of_the_type_of_its_input(dtype: str) -> None:
    """TVM's kernel of float16 gives out float32."""
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(dtype)
    parameters = {name: np.array([0.5, 1, 2], dtype) for name in ("scale", "bias", "mean", "variance")}
    nodes = [helper.make_node("BatchNormalization", ["x", *parameters], ["n"]), helper.make_node("Abs", ["n"], ["y"])]
    model = make_model(nodes, {"x": (dtype, x.shape)}, {"y": (dtype, x.shape)}, parameters)
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), {"x": x})
    (want,) = run_reference(model, {"x": x})
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=4e-3, atol=4e-3)
