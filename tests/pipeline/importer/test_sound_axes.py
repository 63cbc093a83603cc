"""Sound of any length: padded to a length, cut into frames, and parts of it joined again, against ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper

from relaxtune.models.axes.relations import find_relations
from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model

_RNG = np.random.default_rng(0)
_SIGNAL = {"x": ("float32", ["batch", "samples"])}
_LENGTH = helper.make_node("Shape", ["x"], ["length"], start=1, end=2)


def _signal(samples: int) -> dict[str, np.ndarray]:
    return {"x": _RNG.standard_normal((2, samples)).astype("float32")}


def _padded(mode: str) -> list:
    return [
        _LENGTH,
        helper.make_node("Sub", ["whole", "length"], ["missing"]),
        helper.make_node("Mul", ["missing", "at_the_end"], ["pads"]),
        helper.make_node("Pad", ["x", "pads", "fill"], ["y"], mode=mode),
    ]


_PADS = {"whole": np.array([9]), "at_the_end": np.array([0, 0, 0, 1]), "fill": np.float32(0.5)}


@pytest.mark.parametrize("samples", [4, 9, 12])
def test_padding_to_a_length_fills_or_cuts(samples: int) -> None:
    model = make_model(_padded("constant"), _SIGNAL, {"y": ("float32", ["batch", 9])}, _PADS)
    graph = assert_agrees(model, _signal(samples))
    assert graph.mod["main"].ret_ty.shape[1] == 9


def test_mirror_of_a_length_is_refused() -> None:
    model = make_model(_padded("reflect"), _SIGNAL, {"y": ("float32", ["batch", 9])}, _PADS)
    with pytest.raises(ImportFailedError, match="expected 'constant' for pads that sizes decide, got 'reflect'"):
        import_model(model)


@pytest.mark.parametrize("samples", [8, 13])
@pytest.mark.parametrize("places", [2, 3])
def test_frames_of_any_length_are_transformed(samples: int, places: int) -> None:
    inputs = ["x", "step", "window"] if places == 2 else ["tall", "step", "window"]
    nodes = [
        helper.make_node("Unsqueeze", ["x", "last"], ["tall"]),
        helper.make_node("STFT", inputs, ["frames"]),
        helper.make_node("ReduceSumSquare", ["frames", "last"], ["y"], keepdims=0),
    ]
    constants = {"step": np.array(3), "window": np.hanning(8).astype("float32"), "last": np.array([-1])}
    model = make_model(nodes, _SIGNAL, {"y": ("float32", ["batch", "count", 5])}, constants, opset=18)
    model = replace(model, relations=find_relations(model.proto))
    assert [str(one) for one in model.relations] == ["samples (x[1]) >= 8, by STFT 'frames'"]
    assert_agrees(model, _signal(samples), 1e-4)


@pytest.mark.parametrize("samples", [1, 6])
def test_first_and_later_places_together_are_all(samples: int) -> None:
    """As an emphasis of high tones is written; a signal has one place at least."""
    nodes = [
        helper.make_node("Slice", ["x", "zero", "one", "one"], ["first"]),
        helper.make_node("Slice", ["x", "one", "end", "one"], ["later"]),
        helper.make_node("Slice", ["x", "zero", "last", "one"], ["before"]),
        helper.make_node("Sub", ["later", "before"], ["steps"]),
        helper.make_node("Concat", ["first", "steps"], ["all"], axis=-1),
        helper.make_node("Add", ["x", "all"], ["y"]),
    ]
    constants = {"zero": np.array([0]), "one": np.array([1]), "last": np.array([-1]), "end": np.array([2**63 - 1])}
    model = make_model(nodes, _SIGNAL, {"y": ("float32", ["batch", "samples"])}, constants)
    graph = assert_agrees(model, _signal(samples))
    assert str(graph.mod["main"].ret_ty.shape[1]) == "samples"


@pytest.mark.parametrize("samples", [8, 12])
def test_parts_that_are_joined_have_one_size(samples: int) -> None:
    """The importer cannot prove that the quotient of the length lies inside of the signal."""
    nodes = [
        _LENGTH,
        helper.make_node("Div", ["length", "four"], ["quarter"]),
        helper.make_node("Max", ["quarter", "one"], ["count"]),
        helper.make_node("Add", ["count", "one"], ["next"]),
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("Slice", ["t", "zero", "count", "zero"], ["a"]),
        helper.make_node("Slice", ["t", "one", "next", "zero"], ["b"]),
        helper.make_node("Concat", ["a", "b"], ["joined"], axis=1),
        helper.make_node("Reshape", ["joined", "pairs"], ["y"]),
    ]
    constants = {"zero": np.array([0]), "one": np.array([1]), "four": np.array([4]), "pairs": np.array([0, 2, -1])}
    model = make_model(nodes, _SIGNAL, {"y": ("float32", ["quarter", 2, "batch"])}, constants)
    assert_agrees(model, _signal(samples))
