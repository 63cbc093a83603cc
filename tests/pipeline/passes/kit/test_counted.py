from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relaxtune.models.polynomials import Polynomial
from relaxtune.pipeline.passes.kit.counted import counted
from relaxtune.pipeline.passes.kit.ir import main_of, values_of
from tests.pipeline.passes.pass_cases import graph_of, run_module

SIZES = {"length": 5, "past": 3}


def made(build: Callable[..., relax.Expr]) -> tvm.ir.IRModule:
    axes = {name: tirx.Var(name, "int64") for name in SIZES}
    inputs = {"x": ((2, axes["length"]), "float32"), "cache": ((2, axes["past"]), "float32")}
    return graph_of(build, inputs).mod


def places(x: relax.Var, axis: int = 1) -> relax.Expr:
    return relax.op.arange(0, x.ty.shape[axis], 1, "int64")


def distances(builder: relax.BlockBuilder, x: relax.Var, _cache: relax.Var) -> relax.Expr:
    return relax.op.subtract(relax.op.expand_dims(places(x), 0), relax.op.expand_dims(places(x), 1))


def behind(builder: relax.BlockBuilder, x: relax.Var, cache: relax.Var) -> relax.Expr:
    size = relax.op.shape_to_tensor(relax.ShapeExpr([cache.ty.shape[1]]))
    return relax.op.add(relax.op.reshape(places(x), relax.ShapeExpr([x.ty.shape[1], 1])), size)


def by_two(builder: relax.BlockBuilder, x: relax.Var, _cache: relax.Var) -> relax.Expr:
    return relax.op.arange(relax.prim_value(3), 2 * x.ty.shape[1] + 3, relax.prim_value(2), "int64")


def turned(builder: relax.BlockBuilder, x: relax.Var, cache: relax.Var) -> relax.Expr:
    return relax.op.permute_dims(relax.op.subtract(distances(builder, x, cache), relax.const(2, "int64")), [1, 0])


def copied(builder: relax.BlockBuilder, x: relax.Var, _cache: relax.Var) -> relax.Expr:
    return relax.op.broadcast_to(places(x), relax.ShapeExpr([3, 1, x.ty.shape[1]]))


def flattened(builder: relax.BlockBuilder, x: relax.Var, cache: relax.Var) -> relax.Expr:
    return relax.op.reshape(distances(builder, x, cache), relax.ShapeExpr([x.ty.shape[1] * x.ty.shape[1]]))


def rounded(builder: relax.BlockBuilder, x: relax.Var, _cache: relax.Var) -> relax.Expr:
    return relax.op.astype(places(x), "float32")


@pytest.mark.parametrize("build", [distances, behind, by_two, turned, copied])
def test_integers_are_their_start_and_steps(build: Callable[..., relax.Expr]) -> None:
    mod = made(build)
    main = main_of(mod)
    found = counted(main.body.body, values_of(main))
    assert found is not None
    (integers,) = run_module(mod, [np.zeros((2, size), "float32") for size in SIZES.values()])
    numbers = {name: Polynomial.number(size) for name, size in SIZES.items()}
    start = found.start if isinstance(found.start, int) else found.start.substitute(numbers).value
    index = np.indices(integers.shape)
    np.testing.assert_array_equal(integers, start + sum(step * at for step, at in zip(found.steps, index, strict=True)))


@pytest.mark.parametrize("build", [flattened, rounded])
def test_others_are_none(build: Callable[..., relax.Expr]) -> None:
    main = main_of(made(build))
    assert counted(main.body.body, values_of(main)) is None
