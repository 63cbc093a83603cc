"""Cosines of positions, and buckets of relative ones, are read from tables, and computed where those end."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, lower
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.passes.symbolic import functions_of_positions
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.tir.expressions import call_names
from tests.pipeline.importer.onnx_cases import make_model, run_reference
from tests.pipeline.passes.pass_cases import assert_agrees, run_lowered

NODE = helper.make_node
FREQUENCIES = np.array([1.0, 0.1, 0.01, 0.001], "float32")
WEIGHT = np.random.default_rng(1).standard_normal((16, 2)).astype("float32")
NUMBERS = {"n0": np.array(0), "n1": np.array(1), "v0": np.array([0]), "v1": np.array([1]), "n2": np.array(2)}


def counted(data: str, axis: str, name: str) -> list[onnx.NodeProto]:
    """Return the nodes that count along an axis, given as a constant's name, of a tensor."""
    return [
        NODE("Shape", [data], [f"{name}_sizes"]),
        NODE("Gather", [f"{name}_sizes", axis], [f"{name}_length"]),
        NODE("Range", ["n0", f"{name}_length", "n1"], [name]),
    ]


def rotated(positions: list[onnx.NodeProto], **inputs: tuple[str, tuple[object, ...]]) -> OnnxModel:
    """Return x, [batch, length, 8], times cosines of angles of `places`, of one axis, and times their sines, too."""
    nodes = [
        *positions,
        NODE("Unsqueeze", ["places", "v1"], ["column"]),
        NODE("Cast", ["column"], ["real"], to=onnx.TensorProto.FLOAT),
        NODE("Mul", ["real", "frequencies"], ["half"]),
        NODE("Concat", ["half", "half"], ["angles"], axis=-1),
        NODE("Cos", ["angles"], ["cos"]),
        NODE("Sin", ["angles"], ["sin"]),
        NODE("Mul", ["x", "cos"], ["y"]),
        NODE("Mul", ["x", "sin"], ["turned"]),
        NODE("Mul", ["turned", "cos"], ["z"]),
    ]
    x = {"x": ("float32", ("batch", "length", 8)), **inputs}
    return make_model(nodes, x, {"y": x["x"], "z": x["x"]}, {**NUMBERS, "frequencies": FREQUENCIES})


def relative_bias(data: str) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """Return `bias`, [2, length, length], by the buckets of distances along axis 2 of a tensor, in T5's way."""
    constants = {
        **NUMBERS, "weight": WEIGHT, "four": np.array(4), "seven": np.array(7), "eight": np.array(8),
        "scale": np.array(4 / np.log(8), "float32"), "quarter": np.array(0.25, "float32"),
    }  # fmt: skip
    nodes = [
        *counted(data, "n2", "places"),
        NODE("Unsqueeze", ["places", "v0"], ["keys"]),
        NODE("Unsqueeze", ["places", "v1"], ["queries"]),
        NODE("Sub", ["keys", "queries"], ["relative"]),
        NODE("Greater", ["relative", "n0"], ["after"]),
        NODE("Cast", ["after"], ["after_it"], to=onnx.TensorProto.INT64),
        NODE("Mul", ["after_it", "eight"], ["offset"]),
        NODE("Abs", ["relative"], ["distance"]),
        NODE("Less", ["distance", "four"], ["near"]),
        NODE("Cast", ["distance"], ["real"], to=onnx.TensorProto.FLOAT),
        NODE("Mul", ["real", "quarter"], ["quarters"]),
        NODE("Log", ["quarters"], ["log"]),
        NODE("Mul", ["log", "scale"], ["steps"]),
        NODE("Cast", ["steps"], ["whole"], to=onnx.TensorProto.INT64),
        NODE("Add", ["whole", "four"], ["far"]),
        NODE("Min", ["far", "seven"], ["bounded"]),
        NODE("Where", ["near", "distance", "bounded"], ["of_side"]),
        NODE("Add", ["offset", "of_side"], ["bucket"]),
        NODE("Gather", ["weight", "bucket"], ["looked_up"]),
        NODE("Transpose", ["looked_up"], ["bias"], perm=[2, 0, 1]),
    ]
    return nodes, constants


def biased() -> OnnxModel:
    nodes, constants = relative_bias("x")
    shape = ("float32", ("batch", 2, "length", "length"))
    return make_model([*nodes, NODE("Add", ["x", "bias"], ["y"])], {"x": shape}, {"y": shape}, constants)


def past_and_present() -> OnnxModel:
    """Return the rotation of tokens that stand behind those of a cache."""
    positions = [
        NODE("Shape", ["cache"], ["cache_sizes"]),
        NODE("Gather", ["cache_sizes", "n1"], ["past"]),
        *counted("x", "n1", "present"),
        NODE("Add", ["present", "past"], ["places"]),
    ]
    return rotated(positions, cache=("float32", ("batch", "past", 3)))


def lowered_of(model: OnnxModel, target: str = "llvm", **maxima: int) -> LoweredModule:
    return lower(import_model(model), resolve_target(target).target, LoweringOptions(maxima=maxima))


def functions_called(lowered: LoweredModule) -> set[str]:
    return set[str]().union(*(call_names(lowered.mod[name].body) for name in lowered.kernels))


def random_of(**shapes: tuple[int, ...]) -> Mapping[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype("float32") for name, shape in shapes.items()}


