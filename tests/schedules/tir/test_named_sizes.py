"""Sizes that are quotients get names of a function's own."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from relaxtune.schedules import fallback
from relaxtune.schedules.errors import UnscheduledError
from relaxtune.schedules.fallback import schedule_by_rules
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.tir.blocks import shape_of
from relaxtune.schedules.tir.symbolic_sizes import with_named_sizes
from tests.schedules.agreement import build_pair

BATCH, HEIGHT, WIDTH = (tirx.Var(name, "int64") for name in ("batch", "height", "width"))
TOKENS = HEIGHT // 8 * (WIDTH // 8) + 1


def shapes_of(func: tirx.PrimFunc) -> list[list[str]]:
    return [[str(size) for size in shape] for param in func.params if (shape := shape_of(param)) is not None]


def softmax(*shape: tirx.Expr | int) -> tirx.PrimFunc:
    x = te.placeholder(shape, "float32", name="x")
    return te.create_prim_func([x, HEIGHT, WIDTH, topi.nn.softmax(x)], index_dtype_override="int64")


def copied(*shapes: tuple[tirx.Expr | int, ...]) -> tirx.PrimFunc:
    tensors = [te.placeholder(shape, "float32", name=f"x{number}") for number, shape in enumerate(shapes)]
    one = te.compute((1,), lambda _: tensors[0][tuple(0 for _ in shapes[0])], name="one")
    return te.create_prim_func([*tensors, HEIGHT, WIDTH, one], index_dtype_override="int64")


def test_a_quotient_has_one_name_wherever_it_is_a_size() -> None:
    func = with_named_sizes(softmax(BATCH, TOKENS, TOKENS))
    assert shapes_of(func) == [["batch", "size_0", "size_0"]] * 2
    assert "//" not in func.script()
    # What a call hands over stays the same.
    assert [str(param.name) for param in func.params][1:3] == ["height", "width"]


def test_sizes_made_of_parts_stay_sums_and_products_of_them() -> None:
    func = with_named_sizes(copied((TOKENS, 4), (HEIGHT // 8, WIDTH // 8), (TOKENS * 2, TOKENS + BATCH)))
    names, products = shapes_of(func)[1], [shapes_of(func)[0], *shapes_of(func)[2:3]]
    assert names == ["size_0", "size_1"]
    for shape in products:
        assert "//" not in " ".join(shape)
        assert "size_0 * size_1" in shape[0]


@pytest.mark.parametrize("axis", [HEIGHT % 8, tirx.Min(HEIGHT, WIDTH), tirx.Max(HEIGHT - 3, WIDTH)])
def test_rests_and_bounds_are_named(axis: tirx.Expr) -> None:
    assert shapes_of(with_named_sizes(copied((axis, 4))))[0] == ["size_0", "4"]


def test_functions_without_quotients_stay_as_they_are() -> None:
    for func in (softmax(BATCH, HEIGHT * WIDTH + 1, HEIGHT - 2), softmax(3, 4)):
        assert with_named_sizes(func).same_as(func)


def test_softmax_over_the_tokens_of_an_image_of_any_size_has_a_schedule_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, func = resolve_target("cuda:sm_90a").target, softmax(BATCH, 4, TOKENS, TOKENS)
    before = tvm.ir.save_json(func)
    assert schedule_by_rules("softmax", func, target)[0] == "dlight-generalreduction"
    assert tvm.ir.save_json(func) == before
    # Without the names no rule takes it, which is what they are for.
    monkeypatch.setattr(fallback, "with_named_sizes", lambda same: same)
    with pytest.raises(UnscheduledError):
        schedule_by_rules("softmax", func, target)


def test_named_sizes_are_found_by_the_shapes_of_tensors() -> None:
    pair = build_pair(softmax(BATCH, TOKENS, TOKENS), resolve_target("llvm").target)
    rng = np.random.default_rng(0)
    for height, width in ((8, 8), (17, 40), (64, 23)):
        tokens = height // 8 * (width // 8) + 1
        x = rng.standard_normal((2, tokens, tokens)).astype("float32")
        found, right = (tvm.runtime.empty(x.shape, "float32") for _ in range(2))
        pair.scheduled["main"](tvm.runtime.tensor(x), height, width, found)
        pair.plain["main"](tvm.runtime.tensor(x), height, width, right)
        np.testing.assert_allclose(found.numpy(), right.numpy(), rtol=1e-5, atol=1e-6)
