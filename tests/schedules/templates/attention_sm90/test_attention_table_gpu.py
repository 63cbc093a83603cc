"""Attention of symbolic sizes on a Hopper GPU: one build each, run at lengths that no tile divides, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.attention_sm90.plan import AttentionParameters
from relaxtune.schedules.templates.attention_sm90.table import AttentionTable, Line, TableParameters
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.attention_cases import AttentionCase, distances, draw, keys_and_values, reference
from tests.schedules.templates.attention_sm90.test_attention_sm90_gpu import SMALL, WIDE, needs_hopper

BATCH, LENGTH, PAST = (tirx.Var(name, "int64") for name in ("batch", "length", "past"))
LENGTHS = (1, 7, 16, 50, 64, 100, 128, 200, 333, 512, 2048)
# Elements behind an output that must stay as they are.
BEYOND = 5000

Made = Callable[[Size, Size, Size], AttentionCase]


def same(batch: Size, length: Size, _past: Size) -> AttentionCase:
    return AttentionCase(batch, 3, length, length, 64, dtype="float16", packed=True)


def across(batch: Size, length: Size, past: Size) -> AttentionCase:
    return AttentionCase(batch, 3, length, past, 64, dtype="float16")


def after(batch: Size, length: Size, past: Size) -> AttentionCase:
    """Some queries behind caches that were written before."""
    return AttentionCase(
        batch, 4, length, past + length, 64, kv_heads=2, dtype="float16", heads_first=True, causal=True
    )


def decode(batch: Size, _length: Size, past: Size) -> AttentionCase:
    return AttentionCase(batch, 8, 1, past + 1, 64, kv_heads=2, dtype="float16", heads_first=True)


def growing(batch: Size, _length: Size, past: Size) -> AttentionCase:
    return AttentionCase(batch, 8, 1, past + 1, 64, kv_heads=2, dtype="float16", past=past)


def with_bias(kind: str, dtype: str, *axes: str, make: Made = same, **changes: object) -> Made:
    """Return a case with a mask of the axes named by `b`, `h`, `q` and `k`, or `t`: a table of 399 distances."""

    def made(batch: Size, length: Size, past: Size) -> AttentionCase:
        case = replace(make(batch, length, past), **changes)  # type: ignore[arg-type]
        sizes = {"b": case.batch, "h": case.heads, "q": case.queries, "k": case.keys}
        shape = tuple(sizes[axis] if axis in axes else 1 for axis in "bhqk")
        shape = (*shape[:2], 399, 1) if "t" in axes else shape
        return replace(case, bias=(kind, dtype, shape))  # type: ignore[arg-type]

    return made


def changed(make: Made, **changes: object) -> Made:
    return lambda *sizes: replace(make(*sizes), **changes)  # type: ignore[arg-type]


def of_one_query(batch: Size, length: Size, past: Size) -> AttentionCase:
    """The last query's distances from all keys, further ones like the furthest."""
    case = with_bias("add", "float32", "h", "t", make=decode)(batch, length, past)
    return replace(case, lies=(("key_stride", 1), ("offset", 199 - past), ("limit", 398)))


def of_windows(batch: Size, _length: Size, _past: Size) -> AttentionCase:
    """Four windows of each image."""
    case = AttentionCase(4 * batch, 3, 49, 49, 64, dtype="float16", packed=True)
    return replace(case, bias=("add", "float32", (4, 1, 49, 49)), lies=(("period", 4),))


