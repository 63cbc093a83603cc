"""Checks of sizes behind transposes and concatenations are before them, where they say the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm_ffi import structural_equal

from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of
from relaxtune.pipeline.passes.symbolic.check_sizes_early import check_sizes_early
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.test_learned_sizes import patches_with_positions
from tests.pipeline.passes.pass_cases import graph_of, run_module, state_of

BATCH, COUNT, MORE = (tirx.Var(name, "int64") for name in ("batch", "count", "more"))
OP = relax.op
INPUTS = {"x": ((BATCH, 8, COUNT), "float32"), "more": ((BATCH, MORE, 8), "float32")}
Build = Callable[[relax.BlockBuilder, relax.Var, relax.Var], relax.Expr]


def token() -> relax.Expr:
    return OP.broadcast_to(relax.const(np.ones((1, 1, 8), "float32")), relax.ShapeExpr([BATCH, 1, 8]))


def checked(builder: relax.BlockBuilder, x: relax.Expr, *shape: object) -> relax.Expr:
    return builder.match_cast(builder.emit(x), relax.TensorType(list(shape), "float32"))


def joined(builder: relax.BlockBuilder, x: relax.Var, _more: relax.Var) -> relax.Expr:
    rows = builder.emit(OP.permute_dims(x, [0, 2, 1]))
    return OP.nn.relu(checked(builder, OP.concat([token(), rows], axis=1), BATCH, 5, 8))


def joined_at_the_end(builder: relax.BlockBuilder, x: relax.Var, _more: relax.Var) -> relax.Expr:
    rest = OP.zeros(relax.ShapeExpr([BATCH, 8, 2]), "float32")
    return OP.nn.relu(checked(builder, OP.concat([x, rest], axis=-1), BATCH, 8, 6))


def turned(builder: relax.BlockBuilder, x: relax.Var, _more: relax.Var) -> relax.Expr:
    return OP.nn.relu(checked(builder, OP.permute_dims(x, [2, 0, 1]), 4, BATCH, 8))


def read_otherwise(builder: relax.BlockBuilder, x: relax.Var, _more: relax.Var) -> relax.Expr:
    rows = builder.emit(OP.permute_dims(x, [0, 2, 1]))
    return OP.add(OP.sum(rows), checked(builder, rows, BATCH, 4, 8))


def of_two_unknown_parts(builder: relax.BlockBuilder, x: relax.Var, more: relax.Var) -> relax.Expr:
    return OP.nn.relu(checked(builder, OP.concat([OP.permute_dims(x, [0, 2, 1]), more], axis=1), BATCH, 7, 8))


def of_a_symbolic_sum(builder: relax.BlockBuilder, x: relax.Var, _more: relax.Var) -> relax.Expr:
    rows = builder.emit(OP.permute_dims(x, [0, 2, 1]))
    return OP.nn.relu(checked(builder, OP.concat([token(), rows], axis=1), BATCH, MORE, 8))


def defines_a_size(builder: relax.BlockBuilder, x: relax.Var, _more: relax.Var) -> relax.Expr:
    return OP.nn.relu(checked(builder, OP.permute_dims(x, [0, 2, 1]), BATCH, tirx.Var("new", "int64"), 8))


def too_few(builder: relax.BlockBuilder, x: relax.Var, _more: relax.Var) -> relax.Expr:
    return OP.nn.relu(checked(builder, OP.concat([token(), OP.permute_dims(x, [0, 2, 1])], axis=1), BATCH, 1, 8))


def early(build: Build) -> tuple[tvm.ir.IRModule, tvm.ir.IRModule]:
    graph = graph_of(build, INPUTS)
    return graph.mod, check_sizes_early(graph.mod, state_of(graph))


def checks_of(mod: tvm.ir.IRModule) -> list[tuple[str, Sequence[int | str]]]:
    """Return what binds each tensor that is checked to have another shape than it had, and the shape."""
    bound = {binding.var: binding.value for binding in bindings_of(main_of(mod))}
    checks = [binding for binding in bindings_of(main_of(mod)) if isinstance(binding, relax.MatchCast)]
    return [
        (
            bound[check.value].op.name if check.value in bound else str(check.value.name),
            [int(size) if isinstance(size, tirx.IntImm) else str(size) for size in check.var.ty.shape],
        )
        for check in checks
        if not structural_equal(check.var.ty, check.value.ty)
    ]


@pytest.mark.parametrize("build", [joined, joined_at_the_end, turned], ids=lambda one: one.__name__)
def test_checks_are_of_what_is_joined_or_moved_and_results_agree(build: Build) -> None:
    before, after = early(build)
    assert checks_of(after) == [("x", ["batch", 8, 4])]
    rng = np.random.default_rng(0)
    for batch in (1, 3):
        feeds = [rng.standard_normal(shape).astype("float32") for shape in ((batch, 8, 4), (batch, 2, 8))]
        np.testing.assert_array_equal(*(run_module(mod, feeds)[0] for mod in (before, after)))
    wrong = [np.zeros(shape, "float32") for shape in ((1, 8, 5), (1, 2, 8))]
    for mod in (before, after):
        with pytest.raises(RuntimeError, match="mismatch to specified constant"):
            run_module(mod, wrong)


@pytest.mark.parametrize(
    "build",
    [read_otherwise, of_two_unknown_parts, of_a_symbolic_sum, defines_a_size, too_few],
    ids=lambda one: one.__name__,
)
def test_checks_stay_where_parts_do_not_say_the_same(build: Build) -> None:
    before, after = early(build)
    tvm.ir.assert_structural_equal(before, after)


def test_positions_are_added_where_patches_are_joined() -> None:
    graph, target = import_model(patches_with_positions()), resolve_target("cuda:sm_90a").target
    late, early_on = (
        lower(graph, target, LoweringOptions(precision="fp16", disabled_passes=passes))
        for passes in (frozenset({"check_sizes_early"}), frozenset[str]())
    )
    assert sum(map(len, late.kernels.values())) - sum(map(len, early_on.kernels.values())) == 1