@pytest.mark.parametrize(("disabled", "kernels"), [((), 2), (("tabulate_positions",), 3)])
def test_cosines_of_any_length_are_no_kernel_of_their_own(disabled: tuple[str, ...], kernels: int) -> None:
    graph = import_model(rotated(counted("x", "n1", "places")))
    options = LoweringOptions(disabled_passes=frozenset(disabled))
    lowered = lower(graph, resolve_target("cuda:sm_90a").target, options)
    assert sum(map(len, lowered.kernels.values())) == kernels


@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_a_rotation_agrees_with_onnx_runtime_where_its_table_ends(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions_of_positions, "POSITIONS", 5)
    model = rotated(counted("x", "n1", "places"))
    lowered = lowered_of(model)
    assert {"tirx.cos", "tirx.sin"} <= functions_called(lowered)
    feeds = random_of(x=(2, length, 8))
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)


@pytest.mark.parametrize(("past", "length"), [(0, 1), (3, 1), (4, 1), (2, 6), (9, 2)])
def test_a_rotation_behind_a_cache_agrees_with_onnx_runtime(
    past: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions_of_positions, "POSITIONS", 5)
    model = past_and_present()
    feeds = random_of(x=(2, length, 8), cache=(2, past, 3))
    assert_agrees(run_lowered(lowered_of(model), feeds), run_reference(model, feeds), 1e-6)


@pytest.mark.parametrize("copies", ["Expand", "Concat", "Tile"])
def test_a_place_that_is_copied_along_its_own_axis_agrees_with_onnx_runtime(copies: str) -> None:
    """One integer has one axis, along which a table has its positions; its copies are no positions."""
    nodes = [
        NODE("Shape", ["cache"], ["cache_sizes"]),
        NODE("Gather", ["cache_sizes", "v1"], ["past"]),
        NODE("Cast", ["past"], ["real"], to=onnx.TensorProto.FLOAT),
        NODE("Cos", ["real"], ["cos"]),
        NODE("Concat", ["cos"] * 4, ["copied"], axis=0)
        if copies == "Concat"
        else NODE(copies, ["cos", "v4"], ["copied"]),
        NODE("Mul", ["x", "copied"], ["y"]),
    ]
    inputs: dict[str, tuple[str, tuple[object, ...]]] = {
        "x": ("float32", ("batch", 4)),
        "cache": ("float32", ("batch", "past", 3)),
    }
    model = make_model(nodes, inputs, {"y": inputs["x"]}, {**NUMBERS, "v4": np.array([4])})
    for past in (1, 7):
        feeds = random_of(x=(2, 4), cache=(2, past, 3))
        assert_agrees(run_lowered(lowered_of(model), feeds), run_reference(model, feeds), 1e-6)


def test_with_maxima_tables_have_all_positions() -> None:
    lowered = lowered_of(past_and_present(), length=8, past=30)
    assert not {"tirx.cos", "tirx.sin"} & functions_called(lowered)
    feeds = random_of(x=(2, 8, 8), cache=(2, 30, 3))
    assert_agrees(run_lowered(lowered, feeds), run_reference(past_and_present(), feeds), 1e-6)


def test_positions_that_an_input_gives_are_no_table() -> None:
    model = rotated([NODE("Identity", ["given"], ["places"])], given=("int64", ("length",)))
    lowered = lowered_of(model)
    assert not any("table" in name for name in lowered.kernels)
    feeds = {**random_of(x=(2, 3, 8)), "given": np.array([7, -2, 100_000])}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)


@pytest.mark.quick_cases("settled")
@pytest.mark.parametrize(
    ("positions", "logarithms"), [pytest.param(64, False, id="settled"), pytest.param(9, True, id="unsettled")]
)
def test_buckets_agree_with_onnx_runtime_where_their_table_ends(
    positions: int, logarithms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bucket begins 32 places away: a table of 64 ends where all is the same, one of 9 does not."""
    monkeypatch.setattr(functions_of_positions, "POSITIONS", positions)
    lowered = lowered_of(biased())
    assert ("tirx.log" in functions_called(lowered)) == logarithms
    for length in (1, 9, 12, 70):
        feeds = random_of(x=(2, 2, length, length))
        assert_agrees(run_lowered(lowered, feeds), run_reference(biased(), feeds), 1e-6)


def test_a_table_that_is_stretched_over_rows_agrees_with_onnx_runtime() -> None:
    """transformers' fused form stretches the angles over the batch before it takes their cosine."""
    nodes = [
        *counted("x", "n1", "places"),
        NODE("Unsqueeze", ["places", "v1"], ["column"]),
        NODE("Cast", ["column"], ["real"], to=onnx.TensorProto.FLOAT),
        NODE("Mul", ["real", "frequencies"], ["angles"]),
        NODE("Shape", ["x"], ["whole"]),
        NODE("Slice", ["whole", "v0", "v2"], ["shape"]),
        NODE("Concat", ["shape", "v4"], ["stretched"], axis=0),
        NODE("Expand", ["angles", "stretched"], ["copies"]),
        NODE("Cos", ["copies"], ["cos"]),
        NODE("Mul", ["x", "cos"], ["y"]),
    ]
    constants = {**NUMBERS, "frequencies": FREQUENCIES, "v2": np.array([2]), "v4": np.array([4])}
    shape = ("float32", ("batch", "length", 4))
    model = make_model(nodes, {"x": shape}, {"y": shape}, constants)
    feeds = random_of(x=(3, 5, 4))
    assert_agrees(run_lowered(lowered_of(model), feeds), run_reference(model, feeds), 1e-6)
