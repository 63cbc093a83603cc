from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.passes.norms.recognise_norms import recognise_norms
from relaxtune.pipeline.passes.recognise_activations import recognise_activations
from tests.pipeline.passes.pass_cases import assert_agrees, graph_of, operators_of, run_module, state_of

op = relax.op
c = relax.const
Build = Callable[[relax.BlockBuilder, relax.Var], relax.Expr]


def graph(build: Build) -> ImportedGraph:
    return graph_of(build, {"x": ((2, 3, 8), "float32")})


def row(seed: int) -> relax.Expr:
    return c(np.random.default_rng(seed).standard_normal(8).astype("float32"))


def check(case: ImportedGraph, run: Callable[..., object], expected: list[str]) -> None:
    rewritten = run(case.mod, state_of(case))
    assert operators_of(rewritten) == expected
    x = np.random.default_rng(1).standard_normal((2, 3, 8)).astype("float32")
    assert_agrees(run_module(rewritten, [x]), run_module(case.mod, [x]), 1e-5)


def root_mean_square(b: relax.BlockBuilder, x: relax.Expr, axis: int = -1) -> relax.Expr:
    mean = b.emit(op.mean(b.emit(op.power(x, c(2.0))), [axis], keepdims=True))
    return b.emit(op.sqrt(b.emit(op.add(mean, c(1e-5)))))


def rms_by_division(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return b.emit(op.multiply(row(0), b.emit(op.divide(x, root_mean_square(b, x)))))


def rms_by_reciprocal(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    inverse = b.emit(op.divide(c(1.0), root_mean_square(b, x, 2)))
    return b.emit(op.multiply(b.emit(op.multiply(x, inverse)), row(0)))


def rms_by_rsqrt(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    mean = b.emit(op.mean(b.emit(op.multiply(x, x)), [-1], keepdims=True))
    inverse = b.emit(op.rsqrt(b.emit(op.add(c(1e-6), mean))))
    return b.emit(op.multiply(x, inverse))


def layer_norm(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    centred = b.emit(op.subtract(x, b.emit(op.mean(x, [-1], keepdims=True))))
    scaled = b.emit(op.multiply(b.emit(op.divide(centred, root_mean_square(b, centred))), row(0)))
    return b.emit(op.add(scaled, row(1)))


def bare_layer_norm(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    centred = b.emit(op.subtract(x, b.emit(op.mean(x, [-1], keepdims=True))))
    return b.emit(op.divide(centred, root_mean_square(b, centred)))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (rms_by_division, ["nn.rms_norm"]),
        (rms_by_reciprocal, ["nn.rms_norm"]),
        (rms_by_rsqrt, ["nn.rms_norm"]),
        (layer_norm, ["nn.layer_norm"]),
        (bare_layer_norm, ["nn.layer_norm"]),
    ],
)
def test_norm_becomes_one_operator_when_written_out(build: Build, expected: list[str]) -> None:
    check(graph(build), recognise_norms, expected)


def test_norm_stands_for_all_its_nodes() -> None:
    case = graph(layer_norm)
    state = state_of(case)
    recognise_norms(case.mod, state)
    assert max(len(nodes) for nodes in state.sources.values()) == len(case.source_map) - 1


def over_another_axis(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return b.emit(op.divide(x, root_mean_square(b, x, 1)))


def of_another_tensor(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return b.emit(op.divide(x, root_mean_square(b, b.emit(op.tanh(x)))))


def without_epsilon(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    mean = b.emit(op.mean(b.emit(op.power(x, c(2.0))), [-1], keepdims=True))
    return b.emit(op.divide(x, b.emit(op.sqrt(mean))))


def cubed(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    mean = b.emit(op.mean(b.emit(op.power(x, c(3.0))), [-1], keepdims=True))
    return b.emit(op.divide(x, b.emit(op.sqrt(b.emit(op.add(mean, c(1e-5)))))))


@pytest.mark.parametrize("build", [over_another_axis, of_another_tensor, without_epsilon, cubed])
def test_norm_is_left_alone_when_it_is_another_formula(build: Build) -> None:
    case = graph(build)
    assert recognise_norms(case.mod, state_of(case)).same_as(case.mod)


def gelu(half_first: bool, by_product: bool) -> Build:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        inner = op.multiply(x, c(0.5**0.5)) if by_product else op.divide(x, c(2.0**0.5))
        gate = b.emit(op.add(b.emit(op.erf(b.emit(inner))), c(1.0)))
        if half_first:
            return b.emit(op.multiply(b.emit(op.multiply(x, c(0.5))), gate))
        return b.emit(op.multiply(b.emit(op.multiply(x, gate)), c(0.5)))

    return build


def gelu_tanh(power: bool) -> Build:
    def build(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        cube = b.emit(op.power(x, c(3.0)) if power else op.multiply(x, b.emit(op.multiply(x, x))))
        total = b.emit(op.add(x, b.emit(op.multiply(c(0.044715), cube))))
        tanh = b.emit(op.tanh(b.emit(op.multiply(total, c((2 / np.pi) ** 0.5)))))
        return b.emit(op.multiply(b.emit(op.multiply(c(0.5), x)), b.emit(op.add(c(1.0), tanh))))

    return build


def silu(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return b.emit(op.multiply(b.emit(op.sigmoid(x)), x))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (gelu(half_first=True, by_product=False), ["nn.gelu"]),
        (gelu(half_first=False, by_product=True), ["nn.gelu"]),
        (gelu_tanh(power=True), ["nn.gelu_tanh"]),
        (gelu_tanh(power=False), ["nn.gelu_tanh"]),
        (silu, ["nn.silu"]),
    ],
)
def test_activation_becomes_one_operator_when_written_out(build: Build, expected: list[str]) -> None:
    check(graph(build), recognise_activations, expected)


def other_scale(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    gate = b.emit(op.add(b.emit(op.erf(b.emit(op.divide(x, c(2.0))))), c(1.0)))
    return b.emit(op.multiply(b.emit(op.multiply(x, c(0.5))), gate))


def other_cube(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    total = b.emit(op.add(x, b.emit(op.multiply(c(0.05), b.emit(op.power(x, c(3.0)))))))
    tanh = b.emit(op.tanh(b.emit(op.multiply(total, c((2 / np.pi) ** 0.5)))))
    return b.emit(op.multiply(b.emit(op.multiply(c(0.5), x)), b.emit(op.add(c(1.0), tanh))))


def other_gate(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return b.emit(op.multiply(x, b.emit(op.sigmoid(b.emit(op.tanh(x))))))


@pytest.mark.parametrize("build", [other_scale, other_cube, other_gate])
def test_activation_is_left_alone_when_it_is_another_formula(build: Build) -> None:
    case = graph(build)
    assert recognise_activations(case.mod, state_of(case)).same_as(case.mod)
