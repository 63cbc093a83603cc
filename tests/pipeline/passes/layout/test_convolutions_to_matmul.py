from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import relax

from relaxtune.pipeline.passes.layout.convolutions_to_matmul import convolutions_to_matmul
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.passes.pass_cases import assert_agrees, graph_of, operators_of, run_module, state_of

op = relax.op
RNG = np.random.default_rng(0)
IMAGE = {"x": ((2, 3, 8, 12), "float32")}
SOUND = {"x": ((2, 4, 10), "float32")}


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def patch_graph(bias: bool, *, stride: int = 4, axes: tuple[int, ...] = (0, 2, 1), rows: int = 6):
    weight, added = relax.const(normal(5, 3, 4, 4)), relax.const(normal(1, 5, 1, 1))

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        y = b.emit(op.nn.conv2d(x, weight, strides=[stride, stride]))
        y = b.emit(op.add(y, added)) if bias else y
        flat = b.emit(op.reshape(y, (2, 5, rows)))
        return b.emit(op.permute_dims(flat, list(axes)), name_hint="patches")

    return graph_of(build, IMAGE)


@pytest.mark.parametrize("bias", [True, False])
def test_a_patch_embedding_becomes_a_matmul_of_the_same_values(bias: bool) -> None:
    graph = patch_graph(bias)
    state = state_of(graph)
    made = convolutions_to_matmul(graph.mod, state)
    expected = ["reshape", "permute_dims", "reshape", "matmul"] + (["add"] if bias else [])
    assert operators_of(made) == expected
    image = normal(2, 3, 8, 12)
    assert_agrees(run_module(made, [image]), run_module(graph.mod, [image]), 1e-4)
    assert len(state.sources["patches"]) == (4 if bias else 3)


@pytest.mark.parametrize("other", [{"stride": 2, "rows": 15}, {"axes": (1, 2, 0)}])
def test_overlapping_patches_and_other_layouts_are_left_alone(other: dict[str, object]) -> None:
    graph = patch_graph(False, **other)
    assert "nn.conv2d" in operators_of(convolutions_to_matmul(graph.mod, state_of(graph)))


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
    made = convolutions_to_matmul(graph.mod, gpu_state(graph))
    windows = ["nn.pad", *["strided_slice"] * 3, "concat", "matmul", "add"]
    assert operators_of(made) == ["permute_dims", *windows, "nn.gelu", *windows, "nn.relu"]
    sound = normal(2, 4, 10)
    assert_agrees(run_module(made, [sound]), run_module(graph.mod, [sound]), 1e-4)


def test_a_reader_of_the_old_layout_gets_it() -> None:
    weight = relax.const(normal(6, 4, 3))

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return b.emit(op.nn.softmax(b.emit(op.nn.conv1d(x, weight)), axis=-1))

    graph = graph_of(build, SOUND)
    made = convolutions_to_matmul(graph.mod, gpu_state(graph))
    assert "nn.conv1d" not in operators_of(made)
    sound = normal(2, 4, 10)
    assert_agrees(run_module(made, [sound]), run_module(graph.mod, [sound]), 1e-4)


@pytest.mark.parametrize("attrs", [{"groups": 2}, {"dilation": 2}])
def test_other_convolutions_and_those_of_a_cpu_are_left_alone(attrs: dict[str, object]) -> None:
    graph = sound_graph(**attrs)
    assert operators_of(convolutions_to_matmul(graph.mod, gpu_state(graph))).count("nn.conv1d") == 1
    assert operators_of(convolutions_to_matmul(graph.mod, state_of(graph))).count("nn.conv1d") == 2