CASES: dict[str, tuple[Made, AttentionParameters | None]] = {
    "defaults": (same, None),
    "causal": (changed(same, causal=True), None),
    "causal, several tiles": (changed(same, causal=True), replace(SMALL, blocks=11, residents=3)),
    "by turns": (changed(same, head_dim=128), WIDE),
    "several tiles": (same, replace(SMALL, blocks=11, residents=3)),
    "pairs of tiles": (changed(same, causal=True, head_dim=128), replace(WIDE, blocks=5)),
    "three consumers": (changed(same, causal=True), AttentionParameters(3, pingpong=True)),
    "two widths": (changed(same, head_dim=192, value_dim=128, causal=True), WIDE),
    "other keys": (across, None),
    "causal with more queries than keys": (changed(across, causal=True), SMALL),
    "window": (changed(same, causal=True, window=70), SMALL),
    "key padding": (with_bias("add", "float32", "b", "k"), None),
    "key padding of halves": (with_bias("add", "float16", "b", "k", causal=True), SMALL),
    "relative bias": (with_bias("add", "float16", "h", "q", "k"), None),
    "distances": (with_bias("add", "float32", "h", "t", causal=True, lies=distances(199)), None),
    "distances of one query": (of_one_query, None),
    "windows": (of_windows, None),
    "guarded": (with_bias("keep", "bool", "b", "q", "k", guarded=True), None),
    "keep": (with_bias("keep", "bool", "b", "q", "k"), None),
    "keep keys": (with_bias("keep", "bool", "b", "k", head_dim=80), SMALL),
    "after caches": (after, None),
    "after caches, masked": (with_bias("add", "float32", "b", "q", "k", make=after), SMALL),
    "decode": (decode, None),
    "decode, split": (decode, replace(SMALL, split=8, pack=True)),
    "split": (changed(same, causal=True), AttentionParameters(2, 64, 2, split=3)),
    "caches that grow": (growing, None),
    "caches that grow, split": (
        with_bias("add", "float16", "b", "k", make=growing),
        replace(SMALL, split=4, pack=True),
    ),
}


def function(make: Made, parameters: AttentionParameters | None) -> tirx.PrimFunc:
    """Return the kernels of symbolic sizes: a table's, or one of some parameters."""
    table, target = AttentionTable(), resolve_target("cuda:sm_90a")
    func = attention_function(*make(BATCH, LENGTH, PAST).made())
    only = None if parameters is None else TableParameters((parameters,), (Line((), 0),))
    found = [only] if only is not None else table.candidates(func, target)
    assert not isinstance(found, Refusal), found.reason
    made = table.apply(func, target, found[0])
    assert isinstance(made, tirx.PrimFunc), made.reason
    return made


CHOSEN = {name: case for name, case in CASES.items() if case[1] is not None}


@pytest.mark.parametrize(("make", "parameters"), CHOSEN.values(), ids=CHOSEN.keys())
def test_case_can_be_made(make: Made, parameters: AttentionParameters | None) -> None:
    """Without a GPU: the template takes the case."""
    function(make, parameters)


def poisoned(shape: tuple[int, ...], dtype: str) -> tuple[tvm.runtime.Tensor, tvm.runtime.Tensor]:
    """Return a tensor full of NaN, and a longer one that it is the beginning of."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    whole = tvm.runtime.tensor(np.full(math.prod(shape) + BEYOND, np.nan, kind), tvm.cuda(0))
    return whole._create_view(shape), whole


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("make", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float64_at_every_length(make: Made, parameters: AttentionParameters | None) -> None:
    func = function(make, parameters)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with cuda_compiler("sm_90a"):
        kernel = tvm.tirx.build(mod, target=resolve_target("cuda:sm_90a").target, pipeline=register_mixed_pipeline())
    for number, length in enumerate(LENGTHS):
        sizes = {"batch": 1 if length > 1000 else 1 + number % 3, "length": length}
        # Caches begin without positions.
        sizes["past"] = 0 if make is growing and number == 5 else LENGTHS[(number * 7 + 3) % len(LENGTHS)]
        case = make(sizes["batch"], sizes["length"], sizes["past"])
        spec, params = case.made() if sizes["past"] else case.growing()
        arrays = draw(params, spec, seed=number)
        outputs = [poisoned(shape, dtype) for shape, dtype in params[-spec.outputs :]]
        inputs = iter([tvm.runtime.tensor(array, tvm.cuda(0)) for array in arrays] + [own for own, _ in outputs])
        # A scalar parameter is a size that no tensor has as an axis.
        kernel["main"](*(next(inputs) if hasattr(p.ty, "shape") else sizes[str(p.name)] for p in func.params))
        found, *grown = (own.numpy().astype("float32") for own, _ in outputs)
        for (own, whole), _ in zip(outputs, params[-spec.outputs :], strict=True):
            behind = whole.numpy()[math.prod(own.shape) :].astype("float32")
            assert np.isnan(behind).all(), sizes
        for cache, expected in zip(grown, keys_and_values(spec, arrays), strict=bool(grown)):
            np.testing.assert_array_equal(cache, expected.astype("float32"), err_msg=str(sizes))
        expected = reference(spec, params, arrays)
        empty = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), empty, err_msg=str(sizes))
        error = np.linalg.norm((found - expected)[~empty]) / np.linalg.norm(expected[~empty])
        assert error < 8e-4, (sizes, error)
