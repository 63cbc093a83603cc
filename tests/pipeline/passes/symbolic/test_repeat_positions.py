"""Positions that an embedding and a mask read are part of both kernels."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import make_model, run_reference
from tests.pipeline.passes.pass_cases import assert_agrees, run_lowered

NODE = helper.make_node
TABLE = np.random.default_rng(1).standard_normal((40, 8)).astype("float32")


def counted(axis: str) -> list[onnx.NodeProto]:
    """Return the nodes that count along an axis of x, given as a constant's name."""
    return [
        NODE("Shape", ["x"], ["sizes"]),
        NODE("Gather", ["sizes", axis], ["length"]),
        NODE("Range", ["n0", "length", "n1"], ["counted"]),
    ]


def embedding_and_mask() -> OnnxModel:
    """Positions of a sequence with rows of a table, and a causal mask of the same positions."""
    constants = {
        "n0": np.array(0), "n1": np.array(1), "v1": np.array([1]), "first": np.array([0]), "last": np.array([1]),
        "table": TABLE, "off": np.array(-1.0, "float32"), "on": np.array(0.0, "float32"),
    }  # fmt: skip
    nodes = [
        *counted(axis="n1"),
        NODE("Add", ["counted", "n1"], ["places"]),
        NODE("Gather", ["table", "places"], ["rows"]),
        NODE("Add", ["x", "rows"], ["y"]),
        NODE("Unsqueeze", ["places", "first"], ["keys"]),
        NODE("Unsqueeze", ["places", "last"], ["queries"]),
        NODE("LessOrEqual", ["keys", "queries"], ["seen"]),
        NODE("Where", ["seen", "on", "off"], ["mask"]),
    ]
    return make_model(
        nodes,
        {"x": ("float32", ("batch", "length", 8))},
        {"y": ("float32", ("batch", "length", 8)), "mask": ("float32", ("length", "length"))},
        constants,
    )


@pytest.mark.parametrize(("disabled", "kernels"), [((), 2), (("repeat_positions",), 3)])
def test_positions_are_no_kernel_of_their_own(disabled: tuple[str, ...], kernels: int) -> None:
    """Counted for a GPU, where the look-up is one kernel with the sum behind it."""
    graph = import_model(embedding_and_mask())
    options = LoweringOptions(disabled_passes=frozenset(disabled))
    lowered = lower(graph, resolve_target("cuda:sm_90a").target, options)
    assert sum(map(len, lowered.kernels.values())) == kernels


def test_a_graph_with_repeated_positions_agrees_with_onnx_runtime() -> None:
    model = embedding_and_mask()
    lowered = lower(import_model(model), resolve_target("llvm").target)
    assert any("arange" in name and "less_equal" in name for name in lowered.kernels)
    for batch, length in ((1, 1), (2, 7)):
        feeds = {"x": np.random.default_rng(0).standard_normal((batch, length, 8)).astype("float32")}
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 0.0)


def test_positions_that_are_outputs_too_are_computed_once_for_those() -> None:
    nodes = [
        *counted(axis="n0"),
        NODE("Add", ["counted", "x"], ["y"]),
        NODE("Mul", ["counted", "x"], ["z"]),
    ]
    shape = {name: ("int64", ("length",)) for name in ("y", "z", "counted")}
    model = make_model(nodes, {"x": ("int64", ("length",))}, shape, {"n0": np.array(0), "n1": np.array(1)})
    lowered = lower(import_model(model), resolve_target("llvm").target)
    feeds = {"x": np.arange(5) * 3}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 0.0)
