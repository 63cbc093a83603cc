"""Pad and Expand whose sizes are known when the model runs: no read behind a tensor."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.models.axes.relations import find_relations
from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model, run_reference, run_relax


@pytest.mark.parametrize(
    ("mode", "pads", "least"),
    [
        ("reflect", [3, 1], ["n >= 4"]),
        ("reflect", [2, -3], ["n >= 6"]),
        ("edge", [2, -3], ["n >= 4"]),
        ("edge", [2, 1], []),
        ("constant", [2, -3], []),
        ("constant", [-3, 0], ["n >= 3"]),
    ],
)
def test_padding_says_how_long_its_input_is_at_least(mode: str, pads: list[int], least: list[str]) -> None:
    node = helper.make_node("Pad", ["x", "pads", "", "axes"], ["y"], mode=mode, name="pad")
    constants = {"pads": np.array(pads), "axes": np.array([1])}
    model = make_model([node], {"x": ("float32", (2, "n"))}, {"y": ("float32", (2, "m"))}, constants)
    found = [f"{one.axis} {one.sign} {one.size}" for one in find_relations(model.proto)]
    assert found == least
    for bound in least:  # as ONNX Runtime takes it
        size = int(bound.split()[-1])
        assert run_reference(model, {"x": np.ones((2, size), "float32")})[0].shape == (2, size + sum(pads))
        with pytest.raises(Exception, match="Pad"):
            run_reference(model, {"x": np.ones((2, size - 1), "float32")})


def mirrored(size: int | None) -> OnnxModel:
    """Return a model that pads `size` places by 3 on both sides, places known when it runs where None."""
    nodes = [
        helper.make_node("Range", ["zero", "count", "one"], ["whole"]),
        helper.make_node("Cast", ["whole"], ["row"], to=1),
        helper.make_node("Pad", ["row" if size is None else "x", "pads"], ["y"], mode="reflect"),
    ]
    inputs = {"count": ("int64", ())} if size is None else {"x": ("float32", (size,))}
    constants = {"zero": np.array(0), "one": np.array(1), "pads": np.array([3, 3])}
    return make_model(nodes if size is None else nodes[2:], inputs, {"y": ("float32", ("m",))}, constants)


@pytest.mark.parametrize("count", [4, 9])
def test_mirror_of_a_size_known_when_the_model_runs_agrees(count: int) -> None:
    model = mirrored(None)
    assert_agrees(model, {"count": np.array(count)})


def test_mirror_of_too_few_places_stays_inside() -> None:
    model = mirrored(None)
    (got,) = run_relax(import_model(model), {"count": np.array(2)})
    assert set(got.tolist()) <= {0.0, 1.0}


def test_mirror_of_too_few_places_is_refused_where_they_are_known() -> None:
    model = mirrored(3)
    with pytest.raises(ImportFailedError, match="pads of axis 0: expected fewer than its 3 places, got 3 and 3"):
        import_model(model)


@pytest.mark.parametrize("size", [2, "n"])
def test_expand_beyond_an_axis_is_refused_when_the_model_runs(size: int | str) -> None:
    nodes = [helper.make_node("Mul", ["sizes", "one"], ["target"]), helper.make_node("Expand", ["x", "target"], ["y"])]
    inputs = {"x": ("float32", (1, size)), "sizes": ("int64", (2,))}
    model = make_model(nodes, inputs, {"y": ("float32", ("a", "b"))}, {"one": np.array(1)})
    x = np.array([[1, 2]], "float32")
    for target in ([3, 2], [3, 1]):
        assert_agrees(model, {"x": x, "sizes": np.array(target)})
    with pytest.raises(RuntimeError, match=r"mismatch|match_cast"):
        run_relax(import_model(model), {"x": x, "sizes": np.array([3, 4])})
