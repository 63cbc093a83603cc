"""Slices at computed bounds: those that may lie outside of an axis are clipped to it, as ONNX has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, helper
from tvm import tirx

import relaxtune
from relaxtune.models import load_model
from relaxtune.models.spec import AxisRelation
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.importer.sizes import KnownSizes
from tests.pipeline.importer.onnx_cases import make_model

ROWS = 7
CONSTANTS = {
    "table": np.arange(ROWS * 2, dtype="float32").reshape(ROWS, 2), "zero": np.array([0]), "two": np.array([2]),
    "three": np.array([3]), "five": np.array([5]), "last": np.array([-1]), "axes": np.array([0, 1]),
}  # fmt: skip


def cut(start: str, end: str, *joined: NodeProto) -> list[NodeProto]:
    node = helper.make_node
    return [
        node("Shape", ["x"], ["n"], end=1),
        node("Mul", ["n", "two"], ["twice"]),
        node("Div", ["n", "two"], ["half"]),
        node("Mul", ["half", "three"], ["more"]),
        node("Sub", ["n", "five"], ["less"]),
        node("Slice", ["table", start, end, "zero"], ["rows"]),
        *(joined or [node("Neg", ["rows"], ["y"])]),
    ]


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[[list[NodeProto]], Module]:
    def made(nodes: list[NodeProto]) -> Module:
        model = make_model(nodes, {"x": ("float32", ("n", 2))}, {"y": ("float32", ("rows", "columns"))}, CONSTANTS)
        onnx.save(model.proto, tmp_path / "cut.onnx")
        return Module.load(
            relaxtune.compile(tmp_path / "cut.onnx", tmp_path / "artifact", target="llvm", samples=0).directory
        )

    return made


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("zero", "n"),
        ("zero", "twice"),
        ("zero", "more"),
        ("half", "more"),
        ("n", "twice"),
        ("zero", "less"),
        ("less", "n"),
    ],
)
def test_no_row_behind_the_table_is_read(
    compiled: Callable[[list[NodeProto]], Module], tmp_path: Path, start: str, end: str
) -> None:
    module = compiled(cut(start, end))
    session = ort.InferenceSession(tmp_path / "cut.onnx")
    for size in (1, 2, 3, 4, 6, 7, 8, 12, 40):
        given = {"x": np.ones((size, 2), "float32")}
        np.testing.assert_array_equal(module.run(given)["y"], session.run(None, given)[0])


@pytest.mark.parametrize("end", ["twice", "n"])
def test_no_second_row_behind_the_table_is_read(
    compiled: Callable[[list[NodeProto]], Module], tmp_path: Path, end: str
) -> None:
    module = compiled(cut("zero", end, helper.make_node("Slice", ["table", "zero", end, "zero", "two"], ["y"])))
    session = ort.InferenceSession(tmp_path / "cut.onnx")
    for size in (1, 2, 3, 6, 7, 8, 12):
        given = {"x": np.ones((size, 2), "float32")}
        np.testing.assert_array_equal(module.run(given)["y"], session.run(None, given)[0])


def test_bounds_of_one_axis_are_clipped_beside_an_axis_that_may_be_empty(
    compiled: Callable[[list[NodeProto]], Module], tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["columns"]),
        helper.make_node("MatMul", ["table", "columns"], ["wide"]),
        helper.make_node("Concat", ["zero", "last"], ["starts"], axis=0),
        helper.make_node("Concat", ["twice", "two"], ["ends"], axis=0),
        helper.make_node("Slice", ["wide", "starts", "ends", "axes"], ["y"]),
    ]
    module = compiled(cut("zero", "n", *nodes))
    session = ort.InferenceSession(tmp_path / "cut.onnx")
    for size in (1, 2, 3, 5, 9):
        given = {"x": np.ones((size, 2), "float32")}
        np.testing.assert_allclose(module.run(given)["y"], session.run(None, given)[0])


def test_rows_that_are_added_bound_the_call(compiled: Callable[[list[NodeProto]], Module]) -> None:
    tiled = [helper.make_node("Concat", ["x", "x"], ["both"], axis=0), helper.make_node("Add", ["both", "rows"], ["y"])]
    module = compiled(cut("zero", "twice", *tiled))
    given = {"x": np.ones((3, 2), "float32")}
    np.testing.assert_array_equal(module.run(given)["y"], CONSTANTS["table"][:6] + 1)
    said = r"axis '2 \* n' has size 8, table 'table' takes 7 at most \(n=4 from 'x'\)"
    with pytest.raises(PipelineError, match=said):
        module.run({"x": np.ones((4, 2), "float32")})


def test_rows_within_the_limit_are_cut_without_a_clip(tmp_path: Path) -> None:
    joined = [helper.make_node("Add", ["x", "rows"], ["y"])]
    model = make_model(cut("zero", "n", *joined), {"x": ("float32", ("n", 2))}, {"y": ("float32", ("n", 2))}, CONSTANTS)
    onnx.save(model.proto, tmp_path / "cut.onnx")
    assert "min" not in import_model(load_model(tmp_path / "cut.onnx")).mod.script()


def test_limits_are_compared_as_polynomials() -> None:
    n, m = (tirx.Var(name, "int64") for name in "nm")
    limits = KnownSizes(relations=[AxisRelation("m * n", "<=", "16"), AxisRelation("m", ">=", "((n + 1) // 2)")])
    assert limits.holds(16 - n * m)
    assert limits.holds(20 - n * m)
    assert not limits.holds(15 - n * m)
    assert limits.holds(m - tirx.floordiv(n + 1, 2))
    assert limits.holds(n + m)
    assert not limits.holds(n - m)
    assert not limits.holds(tirx.max(n, m) - 1)
