from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import relax

from relaxtune.pipeline.passes.layout.windows_to_matmul import windows_to_matmul
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.passes.pass_cases import assert_agrees, graph_of, operators_of, run_module, state_of

op = relax.op
RNG = np.random.default_rng(0)
SOUND = {"x": ((2, 4, 10), "float32")}


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def sound_graph(**attrs: object):
    """Return two convolutions with biases and activations, as Whisper's encoder begins."""
    weights = [relax.const(normal(6, 4 // int(attrs.get("groups", 1)), 3)), relax.const(normal(5, 6, 3))]
    biases = [relax.const(normal(1, 6, 1)), relax.const(normal(5, 1))]

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        y = b.emit(op.nn.conv1d(x, weights[0], padding=[1, 1], **attrs))
        y = b.emit(op.nn.gelu(b.emit(op.add(y, biases[0]))))
        y = b.emit(op.nn.conv1d(y, weights[1], strides=2, padding=[2, 1]))
        y = b.emit(op.nn.relu(b.emit(op.add(y, biases[1]))))
        return b.emit(op.permute_dims(y, [0, 2, 1]), name_hint="sound")

    return graph_of(build, SOUND)


def gpu_state(graph):
    return replace(state_of(graph), target=resolve_target("cuda:sm_80").target)


def test_convolutions_become_matmuls_of_the_same_values() -> None:
    graph = sound_graph()
    made = windows_to_matmul(graph.mod, gpu_state(graph))
    windows = ["nn.pad", *["strided_slice"] * 3, "concat", "matmul", "add"]
    assert operators_of(made) == ["permute_dims", *windows, "nn.gelu", *windows, "nn.relu"]
    sound = normal(2, 4, 10)
    assert_agrees(run_module(made, [sound]), run_module(graph.mod, [sound]), 1e-4)


def test_a_reader_of_the_old_layout_gets_it() -> None:
    weight = relax.const(normal(6, 4, 3))

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return b.emit(op.nn.softmax(b.emit(op.nn.conv1d(x, weight)), axis=-1))

    graph = graph_of(build, SOUND)
    made = windows_to_matmul(graph.mod, gpu_state(graph))
    assert "nn.conv1d" not in operators_of(made)
    sound = normal(2, 4, 10)
    assert_agrees(run_module(made, [sound]), run_module(graph.mod, [sound]), 1e-4)


@pytest.mark.parametrize("attrs", [{"groups": 2}, {"dilation": 2}])
def test_other_convolutions_and_those_of_a_cpu_are_left_alone(attrs: dict[str, object]) -> None:
    graph = sound_graph(**attrs)
    assert operators_of(windows_to_matmul(graph.mod, gpu_state(graph))).count("nn.conv1d") == 1
    assert operators_of(windows_to_matmul(graph.mod, state_of(graph))).count("nn.conv1d") == 2
