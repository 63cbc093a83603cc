from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tvm import relax

from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of
from relaxtune.pipeline.passes.layout.combine_matmuls import combine_matmuls
from tests.pipeline.passes.pass_cases import assert_agrees, graph_of, operators_of, run_module, state_of

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: str = "float32") -> relax.Expr:
    return relax.const(RNG.standard_normal(shape).astype(dtype), dtype)


def projections(widths: Sequence[int], biased: Sequence[bool], *, activated: bool = False) -> ImportedGraph:
    """Return parallel projections of `x`, each reshaped to heads of 4 or, when activated, through a relu."""

    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        results = []
        for index, (width, has_bias) in enumerate(zip(widths, biased, strict=True)):
            y = builder.emit(relax.op.matmul(x, normal(8, width)), name_hint=f"mm{index}x")
            if has_bias:
                y = builder.emit(relax.op.add(y, normal(width)), name_hint=f"bias{index}x")
            if activated:
                y = builder.emit(relax.op.nn.relu(y))
            results.append(builder.emit(relax.op.reshape(y, (2, 3, width // 4, 4))))
        return relax.Tuple(results)

    return graph_of(build, {"x": ((2, 3, 8), "float32")})


@pytest.mark.parametrize(
    ("widths", "biased"), [((8, 8, 8), (True,) * 3), ((16, 4, 4), (False,) * 3), ((8, 8, 8), (True, False, True))]
)
def test_combine_makes_one_matmul_when_left_operand_is_shared(widths: Sequence[int], biased: Sequence[bool]) -> None:
    graph = projections(widths, biased)
    state = state_of(graph)
    combined = combine_matmuls(graph.mod, state)
    operators = operators_of(combined)
    assert operators.count("matmul") == 1
    assert operators.count("add") == int(any(biased))
    assert operators.count("strided_slice") == 3
    x = RNG.standard_normal((2, 3, 8)).astype("float32")
    assert_agrees(run_module(combined, [x]), run_module(graph.mod, [x]), 1e-5)
    name = next(b.var.name for b in bindings_of(main_of(combined)) if "combined" in b.var.name)
    assert {"node_mm0x", "node_mm1x", "node_mm2x"} <= set(state.sources[name])


def test_combine_leaves_matmuls_alone_when_an_activation_would_lose_its_matmul() -> None:
    graph = projections((8, 8), (True, True), activated=True)
    state = state_of(graph)
    assert combine_matmuls(graph.mod, state).same_as(graph.mod)
    assert state.notes == []


def test_combine_leaves_matmuls_alone_when_left_operands_differ() -> None:
    def build(builder: relax.BlockBuilder, x: relax.Var, y: relax.Var) -> relax.Expr:
        products = [builder.emit(relax.op.matmul(operand, normal(8, 4))) for operand in (x, y)]
        return relax.Tuple([builder.emit(relax.op.reshape(product, (12,))) for product in products])

    graph = graph_of(build, {"x": ((3, 8), "float32"), "y": ((3, 8), "float32")})
    assert operators_of(combine_matmuls(graph.mod, state_of(graph))).count("matmul") == 2


def test_combine_leaves_the_last_cast_to_readers_when_branches_differ_in_it() -> None:
    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        q = builder.emit(relax.op.matmul(x, normal(8, 4, dtype="float16"), "float32"))
        v = builder.emit(relax.op.matmul(x, normal(8, 8, dtype="float16"), "float32"))
        half = builder.emit(relax.op.astype(v, "float16"))
        reshaped = builder.emit(relax.op.reshape(q, (12,))), builder.emit(relax.op.reshape(half, (24,)))
        return relax.Tuple(list(reshaped))

    graph = graph_of(build, {"x": ((3, 8), "float16")})
    combined = combine_matmuls(graph.mod, state_of(graph))
    assert operators_of(combined).count("matmul") == 1
    assert operators_of(combined).count("astype") == 1
    x = RNG.standard_normal((3, 8)).astype("float16")
    assert_agrees(run_module(combined, [x]), run_module(graph.mod, [x]), 1e-3)
