from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from relaxtune.models import OnnxModel
from relaxtune.pipeline.tuning.measure.arguments import ArgumentSpec, make_arrays
from relaxtune.pipeline.tuning.measure.wrong_result import find_mismatch
from relaxtune.pipeline.validate.reference import longest_reduction
from relaxtune.pipeline.validate.tolerances import (
    EXACT,
    EXACT_KERNEL,
    TOLERANCE_TABLE,
    KernelTolerance,
    Tolerance,
    kernel_tolerance,
    model_tolerance,
    output_scale,
    symbolic_kernel_tolerance,
    tensor_tolerance,
)
from tests.pipeline.tuning.tuning_cases import matmul_mod


def fused_matmul(m: int, n: int, k: int, dtype: str, epilogue: Callable[[tvm.ir.Expr], tvm.ir.Expr]) -> tirx.PrimFunc:
    """Return matmul with float32 sums, bias, epilogue, and the cast back."""
    a, b = te.placeholder((m, k), dtype, name="A"), te.placeholder((k, n), dtype, name="B")
    bias = te.placeholder((n,), dtype, name="bias")
    r = te.reduce_axis((0, k), name="r")
    summed = te.compute((m, n), lambda i, j: te.sum(a[i, r].astype("float32") * b[r, j].astype("float32"), axis=r))
    out = te.compute((m, n), lambda i, j: epilogue(summed[i, j] + bias[j].astype("float32")).astype(dtype))
    return te.create_prim_func([a, b, bias, out])


