from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from relaxtune.pipeline.passes.layout.patches_to_matmul import patches_to_matmul
from tests.pipeline.passes.pass_cases import assert_agrees, graph_of, operators_of, run_module, state_of

op = relax.op
RNG = np.random.default_rng(0)
IMAGE = {"x": ((2, 3, 8, 12), "float32")}


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
    made = patches_to_matmul(graph.mod, state)
    expected = ["reshape", "permute_dims", "reshape", "matmul"] + (["add"] if bias else [])
    assert operators_of(made) == expected
    image = normal(2, 3, 8, 12)
    assert_agrees(run_module(made, [image]), run_module(graph.mod, [image]), 1e-4)
    assert len(state.sources["patches"]) == (4 if bias else 3)


@pytest.mark.parametrize("other", [{"stride": 2, "rows": 15}, {"axes": (1, 2, 0)}])
def test_overlapping_patches_and_other_layouts_are_left_alone(other: dict[str, object]) -> None:
    graph = patch_graph(False, **other)
    assert "nn.conv2d" in operators_of(patches_to_matmul(graph.mod, state_of(graph)))
