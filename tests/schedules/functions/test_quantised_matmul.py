"""Matmuls by quantised weights on a CPU: right under the default schedule, and dequantised panel by panel."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from relaxtune.pipeline.precision.quantise import packed_panels, packed_rows, quantise
from relaxtune.schedules.cpu.packing import panel_width
from relaxtune.schedules.fallback import apply_fallback, fallback_with_rules
from relaxtune.schedules.functions.quantised_matmul import dequantise_rows, matmul_of_panels, matmul_of_rows
from relaxtune.schedules.targets import CpuLimits, resolve_target

HOST = resolve_target("llvm")
RNG = np.random.default_rng(0)


def compiled(func: tirx.PrimFunc):
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with HOST.target:
        return tvm.compile(apply_fallback(mod, HOST.target), HOST.target)["main"]


def panels_case(m: int, n: int, k: int, bits: int, group: int) -> tuple[tirx.PrimFunc, list[np.ndarray], np.ndarray]:
    """Return the function, its inputs, and its output."""
    assert isinstance(HOST.limits, CpuLimits)
    matrix = quantise(RNG.standard_normal((k, n)).astype(np.float32), bits, group)
    packed, scales = packed_panels(matrix, panel_width(m, n, "float32", HOST.limits))
    x = RNG.standard_normal((m, k)).astype(np.float16)
    params = [te.placeholder(a.shape, str(a.dtype), name=f"p{i}") for i, a in enumerate((x, packed, scales))]
    made = matmul_of_panels(k, n, bits, matrix.group, "float32")(*params)
    func = te.create_prim_func([*params, made], index_dtype_override="int64")
    return func, [x, packed, scales], x.astype(np.float32) @ matrix.dequantised()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("m", "n", "k", "group"),
    [(1, 256, 128, 32), (1, 37, 200, 64), (13, 101, 96, 0), (33, 48, 130, 128), (40, 300, 64, 32)],
)
def test_panels_match_numpy_when_shapes_do_not_fit_the_tile(m: int, n: int, k: int, group: int, bits: int) -> None:
    func, inputs, expected = panels_case(m, n, k, bits, group)
    output = tvm.runtime.tensor(np.full(expected.shape, np.nan, np.float32))
    compiled(func)(*map(tvm.runtime.tensor, inputs), output)
    np.testing.assert_allclose(output.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_panel_is_dequantised_where_it_is_used() -> None:
    func, _, _ = panels_case(64, 768, 256, 4, 128)
    mod = tvm.IRModule({"main": func})
    assert fallback_with_rules(mod, HOST.target)[1] == {"main": "cpu-matmul"}
    text = apply_fallback(mod, HOST.target)["main"].script()
    before, inside = text.split('T.sblock("dequantise")', 1)
    # Under the loop over panels that the cores share, and no loop nest of its own before it.
    loop = next(line for line in reversed(before.splitlines()) if "T.parallel" in line)
    product = next(line for line in inside.splitlines() if 'sblock("matmul' in line)
    assert len(loop) - len(loop.lstrip()) < len(product) - len(product.lstrip())
    assert "T.parallel" not in inside


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_match_numpy_and_are_what_a_kernel_of_their_own_makes(bits: int) -> None:
    matrix = quantise(RNG.standard_normal((96, 40)).astype(np.float32), bits, 32)
    packed, scales = packed_rows(matrix), np.ascontiguousarray(matrix.scales.T)
    x = RNG.standard_normal((3, 96)).astype(np.float16)
    weight = matrix.dequantised().astype(np.float16)
    stored = [te.placeholder(a.shape, str(a.dtype), name=f"p{i}") for i, a in enumerate((packed, scales))]
    func = te.create_prim_func([*stored, dequantise_rows(96, bits, 32, "float16")(*stored)])
    output = tvm.runtime.tensor(np.zeros((40, 96), np.float16))
    compiled(func)(*map(tvm.runtime.tensor, (packed, scales)), output)
    np.testing.assert_array_equal(output.numpy(), weight.T)
    rows = te.placeholder(x.shape, "float16", name="x")
    func = te.create_prim_func([rows, *stored, matmul_of_rows(96, bits, 32, "float32")(rows, *stored)])
    product = tvm.runtime.tensor(np.zeros((3, 40), np.float32))
    compiled(func)(*map(tvm.runtime.tensor, (x, packed, scales)), product)
    expected = x.astype(np.float32) @ weight.astype(np.float32)
    np.testing.assert_allclose(product.numpy(), expected, rtol=1e-4, atol=1e-4)
