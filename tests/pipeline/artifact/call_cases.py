"""Calls of artifacts and what becomes of them: one table, which the runtimes of Python and of C++ both keep.

A call goes to a bucket as it is, is padded up to one, runs with symbolic sizes, or is refused with the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

import relaxtune
from relaxtune.models.buckets import Side
from relaxtune.models.spec import AxisRelation
from relaxtune.pipeline.artifact.directory import load_manifest, record_padding
from relaxtune.pipeline.artifact.entries import PaddingEntry
from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE
from tests.pipeline.importer.onnx_cases import make_model

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class CallCase:
    """A call of one of the artifacts: `route` is "exact", "padded", "symbolic", or "" for a call that is refused.

    `said` is a pattern of the refusal; names stand in quotes or not.
    """

    artifact: str
    inputs: Arrays
    route: str = "symbolic"
    said: str = ""


def _build(folder: Path, nodes: list[onnx.NodeProto], *parts: object, **options: object) -> Path:
    onnx.save(make_model(nodes, *parts).proto, folder / "model.onnx")
    return relaxtune.compile(folder / "model.onnx", folder / "artifact", target="llvm", samples=0, **options).directory


def build_padded(folder: Path) -> Path:
    """Return an artifact whose calls are padded on both sides; its outputs show what padding holds."""
    nodes = [
        helper.make_node("Add", ["x", "half_mask"], ["hidden"]),
        helper.make_node("ReduceMin", ["hidden"], ["least"], keepdims=1),
        helper.make_node("ReduceMax", ["hidden", "last"], ["most"], keepdims=0),
        helper.make_node("Add", ["cache", "one"], ["grown"]),
        helper.make_node("Not", ["attention_mask"], ["hides"]),
    ]
    inputs = {
        "x": ("float16", ("n", "s")),
        "half_mask": ("float16", ("n", "s")),
        "cache": ("float32", ("n", "p", 2)),
        "attention_mask": ("bool", ("n", "p + 1")),
    }
    outputs = {
        "hidden": ("float16", ("n", "s")),
        "least": ("float16", (1, 1)),
        "most": ("float16", ("n",)),
        "grown": ("float32", ("n", "p", 2)),
        "hides": ("bool", ("n", "p + 1")),
    }
    constants = {"one": np.ones(1, "float32"), "last": np.array([1])}
    made = _build(folder, nodes, inputs, outputs, constants, buckets={"n": (4,), "s": (8,), "p": (6,)})
    sides = {"n": Side.RIGHT, "s": Side.RIGHT, "p": Side.LEFT}
    record_padding(made, tuple(PaddingEntry(axis, side, 1) for axis, side in sides.items()))
    return made


def _padded(n: int, s: int, p: int, *, hides_a_row: bool = False) -> Arrays:
    rng = np.random.default_rng(n * s * p)
    mask = np.zeros((n, s), "float16")
    mask[-1:, -1] = -1e4
    if hides_a_row:
        mask[:1] = -1e4
    return {
        "x": -np.abs(rng.standard_normal((n, s))).astype("float16"),
        "half_mask": mask,
        "cache": rng.standard_normal((n, p, 2)).astype("float32"),
        "attention_mask": np.ones((n, p + 1), bool),
    }


def build_bounded(folder: Path) -> Path:
    """Return an artifact of 3 to 6 rows, of columns that with three times the rows are no more than 40 less 2."""
    spec = ("float32", ("n", "m"))
    made = _build(folder, [helper.make_node("Relu", ["x"], ["y"])], {"x": spec}, {"y": spec}, {}, buckets={"n": (4,)})
    least = AxisRelation("m", ">=", "min(n, 9) // 2 - 1")
    limits = (AxisRelation("m", "<=", "40 - 3 * n", table="table 'places'"), least)
    manifest = replace(load_manifest(made), minima={"n": 3}, maxima={"n": 6}, limits=limits)
    (made / MANIFEST_FILE).write_text(manifest.to_json())
    return made


def _bounded(n: int, m: int) -> Arrays:
    return {"x": np.random.default_rng(n).standard_normal((n, m)).astype("float32")}


def build_tables(folder: Path) -> Path:
    """Return an artifact that looks ids up in 50 rows, and positions from `past` on in 20."""
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["x"]),
        helper.make_node("Shape", ["past"], ["before"], start=1, end=2),
        helper.make_node("Shape", ["ids"], ["new"], start=1, end=2),
        helper.make_node("Add", ["before", "new"], ["all"]),
        helper.make_node("Slice", ["places", "before", "all", "zero"], ["p"]),
        helper.make_node("Add", ["x", "p"], ["y"]),
    ]
    inputs = {"ids": ("int32", ("batch", "new")), "past": ("float32", ("batch", "past", 1))}
    tables = {"words": np.arange(100, dtype="float32").reshape(50, 2), "places": np.ones((20, 2), "float32")}
    outputs = {"y": ("float32", ("batch", "new", 2))}
    return _build(folder, nodes, inputs, outputs, {**tables, "zero": np.array([0])})


def _tables(past: int, new: int, ids: int) -> Arrays:
    return {"ids": np.full((1, new), ids, "int32"), "past": np.zeros((1, past, 1), "float32")}


ARTIFACTS: dict[str, Callable[[Path], Path]] = {
    "padded": build_padded,
    "bounded": build_bounded,
    "tables": build_tables,
}
CASES = (
    CallCase("padded", _padded(4, 8, 6), "exact"),
    CallCase("padded", _padded(3, 5, 2), "padded"),
    CallCase("padded", _padded(1, 8, 6), "padded"),
    CallCase("padded", _padded(4, 8, 0), "padded"),
    # A row that hides all its places is a mean over every place, padding among them.
    CallCase("padded", _padded(4, 7, 6, hides_a_row=True)),
    CallCase("padded", _padded(4, 8, 6, hides_a_row=True), "exact"),
    CallCase("padded", _padded(4, 8, 7)),
    CallCase("padded", _padded(5, 8, 6)),
    CallCase("padded", _padded(0, 8, 6), "", "axis 'n' has size 0"),
    CallCase("padded", {**_padded(4, 8, 6), "x": np.zeros((3, 8), "float16")}, "", "input 'half_mask'.* 4x8"),
    CallCase(
        "padded", {**_padded(4, 8, 6), "x": np.zeros((4, 8), "float32")}, "", "expected dtype float16, got float32"
    ),
    CallCase("bounded", _bounded(4, 28), "exact"),
    # Nothing was tried along this axis.
    CallCase("bounded", _bounded(3, 2)),
    CallCase("bounded", _bounded(6, 22)),
    CallCase("bounded", _bounded(2, 2), "", "axis 'n' has size 2.*expected 3 or more, the room that poolings"),
    CallCase("bounded", _bounded(7, 2), "", "axis 'n' has size 7.*the profile .* has 6 at most"),
    CallCase("bounded", _bounded(4, 29), "", "axis 'm' has size 29, table 'places' takes 28 at most"),
    CallCase("bounded", _bounded(6, 1), "", "axis 'm' has size 1, the graph takes 2 or more"),
    CallCase("tables", _tables(0, 20, 49)),
    CallCase("tables", _tables(19, 1, -50)),
    CallCase("tables", _tables(0, 21, 0), "", r"axis 'new \+ past' has size 21, table 'places' takes 20 at most"),
    CallCase("tables", _tables(400, 400, 0), "", r"axis 'new \+ past' has size 800, table 'places' takes 20 at most"),
    CallCase("tables", _tables(0, 3, 50), "", "input 'ids' has the value 50, table 'words' .* takes -50 to 49"),
    CallCase("tables", _tables(0, 3, -51), "", "input 'ids' has the value -51, table 'words' .* takes -50 to 49"),
)


def without_quotes(said: str) -> str:
    """Return a pattern, or a message, without the quotes around names, in which the two runtimes differ."""
    return said.replace("'", "")
