"""A short form of `out_of_range`: calls at and beyond limits read no memory behind tables or inputs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.pipeline.importer.onnx_cases import make_model

BEHIND = """
import ctypes, numpy as np
from tests.guardrails.out_of_range import guarded
table = guarded(np.zeros(({rows}, 16), "float32"))
assert table.sum() == 0
ctypes.string_at(table.ctypes.data + table.nbytes, 1)
"""


def test_a_read_behind_a_table_ends_the_process() -> None:
    for rows in (1, 50, 64, 1000):
        done = subprocess.run([sys.executable, "-c", BEHIND.format(rows=rows)], check=False, capture_output=True)
        assert done.returncode == -signal.SIGSEGV, done.stderr


@pytest.mark.slow
def test_calls_at_and_beyond_the_limits_stay_inside(tmp_path: Path) -> None:
    """Words, positions by a slice, rows by tuples and a branch; a few hundred calls."""
    rng = np.random.default_rng(0)
    branch = {
        name: helper.make_graph(
            [helper.make_node("Gather", ["kinds", "kind"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", "new", 8])],
        )
        for name in ("then_branch", "else_branch")
    }
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["x"]),
        helper.make_node("Shape", ["past"], ["before"], start=1, end=2),
        helper.make_node("Shape", ["ids"], ["new"], start=1, end=2),
        helper.make_node("Add", ["before", "new"], ["all"]),
        helper.make_node("Slice", ["places", "before", "all", "zero"], ["p"]),
        helper.make_node("Greater", ["before", "zero"], ["later"]),
        helper.make_node("If", ["later"], ["k"], **branch),
        helper.make_node("Unsqueeze", ["ids", "last"], ["tuples"]),
        helper.make_node("GatherND", ["words", "tuples"], ["w"]),
        helper.make_node("Sum", ["x", "p", "k", "w"], ["y"]),
    ]
    tables = {
        name: rng.standard_normal((rows, 8)).astype("float32")
        for name, rows in {"words": 50, "places": 20, "kinds": 2}.items()
    }
    constants = {**tables, "zero": np.array([0]), "last": np.array([-1])}
    ids = ("int64", ("batch", "new"))
    inputs = {"ids": ids, "kind": ids, "past": ("float32", ("batch", "past", 1))}
    model = make_model(nodes, inputs, {"y": ("float32", ("batch", "new", 8))}, constants)
    onnx.save(model.proto, tmp_path / "tables.onnx")
    words = [sys.executable, "-m", "tests.guardrails.out_of_range", str(tmp_path / "tables.onnx"), "--calls", "300"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = {line.split(maxsplit=2)[2] for line in done.stdout.splitlines()}
    assert said == {
        "run right, run_device inside",
        "run refused, run_device inside",
        "run refused, run_device refused",
    }, done.stdout
