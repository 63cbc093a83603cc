"""Nested functions are counted before anything writes them out."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from relaxtune.models import load_model
from relaxtune.models.errors import InvalidModelError, UnsupportedModelError
from relaxtune.models.inference import DEPTH_MAX, NODES_MAX, check_expansion

OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]


def nested(depth: int, width: int, *calls: int) -> onnx.ModelProto:
    """Return functions each of which calls the one before it so often; the graph calls the last, and others before."""
    functions = []
    for level in range(depth):
        operator, domain = (f"f{level - 1}", "own") if level else ("Neg", "")
        names = ["x", *(f"y{place}" for place in range(width))]
        nodes = [helper.make_node(operator, [a], [b], domain=domain) for a, b in itertools.pairwise(names)]
        functions.append(helper.make_function("own", f"f{level}", ["x"], names[-1:], nodes, OPSETS))
    called = [*calls, depth - 1]
    names = ["x", *(f"t{place}" for place in range(len(called) - 1)), "y"]
    graph = helper.make_graph(
        [helper.make_node(f"f{one}", [names[n]], [names[n + 1]], domain="own") for n, one in enumerate(called)],
        "nested",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
    )
    return helper.make_model(graph, opset_imports=OPSETS, functions=functions, ir_version=9)


def test_file_of_a_few_functions_that_stands_for_millions_of_nodes_is_refused_at_once(tmp_path: Path) -> None:
    onnx.save(nested(60, 2), tmp_path / "bomb.onnx")
    started = time.perf_counter()
    with pytest.raises(
        UnsupportedModelError, match=f"more than {NODES_MAX:,} nodes when its functions are written out"
    ):
        load_model(tmp_path / "bomb.onnx")
    assert time.perf_counter() - started < 5


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [0.2, 1.5])
def test_ctrl_c_ends_the_load_of_the_largest_file_at_once(tmp_path: Path, wait_s: float) -> None:
    """onnx's library sees no signal while it follows the calls: the limit bounds how long that takes."""
    model = nested(5, 10)
    assert NODES_MAX == 10**5
    check_expansion(model)
    onnx.save(model, tmp_path / "large.onnx")
    program = "from relaxtune.pipeline.cli import app, main; print('ready', flush=True); main()"
    command = [sys.executable, "-c", program, "compile", "large.onnx"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(wait_s)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=8)[1]
        finally:
            process.kill()
    assert process.returncode == 130
    assert "INFO load:" not in errors
    assert errors.endswith("interrupted\n")


def test_bomb_inside_of_a_branch_is_counted() -> None:
    model = nested(30, 2)
    inner = onnx.GraphProto()
    inner.CopyFrom(model.graph)
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner))
    with pytest.raises(UnsupportedModelError, match="nodes"):
        check_expansion(model)


def test_branches_of_functions_are_counted(tmp_path: Path) -> None:
    model = nested(30, 1)
    for function in model.functions[1:]:
        (call,) = function.node
        branch = helper.make_graph([call], "branch", [], [helper.make_tensor_value_info("y0", TensorProto.FLOAT, None)])
        true = helper.make_node("Constant", [], ["true"], value=helper.make_tensor("", TensorProto.BOOL, [], [True]))
        choice = helper.make_node("If", ["true"], ["y0"], then_branch=branch, else_branch=branch)
        del function.node[:]
        function.node.extend([true, choice])
    onnx.save(model, tmp_path / "bomb.onnx")
    with pytest.raises(UnsupportedModelError, match="nodes when its functions are written out"):
        load_model(tmp_path / "bomb.onnx")


def test_branches_inside_of_branches_end_in_seconds(tmp_path: Path) -> None:
    """A branch is written out in the file, so its nodes are those that a reader meets."""
    model = nested(1, 1)
    true = helper.make_node("Constant", [], ["true"], value=helper.make_tensor("", TensorProto.BOOL, [], [True]))
    nodes = [helper.make_node("Neg", ["x"], ["y0"])]
    for level in range(12):
        sides = [
            helper.make_graph(nodes, "side", [], [helper.make_tensor_value_info(f"y{level}", TensorProto.FLOAT, None)])
            for _ in range(2)
        ]
        output = "y" if level == 11 else f"y{level + 1}"
        nodes = [helper.make_node("If", ["true"], [output], then_branch=sides[0], else_branch=sides[1])]
    del model.graph.node[:]
    del model.functions[:]
    model.graph.node.extend([true, *nodes])
    onnx.save(model, tmp_path / "branches.onnx")
    started = time.perf_counter()
    assert load_model(tmp_path / "branches.onnx").outputs[0].name == "y"
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize("calls", [(), tuple(range(DEPTH_MAX - 1, 40 * DEPTH_MAX, DEPTH_MAX - 1))])
def test_functions_nested_deeper_than_the_stack_of_a_library_are_refused(calls: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"more than {DEPTH_MAX} deep"):
        check_expansion(nested(40 * DEPTH_MAX, 1, *calls))


def test_function_that_calls_itself_is_named(tmp_path: Path) -> None:
    model = nested(2, 1)
    model.functions[0].node[0].CopyFrom(helper.make_node("f1", ["x"], ["y0"], domain="own"))
    onnx.save(model, tmp_path / "circle.onnx")
    with pytest.raises(InvalidModelError, match="f1 -> f0 -> f1"):
        load_model(tmp_path / "circle.onnx")


@pytest.mark.parametrize(("depth", "width"), [(DEPTH_MAX, 1), (10, 2)])
def test_functions_of_usual_depth_are_loaded(tmp_path: Path, depth: int, width: int) -> None:
    onnx.save(nested(depth, width), tmp_path / "model.onnx")
    assert load_model(tmp_path / "model.onnx").outputs[0].shape == ("n", 4)
