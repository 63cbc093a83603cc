"""Reductions with what follows them: one kernel, right at several sizes; what is not of the pattern is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx, topi

from relaxtune.schedules.fallback import fallback_with_rules
from relaxtune.schedules.gpu.binding import count_launches, list_unbound_blocks
from relaxtune.schedules.gpu.dlight_rules import element_reduction
from relaxtune.schedules.targets import resolve_target
from tests.schedules.kernel_cases import prim_func

TARGET = resolve_target("cuda:sm_90a")
HEADS, HEAD = 4, 16
ROWS, COLUMNS = te.var("rows", "int64"), te.var("columns", "int64")


def masked_scores() -> tirx.PrimFunc:
    """Return scores of one query [batch, heads, 1, past + 1], capped, with what hides keys from them."""
    batch, past = te.var("batch", "int64"), te.var("past", "int64")
    query = te.placeholder((batch, HEADS, 1, HEAD), "float32", name="query")
    keys = te.placeholder((batch, HEADS, HEAD, past + 1), "float32", name="keys")
    hidden = te.placeholder((batch, 1, 1, past + 1), "float32", name="hidden")
    scaled, over = topi.multiply(keys, 0.25), te.reduce_axis((0, HEAD), name="k")
    scores = te.compute(
        (batch, HEADS, 1, past + 1), lambda b, h, i, j: te.sum(query[b, h, i, over] * scaled[b, h, over, j], axis=over)
    )
    return prim_func([query, keys, hidden, past, topi.add(topi.multiply(topi.tanh(scores), 5.0), hidden)])


def test_scores_of_one_query_are_one_kernel_with_what_follows() -> None:
    made, names = fallback_with_rules(tvm.IRModule({"main": masked_scores()}), TARGET.target)
    assert names == {"main": "element-reduction"}
    assert count_launches(made["main"]) == 1
    assert list_unbound_blocks(made["main"]) == []


def one_thread(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a scheduled function whose threads run one after another, to run it on a CPU."""

    def serial(loop: tirx.For) -> tirx.For:
        if loop.thread_binding is None:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    return tvm_ffi.structural_map(func, (tirx.For, serial), order="post")


@pytest.mark.parametrize(("batch", "past"), [(1, 0), (2, 6), (3, 128)])
def test_scores_of_one_query_agree(batch: int, past: int) -> None:
    made = one_thread(fallback_with_rules(tvm.IRModule({"main": masked_scores()}), TARGET.target)[0]["main"])
    rng = np.random.default_rng(0)
    shapes = ((batch, HEADS, 1, HEAD), (batch, HEADS, HEAD, past + 1), (batch, 1, 1, past + 1))
    query, keys, hidden = (rng.standard_normal(shape).astype("float32") for shape in shapes)
    output = tvm.runtime.tensor(np.full((batch, HEADS, 1, past + 1), np.nan, "float32"))
    tvm.compile(made, target="llvm")(*map(tvm.runtime.tensor, (query, keys, hidden)), past, output)
    right = np.tanh(query @ (keys * 0.25)) * 5 + hidden
    np.testing.assert_allclose(output.numpy(), right, rtol=1e-5, atol=1e-5)


def _sums(data: te.Tensor, name: str = "sums") -> te.Tensor:
    over = te.reduce_axis((0, COLUMNS), name="k")
    return te.compute((ROWS,), lambda i: te.sum(data[i, over], axis=over), name=name)


def _read_by_many(data: te.Tensor, sums: te.Tensor) -> Sequence[te.Tensor]:
    return [te.compute((ROWS, COLUMNS), lambda i, j: data[i, j] - sums[i], name="rest")]


def _read_with_a_neighbour(_data: te.Tensor, sums: te.Tensor) -> Sequence[te.Tensor]:
    return [te.compute((ROWS,), lambda i: sums[i] + sums[tirx.max(i - 1, 0)], name="pairs")]


def _read_elsewhere(_data: te.Tensor, sums: te.Tensor) -> Sequence[te.Tensor]:
    return [te.compute((ROWS,), lambda i: sums[ROWS - 1 - i] * 2.0, name="turned")]


def _an_output_itself(_data: te.Tensor, sums: te.Tensor) -> Sequence[te.Tensor]:
    return [sums, te.compute((ROWS,), lambda i: sums[i] * 2.0, name="doubled")]


def _of_two(data: te.Tensor, sums: te.Tensor) -> Sequence[te.Tensor]:
    others = _sums(te.compute(data.shape, lambda i, k: data[i, k] * data[i, k], name="squares"), "others")
    return [te.compute((ROWS,), lambda i: sums[i] + others[i], name="both")]


@pytest.mark.parametrize("follow", [_read_by_many, _read_with_a_neighbour, _read_elsewhere, _an_output_itself, _of_two])
def test_what_is_not_of_the_pattern_is_left_to_the_next_rule(
    follow: Callable[[te.Tensor, te.Tensor], Sequence[te.Tensor]],
) -> None:
    data = te.placeholder((ROWS, COLUMNS), "float32", name="data")
    func = prim_func([data, *follow(data, _sums(data))])
    with TARGET.target:
        assert element_reduction(func, TARGET.target) is None


def test_a_sum_that_is_scaled_is_of_the_pattern() -> None:
    data = te.placeholder((ROWS, COLUMNS), "float32", name="data")
    sums = _sums(data)
    func = prim_func([data, te.compute((ROWS,), lambda i: tirx.exp(sums[i]), name="after")])
    with TARGET.target:
        sch = element_reduction(func, TARGET.target)
    assert sch is not None
    assert count_launches(sch.mod["main"]) == 1