EPILOGUES = {
    "plain": (lambda x: x, lambda x: x),
    "tanh": (tvm.tirx.tanh, np.tanh),
    "sigmoid": (tvm.tirx.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
}
Defect = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
DEFECTS: dict[str, Defect] = {
    "last k dropped": lambda a, b, bias: (a[:, :-1], b[:-1], bias),
    "rows swapped": lambda a, b, bias: (np.concatenate([a[1:2], a[:1], a[2:]]), b, bias),
    "bias missing": lambda a, b, bias: (a, b, 0 * bias),
    "column tile shifted": lambda a, b, bias: (a, np.roll(b, 1, axis=1), bias),
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("k", [64, 768, 3072])
def test_a_kernel_tolerance_holds_rounding_and_catches_defects(epilogue: str, dtype: str, k: int) -> None:
    m, n = 16, 64
    tir, numpy = EPILOGUES[epilogue]
    accepted = kernel_tolerance(fused_matmul(m, n, k, dtype, tir))
    specs = [ArgumentSpec(shape, dtype) for shape in ((m, k), (k, n), (n,))]
    for seed in range(3):
        a, b, bias = (array.astype(np.float32) for array in make_arrays(specs, {}, seed))
        exact = numpy(a.astype(np.float64) @ b + bias).astype(dtype)
        one_by_one = np.zeros((m, n), np.float32)
        for i in range(k):
            one_by_one += a[:, i : i + 1] * b[i : i + 1]
        assert find_mismatch(numpy(one_by_one + bias).astype(dtype), exact, accepted) is None
        for name, defect in DEFECTS.items():
            x, y, z = defect(a, b, bias)
            wrong = numpy(x.astype(np.float64) @ y + z).astype(dtype)
            assert find_mismatch(wrong, exact, accepted), name


def test_a_squashing_epilogue_keeps_the_error_of_its_accumulators() -> None:
    """An H200 gave -0.885152 for -0.885157 at tanh of a sum of 128 products: within, and hardly more is."""
    accepted = kernel_tolerance(fused_matmul(1, 128, 128, "float32", tvm.tirx.tanh))
    expected = np.array([-0.885157, 1.0], np.float32)
    assert find_mismatch(np.array([-0.885152, 1.0], np.float32), expected, accepted) is None
    assert find_mismatch(np.array([-0.8850, 1.0], np.float32), expected, accepted)


def test_a_kernel_tolerance_grows_with_the_reduction_and_the_dtype() -> None:
    short, long = kernel_tolerance(matmul_mod(k=16)["main"]), kernel_tolerance(matmul_mod(k=1024)["main"])
    assert short.rtol == long.rtol
    assert short.atol < long.atol < 1e-4
    assert short.accumulated * 64 == pytest.approx(long.accumulated)
    assert long.accumulated < 3e-4
    a = te.placeholder((4,), "float16", name="A")
    half = kernel_tolerance(te.create_prim_func([a, te.compute((4,), lambda i: a[i] + a[i])]))
    assert 1e-3 < half.rtol < 1e-2
    assert half.accumulated == 0
    whole = te.placeholder((4,), "int32", name="A")
    assert kernel_tolerance(te.create_prim_func([whole, te.compute((4,), lambda i: whole[i] + 1)])) == EXACT_KERNEL


def rounded(dtype: str) -> KernelTolerance:
    x = te.placeholder((4,), "float32", name="x")
    return kernel_tolerance(te.create_prim_func([x, te.compute((4,), lambda i: te.nearbyint(x[i]).astype(dtype))]))


def test_numbers_rounded_to_bytes_may_take_the_next_step_in_few_places() -> None:
    accepted = rounded("int8")
    assert rounded("uint8").steps == accepted.steps > 0
    assert rounded("int32").steps == 0
    x = te.placeholder((4,), "float32", name="x")
    wider = te.compute((4,), lambda i: tirx.min(x[i].astype("int32") + 3, tirx.const(127, "int32")).astype("int8"))
    assert kernel_tolerance(te.create_prim_func([x, wider])).steps == accepted.steps
    bits = te.placeholder((4,), "int32", name="bits")
    assert kernel_tolerance(te.create_prim_func([bits, te.compute((4,), lambda i: bits[i].astype("int8"))])).steps == 0
    expected = np.tile(np.arange(-100, 100, dtype=np.int8), 100)
    one, two, many = expected.copy(), expected.copy(), expected.copy()
    one[7] += 1
    two[7] += 2
    many[: int(accepted.steps * many.size) + 1] += 1
    assert find_mismatch(one, expected, accepted) is None
    assert "1 of 20000 integers differ, first at (7,)" in (find_mismatch(two, expected, accepted) or "")
    assert find_mismatch(many, expected, accepted) is not None
    assert find_mismatch(one, expected, EXACT_KERNEL) is not None
    wide = expected.astype(np.int32)
    assert find_mismatch(one.astype(np.int32), wide, accepted) is not None
    signs = np.array([-128, 127], np.int8)
    assert find_mismatch(signs[::-1].copy(), signs, accepted) is not None


def test_a_precision_asked_for_overrides_the_graph() -> None:
    assert model_tolerance("float32", "fp16") == model_tolerance("float16")
    assert model_tolerance("float32").rtol < model_tolerance("float16").rtol < model_tolerance("bfloat16").rtol
    assert model_tolerance("float64").rtol < model_tolerance("float32").rtol
    assert model_tolerance("int64") == EXACT


def test_the_scale_is_the_root_mean_square_however_small() -> None:
    assert output_scale(np.asarray([3.0, 4.0])) == pytest.approx(np.sqrt(12.5))
    assert output_scale(np.asarray([1e-5, np.inf, np.nan])) == pytest.approx(1e-5)
    assert output_scale(np.zeros(3)) == 1.0
    assert output_scale(np.asarray([100, 100])) == 1.0
    assert output_scale(np.zeros(0, np.float32)) == 1.0


def table_markdown() -> str:
    """Return the table of whole models as Markdown, for the documentation."""
    lines = [
        "| storage | accumulator | longest sum | rtol | atol (x RMS) | why |",
        "|---|---|---|---|---|---|",
    ]
    for row in TOLERANCE_TABLE:
        longest = "any" if row.reduction_max is None else f"<= {row.reduction_max}"
        lines.append(
            f"| {row.storage} | {row.accumulator} | {longest} | {row.tolerance.rtol:g} | {row.tolerance.atol:g} | "
            f"{row.reason} |"
        )
    lines.append("| integers, bool | | | 0 | 0 | equal |")
    return "\n".join(lines) + "\n"


def test_the_documentation_shows_the_table() -> None:
    shown = (Path(__file__).parents[3] / "docs" / "validation.md").read_text(encoding="utf-8")
    assert table_markdown() in shown


def test_the_table_grows_with_the_length_of_sums_and_ends_without_a_limit() -> None:
    rows: dict[tuple[str, str], list[float]] = {}
    for row in TOLERANCE_TABLE:
        rows.setdefault((row.storage, row.accumulator), []).append(row.tolerance.rtol)
        assert row.reason
    assert all(sorted(found) == found for found in rows.values())
    assert model_tolerance("float32", reduction=8192) == Tolerance(1e-4, 1e-4)
    assert model_tolerance("float32", reduction=8193) == Tolerance(4e-4, 4e-4)
    assert model_tolerance("float16", reduction=10**6) == model_tolerance("float16")


def test_the_longest_sum_of_a_model_is_that_of_its_weights(bert_tiny: OnnxModel) -> None:
    assert longest_reduction(bert_tiny) == 512


def test_a_tensor_near_the_inputs_may_be_off_by_less() -> None:
    outputs = Tolerance(1e-2, 1e-3)
    depths = [tensor_tolerance(outputs, depth, 40) for depth in (0, 10, 40, 99)]
    assert depths[0].rtol < depths[1].rtol < depths[2].rtol == depths[3].rtol == outputs.rtol
    assert depths[0].atol == pytest.approx(1e-3 * np.sqrt(10 / 50))
    assert tensor_tolerance(outputs, 0, 0) == outputs


def test_a_kernel_of_symbolic_shapes_is_held_against_its_longest_axis() -> None:
    short, long = (symbolic_kernel_tolerance(["float32", "int64"], longest) for longest in (16, 1024))
    assert short.rtol == long.rtol
    assert short.atol < long.atol
    assert long.accumulated == pytest.approx(kernel_tolerance(matmul_mod(k=1024)["main"]).accumulated)
    assert symbolic_kernel_tolerance(["int64"], 8) == EXACT_KERNEL
