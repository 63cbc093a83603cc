"""Products on the tile unit: right at every size, as exact as float32, and left to vectors where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from relaxtune.schedules.cpu.any_size import matmul as any_size_matmul, tile_kernel
from relaxtune.schedules.cpu.packing import pack_weight, packed_matmul
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.tir.expressions import find_all
from tests.schedules.agreement import Pair, assert_pair_agrees, build_pair
from tests.schedules.kernel_cases import host, prim_func

needs_tiles = pytest.mark.skipif(not host().limits.has_tiles, reason="this processor has no tile unit (Intel AMX)")
XEON = {"kind": "llvm", "mcpu": "sapphirerapids", "mtriple": "x86_64-linux-gnu", "num-cores": 2}


def packed(
    columns: int, length: int, width: int = 32, epilogue: str = "", rows: tuple[int, int] | None = None
) -> tirx.PrimFunc:
    sizes = rows or (te.var("b", "int64"), te.var("s", "int64"))
    x = te.placeholder((*sizes, length), "float32", name="x")
    weight = te.placeholder((-(-columns // width), length, width), "float32", name="packed")
    product = packed_matmul(columns)(x, weight)
    if not epilogue:
        return prim_func([x, weight, product])
    bias = te.placeholder((columns,), "float32", name="bias")
    other = te.placeholder(product.shape, "float32", name="other")
    return prim_func([x, weight, bias, other, topi.add(topi.tanh(topi.add(product, bias)), other)])


def pair_of(func: tirx.PrimFunc, **facts: object) -> Pair:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(any_size_matmul, "cpu_limits", lambda _target: replace(host().limits, **facts))
        return build_pair(func, host().target)


def uses_tiles(func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
    scheduled = apply_fallback(tvm.IRModule({"main": func}), target)["main"]
    found = [call for call in find_all(scheduled.body, tvm.ir.Call) if call.op.name == "tirx.call_llvm_intrin"]
    multiply = tvm.target.codegen.llvm_lookup_intrinsic_id("llvm.x86.tdpbf16ps")
    return any(int(call.args[0].value) == multiply for call in found)


@needs_tiles
@pytest.mark.parametrize(
    "make",
    [
        lambda: packed(64, 32),
        lambda: packed(77, 96, epilogue="tanh"),
        lambda: packed(16, 64, width=16),
        lambda: packed(100, 64, width=48, epilogue="tanh"),
        lambda: packed(200, 128, width=64),
    ],
    ids=["one step", "part of a panel", "one vector", "three vectors", "four vectors"],
)
def test_product_agrees_with_itself_unscheduled_around_every_size_of_a_tile(make: Callable[[], tirx.PrimFunc]) -> None:
    pair = pair_of(make())
    for b, s in ((1, 0), (1, 1), (1, 79), (1, 80), (2, 40), (1, 81), (3, 32), (1, 97), (7, 16), (1, 113), (7, 19)):
        assert_pair_agrees(pair, {"b": b, "s": s})


@needs_tiles
@pytest.mark.parametrize("rows", [(1, 100), (3, 50)])
def test_product_of_known_sizes_agrees_too(rows: tuple[int, int]) -> None:
    pair = pair_of(packed(77, 96, epilogue="tanh", rows=rows))
    assert pair.rule == "cpu-any-size-matmul"
    assert_pair_agrees(pair, {})


@needs_tiles
@pytest.mark.parametrize(("cores", "l2_bytes"), [(1, 2 << 20), (2, 1 << 16), (90, 1 << 18)])
def test_product_agrees_when_rows_panels_and_k_are_cut(cores: int, l2_bytes: int) -> None:
    """Groups of rows, one of none; jobs of panels, one with fewer; parts of k, down to a step, the last one shorter."""
    pair = pair_of(packed(32 * 17 + 5, 224, epilogue="tanh"), cores=cores, l2_bytes=l2_bytes)
    for rows in (80, 100, 129, 270, 511, 513, 1030):
        assert_pair_agrees(pair, {"b": 1, "s": rows})


@needs_tiles
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_sums_are_as_exact_as_those_of_float32(scale: float) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((1, 96, 768)) * np.exp2(rng.integers(-6, 6, 768))).astype("float32")
    weight = (rng.standard_normal((768, 64)) * scale).astype("float32")
    result = tvm.runtime.tensor(np.full((1, 96, 64), np.nan, "float32"))
    pair_of(packed(64, 768)).scheduled["main"](
        tvm.runtime.tensor(x), tvm.runtime.tensor(pack_weight(weight, 32)), result
    )
    exact = x.astype("float64") @ weight.astype("float64")
    in_order = np.zeros((1, 96, 64), "float32")
    for k in range(768):
        in_order += x[..., k : k + 1] * weight[k]
    errors = [np.sqrt(np.mean((sums - exact) ** 2)) for sums in (result.numpy(), in_order)]
    assert errors[0] < 0.7 * errors[1]


@needs_tiles
def test_an_infinity_reaches_every_sum_of_its_row_and_no_other() -> None:
    x, weight = np.ones((1, 80, 64), "float32"), np.ones((64, 32), "float32")
    x[0, 3, 5] = np.inf
    result = tvm.runtime.tensor(np.zeros((1, 80, 32), "float32"))
    pair_of(packed(32, 64)).scheduled["main"](
        tvm.runtime.tensor(x), tvm.runtime.tensor(pack_weight(weight, 32)), result
    )
    finite = np.isfinite(result.numpy()[0])
    assert not finite[3].any()
    assert np.delete(finite, 3, axis=0).all()


@needs_tiles
def test_vectors_compute_what_the_system_gives_no_tiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that Linux refuses, as one before 5.16 and some sandboxes do: the same bits as without a unit."""
    func = packed(77, 96, epilogue="tanh")
    without = pair_of(func, has_tiles=False)
    allowed = pair_of(func)
    monkeypatch.setattr(tile_kernel, "_TILE_DATA", 63)
    refused = pair_of(func)
    results = []
    rng = np.random.default_rng(1)
    inputs = [
        rng.standard_normal(shape).astype("float32") for shape in ((1, 100, 96), (3, 96, 32), (77,), (1, 100, 77))
    ]
    for pair in (without, refused, allowed):
        result = tvm.runtime.tensor(np.zeros((1, 100, 77), "float32"))
        pair.scheduled["main"](*map(tvm.runtime.tensor, inputs), result)
        results.append(result.numpy())
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).any()
    np.testing.assert_allclose(results[0], results[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "target", "has_tiles"),
    [
        (lambda: packed(64, 64), XEON, True),
        (lambda: packed(64, 64), {**XEON, "mattr": ["-amx-bf16"]}, False),
        (lambda: packed(64, 80), XEON, False),
        (lambda: packed(64, 64, width=8), XEON, False),
        (lambda: packed(64, 64, rows=(1, 80)), XEON, True),
        (lambda: packed(64, 64, rows=(1, 79)), XEON, False),
    ],
    ids=["tiles", "taken away", "part of a step", "narrow panels", "known rows", "few rows"],
)
def test_tiles_are_used_where_the_target_has_them_and_whole_ones_fit(
    make: Callable[[], tirx.PrimFunc], target: dict[str, object], has_tiles: bool
) -> None:
    assert uses_tiles(make(), resolve_target(json.dumps(target)).target) is has_tiles
