"""Slice, ScatterElements and TopK at their edges, and the product of two vectors, against ONNX Runtime."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper

from relaxtune.models import OnnxModel
from relaxtune.models.dims import reaches_the_end
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.importer.shape_values import onnx_slice
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model, run_reference, run_relax
from tests.unoptimised import UNOPTIMISED, runnable

PLACES = (-5, -2, -1, 0, 1, 3, 2**63 - 1, -(2**63) + 1)
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


@pytest.mark.parametrize("step", [1, 2, -1, -2])
@pytest.mark.parametrize("size", [1, 2])
def test_every_slice_takes_what_onnx_runtime_takes(size: int, step: int) -> None:
    x = floats(size)
    spec = {"x": ("float32", (size,)), **dict.fromkeys(("start", "end", "axes", "steps"), ("int64", (1,)))}
    model = make_model([helper.make_node("Slice", list(spec), ["y"])], spec, {"y": ("float32", ("n",))})
    for start, end in itertools.product(PLACES, PLACES):
        numbers = {"start": [start], "end": [end], "axes": [0], "steps": [step]}
        (want,) = run_reference(model, {"x": x, **{name: np.array(value) for name, value in numbers.items()}})
        taken = x[list(onnx_slice(size, start, end, step))]
        np.testing.assert_array_equal(taken, want, err_msg=f"[{start}:{end}:{step}] of {size}")


@pytest.mark.parametrize(("start", "end", "step"), [(-2, -2, -1), (0, -5, -1), (1, 0, 1), (-1, -(2**63) + 1, -1)])
def test_slice_of_one_element_at_its_edges(start: int, end: int, step: int) -> None:
    numbers = {"start": start, "end": end, "axis": 0, "step": step}
    model = make_model(
        [helper.make_node("Slice", ["x", *numbers], ["y"])],
        {"x": ("float32", (1, 4))},
        {"y": ("float32", ("n", 4))},
        {name: np.array([number]) for name, number in numbers.items()},
    )
    assert_agrees(model, {"x": floats(1, 4)})


@pytest.mark.parametrize("step", [1, 2])
def test_slice_of_a_symbolic_axis_is_empty_where_its_end_comes_before_its_start(step: int) -> None:
    pairs = [(-1, 2), (1, -1), (3, -2), (-2, 1), (-5, 4), (5, 2), (-1, -3), (0, -2), (-2, 2**63 - 1)]
    constants = {"axis": np.array([1]), "step": np.array([step])}
    constants |= {str(number): np.array([number]) for number in {bound for pair in pairs for bound in pair}}
    names = [f"{start}:{end}" for start, end in pairs]
    nodes = [helper.make_node("Slice", ["x", *one.split(":"), "axis", "step"], [one]) for one in names]
    outputs = {one: ("float32", (2, f"m{place}")) for place, one in enumerate(names)}
    model = make_model(nodes, {"x": ("float32", (2, "n"))}, outputs, constants)
    machine = runnable(tvm.compile(import_model(model).mod, target=UNOPTIMISED))
    for size in range(1, 7):
        x = floats(2, size)
        got = machine["main"](tvm.runtime.tensor(x))
        for name, one, want in zip(names, got, run_reference(model, {"x": x}), strict=True):
            np.testing.assert_array_equal(one.numpy(), want, err_msg=f"[{name}] of {size}")


# No machine holds a tensor of 10^9 x 300 x 300.
@pytest.mark.parametrize(
    ("ends", "whole"),
    [((2**31 - 1, 300, 7), True), ((10**9, 10**9, 10**9), True), ((2**63 - 1, 5, 300), True), ((5, 300, 300), False)],
)
def test_slice_to_the_end_leaves_a_symbolic_axis_its_size(ends: tuple[int, ...], whole: bool) -> None:
    constants = {"start": np.zeros(3, "int64"), "end": np.array(ends), "axes": np.arange(3)}
    nodes = [helper.make_node("Slice", ["x", *constants], ["cut"]), helper.make_node("Relu", ["cut"], ["y"])]
    outputs = {"y": ("float32", ("m", "j", "k"))}
    model = make_model(nodes, {"x": ("float32", ("n", 300, 300))}, outputs, constants)
    for rows in (2, 6):
        graph = assert_agrees(model, {"x": floats(rows, 300, 300)})
        assert ("min" in str(graph.mod["main"].ret_ty)) is not whole


@pytest.mark.parametrize(
    ("start", "end", "known"),
    [
        *((0, -1, True), (1, -1, True), (2, 2**63 - 1, True), (0, 2, True), (-2, -1, True), (-1, 2**63 - 1, True)),
        *((0, 3, True), (0, 4, False), (-4, -1, False), (4, 2**63 - 1, False), (0, -4, False)),
    ],
)
def test_bounds_that_are_inside_at_all_sizes_leave_a_sum_of_sizes(start: int, end: int, known: bool) -> None:
    """Attention with a sink cuts its column off again: `[..., :-1]` of one more than the keys."""
    constants = {"start": np.array([start]), "end": np.array([end]), "axis": np.array([0]), "more": floats(2, 3)}
    nodes = [
        helper.make_node("Concat", ["x", "more"], ["long"], axis=0),
        helper.make_node("Slice", ["long", "start", "end", "axis"], ["cut"]),
        helper.make_node("Relu", ["cut"], ["y"]),
    ]
    model = make_model(nodes, {"x": ("float32", ("n", 3))}, {"y": ("float32", ("m", 3))}, constants)
    for rows in (1, 2, 5):
        graph = assert_agrees(model, {"x": floats(rows, 3)})
        assert ("min" in str(graph.mod["main"].ret_ty)) is not known


def test_an_axis_may_be_long_where_the_tensor_is_small() -> None:
    assert not reaches_the_end(10**9, [4])
    assert reaches_the_end(10**9, [300, 300])


@pytest.mark.parametrize("reduction", ["none", "add", "max"])
@pytest.mark.parametrize(("axis", "covered"), [(0, (2, 2, 2)), (1, (2, 1, 3)), (2, (3, 2, 2)), (0, (3, 4, 5))])
def test_scatter_elements_covers_a_corner(axis: int, covered: tuple[int, ...], reduction: str) -> None:
    shape = (3, 4, 5)
    # No place twice along the axis: what then wins is not defined.
    picked = [RNG.permutation(shape[axis])[: covered[axis]] for _ in range(int(np.prod(covered)) // covered[axis])]
    beside = [size for place, size in enumerate(covered) if place != axis]
    indices = np.moveaxis(np.array(picked).reshape(*beside, covered[axis]), -1, axis)
    feeds = {"x": floats(*shape), "indices": indices, "updates": floats(*covered)}
    model = make_model(
        [helper.make_node("ScatterElements", list(feeds), ["y"], axis=axis, reduction=reduction)],
        {name: (str(array.dtype), array.shape) for name, array in feeds.items()},
        {"y": ("float32", shape)},
    )
    assert_agrees(model, feeds)


def top_k(count: int, dtype: str = "float32", **attributes: int) -> OnnxModel:
    return make_model(
        [helper.make_node("TopK", ["x", "k"], ["y", "places"], **attributes)],
        {"x": (dtype, (3, "n"))},
        {"y": (dtype, (3, count)), "places": ("int64", (3, count))},
        {"k": np.array([count])},
    )


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_along_a_symbolic_axis(largest: int) -> None:
    assert_agrees(top_k(4, largest=largest), {"x": floats(3, 6)})
    assert_agrees(top_k(4, "int32", largest=largest), {"x": RNG.permutation(18).reshape(3, 6).astype("int32")})


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_of_64_bits_without_a_sign(largest: int) -> None:
    """ONNX Runtime's and TVM's sorts lack this type."""
    x = np.array([[0, 2**64 - 1, 2**63, 2**63 - 1, 1, 2**62]] * 3, "uint64")
    values, places = run_relax(import_model(top_k(4, "uint64", largest=largest)), {"x": x})
    order = np.argsort(x[0])[::-1][:4] if largest else np.argsort(x[0])[:4]
    np.testing.assert_array_equal(places, [order] * 3)
    np.testing.assert_array_equal(values, [x[0][order]] * 3)


def test_top_k_of_a_shorter_axis_leaves_nothing_unwritten() -> None:
    x = floats(3, 2)
    values, _ = run_relax(import_model(top_k(4)), {"x": x})
    np.testing.assert_array_equal(values[:, :2], -np.sort(-x, axis=1))
    assert (values[:, 2:] == -np.inf).all()


def test_infinite_tensor_of_symbolic_shape() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["y"], value=helper.make_tensor("v", 1, [1], [-np.inf])),
    ]
    model = make_model(nodes, {"x": ("float32", ("n", 2))}, {"y": ("float32", ("n", 2))})
    assert_agrees(model, {"x": floats(3, 2)})


def test_product_of_two_vectors_is_a_scalar() -> None:
    spec = {"x": ("float32", (5,)), "z": ("float32", (5,))}
    model = make_model([helper.make_node("MatMul", ["x", "z"], ["y"])], spec, {"y": ("float32", ())})
    assert_agrees(model, {"x": floats(5), "z": floats(5)})


def test_free_size_of_a_reshape_is_no_quotient_of_sums() -> None:
    nodes = [
        helper.make_node("Concat", ["past", "new"], ["keys"], axis=1),
        helper.make_node("Shape", ["keys"], ["length"], start=1, end=2),
        helper.make_node("Concat", ["free", "length", "width"], ["shape"], axis=0),
        helper.make_node("Transpose", ["keys"], ["turned"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["turned", "shape"], ["y"]),
    ]
    model = make_model(
        nodes,
        {"past": ("float32", ("b", "p", 4, 8)), "new": ("float32", ("b", "s", 4, 8))},
        {"y": ("float32", ("rows", "keys", 8))},
        {"free": np.array([-1]), "width": np.array([8])},
    )
    graph = assert_agrees(model, {"past": floats(2, 3, 4, 8), "new": floats(2, 1, 4, 8)})
    assert "//" not in str(graph.mod["main"].ret_ty)


def test_top_k_of_a_whole_symbolic_axis_is_a_sort() -> None:
    """torch.sort of dynamic exports: k is the size of the axis, which the graph computes."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("TopK", ["x", "sizes"], ["y", "places"], largest=0),
    ]
    outputs = {"y": ("float32", ("n",)), "places": ("int64", ("n",))}
    model = make_model(nodes, {"x": ("float32", ("n",))}, outputs)
    x = np.random.default_rng(0).standard_normal(9).astype("float32")
    assert_agrees(model, {"x": x})


