"""Norms, reductions, caches and elementwise forms that TVM lacks or has wrong, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.converters.test_contrib_converters import floats, model_of
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model, run_relax


@pytest.mark.parametrize("axis", [-1, 1, -3])
@pytest.mark.parametrize("beta", [True, False])
def test_layer_norm_with_mean_and_inverse_deviation(axis: int, beta: bool) -> None:
    shape = (2, 3, 8)
    kept = tuple(1 if place >= axis % 3 else size for place, size in enumerate(shape))
    inputs = [("x", floats(*shape)), ("g", floats(*shape[axis % 3 :]))]
    inputs += [("b", floats(*shape[axis % 3 :]))] if beta else []
    outputs = {"y": ("float32", shape), "mean": ("float32", kept), "inverse": ("float32", kept)}
    assert_agrees(*model_of("LayerNormalization", inputs, outputs, domain="", axis=axis, epsilon=1e-5))


@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_rms_norm_over_several_axes(axis: int) -> None:
    inputs = [("x", floats(2, 3, 8)), ("g", floats(*(2, 3, 8)[axis % 3 :]))]
    outputs = {"y": ("float32", (2, 3, 8))}
    assert_agrees(*model_of("RMSNormalization", inputs, outputs, domain="", opset=23, axis=axis))


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("axis", [-1, 0])
def test_lp_norm_leaves_zeros_zero(power: int, axis: int) -> None:
    x = floats(4, 6)
    x[:, 2] = 0
    x[1] = 0
    assert_agrees(*model_of("LpNormalization", [("x", x)], {"y": ("float32", (4, 6))}, domain="", p=power, axis=axis))


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("kept", [0, 1])
def test_extremes_over_the_axes_of_an_attribute(op: str, kept: int) -> None:
    shape = (3, 4, 1) if kept else (3, 4)
    outputs = {"y": ("float32", shape)}
    assert_agrees(*model_of(op, [("x", floats(3, 4, 5))], outputs, domain="", opset=13, axes=[-1], keepdims=kept))


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_extremes_of_truth_values(op: str) -> None:
    inputs = [("x", floats(3, 4) > 0.3), ("axes", np.array([1]))]
    model, feeds = model_of(op, inputs, {"y": ("bool", (3, 1))}, domain="", opset=20, constants=frozenset({"axes"}))
    (got,) = run_relax(import_model(model), feeds)
    want = feeds["x"].any(1, keepdims=True) if op == "ReduceMax" else feeds["x"].all(1, keepdims=True)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("signs", [{}, {"detect_negative": 0}, {"detect_positive": 0}])
def test_is_inf_of_one_sign(signs: dict[str, int]) -> None:
    x = np.array([1, np.inf, -np.inf, np.nan], "float32")
    assert_agrees(*model_of("IsInf", [("x", x)], {"y": ("bool", (4,))}, domain="", **signs))


@pytest.mark.parametrize(("base", "power"), [("int32", "int32"), ("float32", "int64"), ("int64", "float32")])
def test_pow_of_two_dtypes(base: str, power: str) -> None:
    inputs = [("x", np.array([1, 2, 3], base)), ("p", np.array([5, 3, 2], power))]
    assert_agrees(*model_of("Pow", inputs, {"y": (base, (3,))}, domain=""))


@pytest.mark.parametrize(("k", "dtype"), [(0, 1), (1, 7), (-1, 1)])
def test_eye_like(k: int, dtype: int) -> None:
    outputs = {"y": ("float32" if dtype == 1 else "int64", (3, 4))}
    model, feeds = model_of("EyeLike", [("x", np.zeros((3, 4), "int32"))], outputs, domain="", k=k, dtype=dtype)
    assert_agrees(model, feeds)


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("flat", [True, False])
def test_tensor_scatter_writes_each_row_at_its_place(mode: str, flat: bool) -> None:
    lead = (2,) if flat else (2, 3)
    cache, update = floats(*lead, 6, 4), floats(*lead, 2, 4)
    starts = np.array([1, 5 if mode == "circular" else 4])
    inputs = [("c", cache), ("u", update), ("i", starts)]
    model, feeds = model_of("TensorScatter", inputs, {"y": ("float32", cache.shape)}, domain="", opset=24, mode=mode)
    want = cache.copy()
    for row, start in enumerate(starts):
        for offset in range(2):
            want[row, ..., (start + offset) % 6, :] = update[row, ..., offset, :]
    np.testing.assert_array_equal(run_relax(import_model(model), feeds)[0], want)


@pytest.mark.parametrize("attributes", [{}, {"transA": 1, "transB": 1}, {"alpha": 0.5, "beta": 2.0}])
@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu"])
def test_fused_gemm(attributes: dict[str, float], activation: str) -> None:
    turned = "transA" in attributes
    inputs = [("a", floats(5, 3) if turned else floats(3, 5)), ("b", floats(4, 5) if turned else floats(5, 4))]
    inputs += [("c", floats(4))]
    given = {**attributes, "activation": activation}
    given |= {"activation_alpha": 0.3} if activation == "LeakyRelu" else {}
    assert_agrees(*model_of("FusedGemm", inputs, {"y": ("float32", (3, 4))}, **given))


@pytest.mark.parametrize("shape", [(2, 1, 6), (2, 3, 6)])
def test_expand_to_a_shape_of_an_input_lets_ones_give_way(shape: tuple[int, ...]) -> None:
    model = make_model(
        [helper.make_node("Expand", ["x", "s"], ["y"])],
        {"x": ("float32", (3, 1)), "s": ("int64", (3,))},
        {"y": ("float32", ("a", "b", "c"))},
    )
    assert_agrees(model, {"x": floats(3, 1), "s": np.array(shape)})


def test_bounds_of_a_slice_that_are_inputs_are_refused() -> None:
    inputs = [("x", floats(4, 4)), ("starts", np.array([1])), ("ends", np.array([3]))]
    model, _ = model_of("Slice", inputs, {"y": ("float32", ("n", 4))}, domain="")
    with pytest.raises(ImportFailedError, match=r"input 1 \(starts\): expected a constant or sizes"):
        import_model(model)


@pytest.mark.parametrize(
    ("op", "inputs", "shape", "attributes", "message"),
    [
        ("SpaceToDepth", [("x", floats(1, 1, 4, 4))], (1, 4, 2, 2), {"blocksize": 2, "mode": "CRD"}, "got 'CRD'"),
        (
            "ConvTranspose",
            [("x", floats(1, 1, 3, 3)), ("w", floats(1, 1, 3, 3))],
            (1, 1, 6, 6),
            {"output_shape": [6, 6]},
            r"expected \[5, 5\], as the pads give",
        ),
    ],
)
def test_attributes_that_tvm_ignores_are_refused(
    op: str, inputs: list[tuple[str, np.ndarray]], shape: tuple[int, ...], attributes: dict[str, object], message: str
) -> None:
    model, _ = model_of(op, inputs, {"y": ("float32", shape)}, domain="", **attributes)
    with pytest.raises(ImportFailedError, match=message):
        import_model(model)


def test_training_mode_is_refused() -> None:
    inputs = [("x", floats(2, 3)), ("r", np.array(0.5, "float32")), ("t", np.array(True))]
    model, _ = model_of("Dropout", inputs, {"y": ("float32", (2, 3))}, domain="", constants=frozenset({"r", "t"}))
    with pytest.raises(ImportFailedError, match="Dropout in training mode"):
        import_model(model)


@pytest.mark.parametrize(
    ("axis", "gamma", "beta"),
    [(-1, (1,), None), (-1, (), (8,)), (1, (8,), (3, 8)), (-1, (3, 8), (1,)), (1, (3, 1), None)],
)
def test_layer_norm_whose_scale_and_bias_broadcast(
    axis: int, gamma: tuple[int, ...], beta: tuple[int, ...] | None
) -> None:
    inputs = [("x", floats(2, 3, 8)), ("g", floats(*gamma))]
    inputs += [] if beta is None else [("b", floats(*beta))]
    outputs = {"y": ("float32", (2, 3, 8))}
    assert_agrees(*model_of("LayerNormalization", inputs, outputs, domain="", axis=axis, epsilon=1e-5))


@pytest.mark.parametrize("shape", [(1, 4, 9), (2, 3, 5, 4), (6, 3)])
def test_batch_norm_in_training_mode_takes_the_statistics_of_its_input(shape: tuple[int, ...]) -> None:
    channels = shape[1]
    x, scale, bias = 3 * floats(*shape) + 1, floats(channels), floats(channels)
    nodes = [helper.make_node("BatchNormalization", ["x", *"sbmv"], ["y", "m2", "v2"], training_mode=1, epsilon=1e-3)]
    constants = {"s": scale, "b": bias, "m": np.zeros(channels, "float32"), "v": np.ones(channels, "float32")}
    model = make_model(nodes, {"x": ("float32", shape)}, {"y": ("float32", shape)}, constants)
    axes = tuple(axis for axis in range(len(shape)) if axis != 1)
    along = (-1, *[1] * (len(shape) - 2))
    normed = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-3)
    want = normed * scale.reshape(along) + bias.reshape(along)
    np.testing.assert_allclose(run_relax(import_model(model), {"x": x})[0], want, rtol=1e-5, atol=1e-5)
