from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import bindings_of, is_op, main_of
from relaxtune.pipeline.passes.layout.channels_last import channels_last
from relaxtune.pipeline.passes.norms.fold_batch_norms import fold_batch_norms
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.passes.pass_cases import assert_agrees, graph_of, operators_of, run_module, state_of

op = relax.op
RNG = np.random.default_rng(0)
IMAGE = {"x": ((2, 6, 9, 12), "float32")}


def constant(*shape: int) -> relax.Expr:
    return relax.const(RNG.standard_normal(shape).astype("float32"))


def between(kind: str, b: relax.BlockBuilder, y: relax.Var) -> relax.Expr:
    """Return what stands between two convolutions, of (2, 8, 9, 12) and with as many channels."""
    joined = [y, b.emit(op.nn.relu(y))]
    parts = op.split(y, 2, axis=1)
    return {
        "relu": lambda: op.nn.relu(y),
        "bias": lambda: op.add(y, constant(8, 1, 1)),
        "number": lambda: op.multiply(y, relax.const(0.5, "float32")),
        "concat": lambda: op.concat(joined, axis=1),
        "split": lambda: op.concat([b.emit(relax.TupleGetItem(b.emit(parts), 1)), y], axis=1),
        "slice": lambda: op.strided_slice(y, [1, 3], [2, 1], [8, 11], [2, 1]),
        "take": lambda: op.take(y, relax.const(np.array([0, 0, 1, 5, 8])), axis=2),
        "max pool": lambda: op.nn.max_pool2d(y, (3, 3), (2, 2), (1, 1, 1, 1)),
        "mean pool": lambda: op.nn.avg_pool2d(y, (2, 2), (2, 2), (1, 0, 0, 1)),
        "pool of all": lambda: op.nn.max_pool2d(y, (3, 3), (2, 2), (0, 0, 0, 0), ceil_mode=True),
        "gate": lambda: op.multiply(y, b.emit(op.sigmoid(b.emit(op.mean(y, [2, 3], keepdims=True))))),
        "softmax": lambda: op.nn.softmax(y, axis=1),
        "reshape": lambda: b.emit(op.reshape(b.emit(op.reshape(y, (2, 8, 108))), (2, 8, 12, 9))),
        "turned": lambda: op.reshape(b.emit(op.permute_dims(y, [0, 2, 3, 1])), (2, 8, 9, 12)),
    }[kind]()


KINDS = (
    *("relu", "bias", "number", "concat", "split", "slice", "take", "max pool", "mean pool", "pool of all", "gate"),
    *("softmax", "reshape", "turned"),
)


def network(kind: str):
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        y = b.emit(op.nn.conv2d(x, constant(8, 6, 3, 3), padding=[1, 1, 1, 1]))
        y = b.emit(between(kind, b, y))
        channels = int(y.ty.shape.values[1])
        y = b.emit(op.nn.conv2d(y, constant(channels, 1, 3, 3), padding=[1, 1], groups=channels))
        y = b.emit(op.nn.conv2d(y, constant(4, channels, 1, 1)))
        return b.emit(op.nn.conv2d_transpose(y, constant(4, 5, 2, 2), strides=[2, 2]))

    return graph_of(build, IMAGE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_computes_the_same_with_channels_last(kind: str) -> None:
    graph = network(kind)
    made = channels_last(graph.mod, state_of(graph))
    assert not any(name.startswith("nn.conv") for name in operators_of(made))
    image = RNG.standard_normal((2, 6, 9, 12)).astype("float32")
    assert_agrees(run_module(made, [image]), run_module(graph.mod, [image]), 1e-3)


@pytest.mark.parametrize("kind", ["relu", "bias", "concat", "max pool", "gate"])
def test_transposes_stand_at_the_ends_alone(kind: str) -> None:
    graph = network(kind)
    made = channels_last(graph.mod, state_of(graph))
    transposes = [one for one in bindings_of(main_of(made)) if is_op(one.value, "permute_dims")]
    # The input, the windows of the transposed convolution, and the result.
    assert len(transposes) == 3


def test_a_gpu_keeps_its_layout() -> None:
    graph = network("relu")
    state = state_of(graph)
    state.target = resolve_target("cuda:sm_90a").target
    assert channels_last(graph.mod, state) is graph.mod


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_batch_norms_are_factors_of_weights_or_of_values(bias: bool, pooled: bool) -> None:
    statistics = [constant(8), constant(8), constant(8), relax.const(RNG.random(8).astype("float32") + 0.1)]

    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        y = b.emit(op.nn.conv2d(x, constant(8, 6, 3, 3)))
        y = b.emit(op.nn.relu(y)) if pooled else y
        y = b.emit(op.add(y, constant(1, 8, 1, 1))) if bias else y
        normed = b.emit(op.nn.batch_norm(y, *statistics, axis=1, training=False))
        return b.emit(relax.TupleGetItem(normed, 0))

    graph = graph_of(build, IMAGE)
    made = fold_batch_norms(graph.mod, state_of(graph))
    assert "nn.batch_norm" not in operators_of(made)
    assert ("multiply" in operators_of(made)) == pooled
    image = RNG.standard_normal((2, 6, 9, 12)).astype("float32")
    assert_agrees(run_module(made, [image]), run_module(graph.mod, [image]), 1e-4)