def test_scatter_nd_takes_updates_whose_sizes_are_written_otherwise() -> None:
    """`b*s` updates at `s*b` places, as a mixture of experts puts its tokens back."""
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["data"]),
        helper.make_node("Reshape", ["order", "column"], ["places"]),
        helper.make_node("Reshape", ["u", "flat"], ["updates"]),
        helper.make_node("ScatterND", ["data", "places", "updates"], ["y"]),
    ]
    inputs = {"x": ("float32", ("b", "s")), "order": ("int64", ("s", "b")), "u": ("float32", ("b", "s"))}
    constants = {"flat": np.array([-1]), "column": np.array([-1, 1])}
    model = make_model(nodes, inputs, {"y": ("float32", ("n",))}, constants)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 3)).astype("float32") for name in ("x", "u")}
    assert_agrees(model, feeds | {"order": rng.permutation(6).reshape(3, 2) - 6})


@pytest.mark.parametrize(("side", "less"), [(16, 0), (23, 0), (3, 0), (17, 1), (3, 1)])
def test_floor_division_of_a_size_is_a_size(side: int, less: int) -> None:
    """PyTorch's exporter writes `(side - less) // 8` as a quotient, less one where signs differ and a rest is left."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"], start=1),
        helper.make_node("Squeeze", ["sizes"], ["whole_side"]),
        helper.make_node("Sub", ["whole_side", "fewer"], ["side"]),
        helper.make_node("Div", ["side", "eight"], ["quotient"]),
        helper.make_node("Sign", ["side"], ["sign"]),
        helper.make_node("Equal", ["sign", "one"], ["same"]),
        helper.make_node("Not", ["same"], ["differ"]),
        helper.make_node("Mod", ["side", "eight"], ["rest"]),
        helper.make_node("Cast", ["rest"], ["some"], to=TensorProto.BOOL),
        helper.make_node("And", ["differ", "some"], ["less"]),
        helper.make_node("Cast", ["less"], ["one_less"], to=TensorProto.INT64),
        helper.make_node("Sub", ["quotient", "one_less"], ["parts"]),
        helper.make_node("Unsqueeze", ["parts", "zero"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["y"]),
        # Conditions that depend on the size, as tensors.
        helper.make_node("Not", ["some"], ["whole"]),
        helper.make_node("Where", ["whole", "x", "minus"], ["z"]),
    ]
    constants = {"eight": np.array(8), "one": np.array(1), "zero": np.array([0]), "minus": np.array(-1, "float32")}
    constants["fewer"] = np.array(less)
    outputs = {"y": ("float32", ("parts",)), "z": ("float32", (1, "side"))}
    model = make_model(nodes, {"x": ("float32", (1, "side"))}, outputs, constants)
    graph = assert_agrees(model, {"x": np.arange(side, dtype="float32").reshape(1, side)})
    assert f"{'(side - 1)' if less else 'side'} // 8" in graph.mod.script()


def test_expand_of_a_symbolic_axis_is_checked_in_a_call() -> None:
    """A batch of 1 is stretched in ONNX; a kernel for three rows read two rows past its end."""
    node = helper.make_node("Expand", ["x", "sizes"], ["y"])
    specs = ({"x": ("float32", ("batch", 2))}, {"y": ("float32", (3, 2))})
    graph = import_model(make_model([node], *specs, {"sizes": np.array([3, 1])}))
    x = floats(3, 2)
    np.testing.assert_array_equal(run_relax(graph, {"x": x})[0], x)
    with pytest.raises(RuntimeError, match="mismatch to specified constant"):
        run_relax(graph, {"x": x[:1]})


ROWS = {"x": ("float32", ("t", 4)), "row": ("float32", ("u", 4))}


@pytest.mark.parametrize(("rows", "given"), [(7, 7), (1, 1), (5, 1)])
def test_expand_to_one_row_at_most_keeps_the_rows(rows: int, given: int) -> None:
    # TorchScript's `index_add_`: in a mixture of experts a row for each token came out as one.
    nodes = [
        helper.make_node("Slice", ["x", "zero", "one", "zero"], ["first"]),
        helper.make_node("Shape", ["first"], ["sizes"]),
        helper.make_node("Expand", ["row", "sizes"], ["y"]),
    ]
    model = make_model(
        nodes, ROWS, {"y": ("float32", ("u", 4))}, {"zero": np.array([0]), "one": np.array([1])}
    )  # fmt: skip
    assert_agrees(model, {"x": floats(rows, 4), "row": floats(given, 4)})


@pytest.mark.parametrize("opset", [11, 18])
def test_parts_of_a_symbolic_axis_are_checked_to_fit(opset: int) -> None:
    inputs, attributes = (["x", "parts"], {}) if opset > 12 else (["x"], {"split": [1, 2]})
    nodes = [
        helper.make_node("Split", inputs, ["a", "b"], axis=0, **attributes),
        helper.make_node("Concat", ["b", "a"], ["y"], axis=0),
    ]
    held = {"parts": np.array([1, 2])} if opset > 12 else {}
    model = make_model(nodes, {"x": ROWS["x"]}, {"y": ("float32", ("t", 4))}, held, opset=opset)
    graph = assert_agrees(model, {"x": floats(3, 4)})
    with pytest.raises(RuntimeError, match="match_cast"):
        run_relax(graph, {"x": floats(4, 4)})


@pytest.mark.parametrize("axes", [None, [1]])
def test_slice_with_attributes_as_until_opset_9(axes: list[int] | None) -> None:
    given = {} if axes is None else {"axes": axes}
    node = helper.make_node("Slice", ["x"], ["y"], starts=[-2], ends=[2**31 - 1], **given)
    shape = (3, 3) if axes else (2, 4)
    model = make_model([node], {"x": ("float32", (3, 4))}, {"y": ("float32", shape)}, opset=9)
    assert_agrees(model, {"x": floats(3, 4)})


@pytest.mark.parametrize(("start", "end"), [(0, 2), (-2, 2**63 - 1), (1, -1), (0, 9), (2, 1)])
def test_slices_of_old_opsets_have_their_bounds_in_attributes(start: int, end: int) -> None:
    node = helper.make_node("Slice", ["x"], ["y"], starts=[start], ends=[end], axes=[1])
    for columns in ("n", 5):
        model = make_model([node], {"x": ("float32", (2, columns))}, {"y": ("float32", (2, "m"))}, opset=9)
        for size in (5, 3) if columns == "n" else (5,):
            assert_agrees(model, {"x": floats(2, size)})


@pytest.mark.parametrize("operator", ["Expand", "ConstantOfShape"])
def test_shape_of_a_tensor_of_unknown_sizes_is_no_slip_of_a_converter(operator: str) -> None:
    inputs = ["one", "sizes"] if operator == "Expand" else ["sizes"]
    nodes = [
        helper.make_node("ConstantOfShape", ["wanted"], ["unknown"]),
        helper.make_node("Shape", ["unknown"], ["sizes"]),
        helper.make_node(operator, inputs, ["y"]),
    ]
    outputs = {"y": ("float32", ("m", "n"))}
    model = make_model(nodes, {"wanted": ("int64", (2,))}, outputs, {"one": np.ones((1, 1), "float32")})
    assert_agrees(model, {"wanted": np.array([2, 3])})
