"""Resize, Fourier transforms and fused convolutions against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.converters.test_contrib_converters import floats, model_of
from tests.pipeline.importer.onnx_cases import assert_agrees, run_relax


@pytest.mark.parametrize(
    ("mode", "coordinates", "sizes", "antialias"),
    [
        ("nearest", "half_pixel", (9, 13), 0),
        ("nearest", "asymmetric", (3, 4), 0),
        ("linear", "align_corners", (9, 13), 0),
        ("linear", "pytorch_half_pixel", (3, 4), 0),
        ("linear", "half_pixel", (3, 4), 1),
        ("cubic", "half_pixel", (9, 13), 0),
        ("cubic", "align_corners", (3, 4), 0),
        ("cubic", "half_pixel", (3, 4), 1),
    ],
)
def test_resize_to_sizes(mode: str, coordinates: str, sizes: tuple[int, int], antialias: int) -> None:
    x = floats(2, 3, 6, 7)
    inputs = [("x", x), None, None, ("sizes", np.array([2, 3, *sizes]))]
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    attributes |= {"antialias": 1} if antialias else {}
    attributes |= {"nearest_mode": "floor"} if mode == "nearest" else {}
    outputs = {"y": ("float32", (2, 3, *sizes))}
    model, feeds = model_of(
        "Resize", inputs, outputs, domain="", opset=19, constants=frozenset({"sizes"}), **attributes
    )
    assert_agrees(model, feeds, tolerance=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_resize_by_scales_of_some_axes(dtype: str) -> None:
    x = (floats(1, 2, 4, 6) * 50 + 128).astype(dtype)
    inputs = [("x", x), None, ("scales", np.array([2.0, 0.5], "float32"))]
    outputs = {"y": (dtype, (1, 2, 8, 3))}
    constants = frozenset({"scales"})
    attributes = {"axes": [2, 3], "mode": "nearest", "nearest_mode": "floor"}
    attributes["coordinate_transformation_mode"] = "asymmetric"
    assert_agrees(*model_of("Resize", inputs, outputs, domain="", opset=19, constants=constants, **attributes))


def test_resize_of_the_first_axes_interpolates_them() -> None:
    inputs = [("x", floats(3, 4, 2)), None, ("scales", np.array([2.0, 2.0, 1.0], "float32"))]
    outputs = {"y": ("float32", (6, 8, 2))}
    model, feeds = model_of(
        "Resize", inputs, outputs, domain="", opset=19, constants=frozenset({"scales"}), mode="linear"
    )
    (got,), (want,) = run_relax(import_model(model), feeds), ReferenceEvaluator(model.proto).run(None, feeds)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_resize_to_sizes_of_an_input_is_refused() -> None:
    inputs = [("x", floats(1, 1, 4, 4)), None, None, ("sizes", np.array([1, 1, 8, 8]))]
    model, _ = model_of("Resize", inputs, {"y": ("float32", (1, 1, "h", "w"))}, domain="", opset=19)
    with pytest.raises(ImportFailedError, match="known at run time only"):
        import_model(model)


@pytest.mark.parametrize(
    ("parts", "attributes", "length"),
    [
        (1, {}, None),
        (2, {}, None),
        (1, {"onesided": 1}, None),
        (2, {"inverse": 1}, None),
        (1, {"onesided": 1}, 8),
        (1, {}, 14),
    ],
)
def test_dft(parts: int, attributes: dict[str, int], length: int | None) -> None:
    given = 10
    inputs = [("x", floats(2, 3, given, parts))]
    inputs += [("n", np.array(length))] if length else []
    count = length or given
    outputs = {"y": ("float32", (2, 3, count // 2 + 1 if "onesided" in attributes else count, 2))}
    model, feeds = model_of("DFT", inputs, outputs, domain="", opset=20, constants=frozenset({"n"}), **attributes)
    (got,), (want,) = run_relax(import_model(model), feeds), ReferenceEvaluator(model.proto).run(None, feeds)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [True, False])
def test_stft(window: bool) -> None:
    inputs = [("x", floats(2, 40, 1)), ("step", np.array(5))]
    inputs += [("w", np.hanning(16).astype("float32")) if window else None, ("n", np.array(16))]
    model, feeds = model_of(
        "STFT", inputs, {"y": ("float32", (2, 5, 9, 2))}, domain="", opset=17, constants=frozenset({"step", "n", "w"})
    )
    assert_agrees(model, feeds, tolerance=1e-4)


@pytest.mark.parametrize("activation", ["Relu", "Tanh", "Sigmoid", "LeakyRelu"])
@pytest.mark.parametrize("addend", [True, False])
def test_fused_conv(activation: str, addend: bool) -> None:
    inputs = [("x", floats(1, 3, 6, 6)), ("w", floats(4, 3, 3, 3)), ("b", floats(4))]
    inputs += [("z", floats(1, 4, 6, 6))] if addend else []
    attributes: dict[str, object] = {"pads": [1, 1, 1, 1], "activation": activation}
    attributes |= {"activation_params": [0.2]} if activation == "LeakyRelu" else {}
    outputs = {"y": ("float32", (1, 4, 6, 6))}
    model, feeds = model_of("FusedConv", inputs, outputs, constants=frozenset({"w", "b"}), **attributes)
    assert_agrees(model, feeds, tolerance=1e-4)
