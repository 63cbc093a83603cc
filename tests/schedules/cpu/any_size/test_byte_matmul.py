"""Products of bytes by fours: exact int32 sums at any number of rows, and what each processor's code multiplies by."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te

from relaxtune.schedules.cpu.any_size.template import CpuAnySize
from relaxtune.schedules.cpu.packing import pack_words, packed_matmul, packs_words, panel_width
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.fallback import fallback_with_rules
from relaxtune.schedules.functions.byte_rows import quantise_rows_to_bytes
from relaxtune.schedules.targets import CpuLimits, resolve_target, target_limits
from tests.unoptimised import HOST, LLVM

RNG = np.random.default_rng(0)
LIMITS = target_limits(LLVM)
needs_words = pytest.mark.skipif(
    not (isinstance(LIMITS, CpuLimits) and LIMITS.has_byte_dot), reason="this processor multiplies no bytes by fours"
)


def product(rows: int | None, k: int, columns: int, limits: CpuLimits) -> tvm.tirx.PrimFunc:
    width = panel_width(None, columns, "int32", limits)
    x = te.placeholder((1, te.var("rows", "int64") if rows is None else rows, k), "uint8", name="x")
    packed = te.placeholder((-(-columns // width), k // 4, width, 4), "int8", name="packed")
    sums = packed_matmul(columns, "int32")(x, packed)
    return te.create_prim_func([x, packed, sums]).with_attr("tirx.noalias", True)


def run(func: tvm.tirx.PrimFunc, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    width = int(func.params[1].ty.shape[2])
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    result = tvm.runtime.tensor(np.zeros((1, x.shape[1], weight.shape[1]), "int32"))
    packed = tvm.runtime.tensor(pack_words(weight, width))
    tvm.compile(mod, target=LLVM)["main"](tvm.runtime.tensor(x), packed, result)
    return result.numpy()[0]


def scheduled(func: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
    mod, names = fallback_with_rules(tvm.IRModule({"main": func}), LLVM)
    assert names == {"main": "cpu-any-size-matmul"}
    return mod["main"]


def exact(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x[0].astype(np.int64) @ weight.astype(np.int64)


@needs_words
@pytest.mark.parametrize(("k", "columns"), [(64, 64), (68, 40), (1024, 96)])
def test_sums_are_exact_at_any_number_of_rows(k: int, columns: int) -> None:
    assert isinstance(LIMITS, CpuLimits)
    func = scheduled(product(None, k, columns, LIMITS))
    weight = RNG.integers(-128, 128, (k, columns)).astype("int8")
    for rows in (1, 2, 13, 29, 200):
        x = RNG.integers(0, 256, (1, rows, k)).astype("uint8")
        np.testing.assert_array_equal(run(func, x, weight), exact(x, weight))


@needs_words
def test_the_largest_sums_do_not_saturate() -> None:
    assert isinstance(LIMITS, CpuLimits)
    x, weight = np.full((1, 5, 4096), 255, "uint8"), np.full((4096, 64), -128, "int8")
    np.testing.assert_array_equal(run(scheduled(product(5, 4096, 64, LIMITS)), x, weight), exact(x, weight))


@needs_words
def test_each_proposal_is_exact() -> None:
    assert isinstance(LIMITS, CpuLimits)
    func = product(30, 256, 64, LIMITS)
    x, weight = (
        RNG.integers(0, 256, shape).astype(dtype) for shape, dtype in (((1, 30, 256), "uint8"), ((256, 64), "int8"))
    )
    proposals = CpuAnySize().candidates(func, HOST)
    assert not isinstance(proposals, Refusal)
    assert len(proposals) > 5
    for proposal in proposals[:4]:
        made = CpuAnySize().apply(func, HOST, proposal)
        assert not isinstance(made, Refusal)
        np.testing.assert_array_equal(run(made, x, weight), exact(x, weight))


@pytest.mark.parametrize(
    ("processor", "register"),
    [("cascadelake", "%zmm"), ("znver4", "%zmm"), ("alderlake", "%ymm"), ("skylake-avx512", "")],
)
def test_code_multiplies_by_fours_where_the_processor_does(processor: str, register: str) -> None:
    target = resolve_target(f'{{"kind": "llvm", "mcpu": "{processor}"}}').target
    limits = target_limits(target)
    assert isinstance(limits, CpuLimits)
    weight = np.zeros((64, 64), "int8")
    assert packs_words("uint8", weight, limits) == bool(register)
    assert not packs_words("int8", weight, limits)
    if register:
        mod, _ = fallback_with_rules(tvm.IRModule({"main": product(None, 64, 64, limits)}), target)
        text = tvm.tirx.build(mod, target=target).inspect_source("asm")
        assert any("vpdpbusd" in line and register in line for line in text.splitlines())


def test_rows_are_quantised_each_by_its_range() -> None:
    x = RNG.normal(0.3, 2.0, (1, 7, 96)).astype("float32")
    x[0, 1], x[0, 2], x[0, 3, 5] = 0.0, np.abs(x[0, 2]), 1e4
    func = te.create_prim_func(
        [tensor := te.placeholder(x.shape, "float32", name="x"), *quantise_rows_to_bytes(tensor)]
    )
    mod, names = fallback_with_rules(tvm.IRModule({"main": func.with_attr("tirx.noalias", True)}), LLVM)
    assert names == {"main": "cpu-reduction"}
    results = [
        tvm.runtime.tensor(np.zeros((1, 7, n), dtype)) for n, dtype in ((96, "uint8"), (1, "float32"), (1, "int32"))
    ]
    tvm.compile(mod, target=LLVM)["main"](tvm.runtime.tensor(x), *results)
    data, scales, zeros = (result.numpy() for result in results)
    low, high = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
    np.testing.assert_allclose(scales, np.maximum(high - low, 1e-30) / 255, rtol=1e-6)
    assert zeros[0, 2] == 0
    assert (np.abs((data.astype("int32") - zeros) * scales - x) <= scales * 1.01 + 1e-30).all()
    assert not ((data[0, 1].astype("int32") - zeros[0, 1]) * scales[0, 1]).any()
