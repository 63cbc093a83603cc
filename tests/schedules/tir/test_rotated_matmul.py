"""Matmuls that rotate heads: columns, recognition, refusals; kernels on a GPU against float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.matmul_by_rows import recognise_matmul_by_rows
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.normed_matmul import keep_partial_sums
from relaxtune.schedules.tir.rotated_matmul import interleaved_heads, output_column, partner_column, product_column
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, WGMMA, captured_cubins, read_cubin
from tests.schedules.templates.rotated_cases import RotatedCase, known

needs_hopper = pytest.mark.skipif(
    not tvm.cuda(0).exist or str(tvm.cuda(0).compute_version) != "9.0", reason="needs a GPU of compute capability 9.0"
)
TARGET = resolve_target("cuda:sm_90a")

RAGGED = RotatedCase(1, 37, 200, 192, 128, 32)
SMALL = GemmParameters(64, 64, 3, 1)
CASES = {
    "ragged": (RAGGED, SMALL),
    "one row": (replace(RAGGED, positions=1, k=1032), replace(SMALL, dependent=True, stages=6)),
    "split": (replace(RAGGED, k=1032, n=512, columns=384, head=64), GemmParameters(64, 96, 3, 1, split_k=3)),
    "split in two": (replace(RAGGED, k=1032, head=64), GemmParameters(64, 32, 3, 1, split_k=2)),
    "stream": (
        replace(RAGGED, k=1032, head=64),
        GemmParameters(64, 64, 3, 1, blocks=20, dependent=True, stream_k=True),
    ),
    "tables of each row": (replace(RAGGED, batch=5, positions=3, tables=5, normed=True, k=208), SMALL),
    "wide head": (replace(RAGGED, n=768, columns=512, head=256), GemmParameters(64, 128, 3, 1)),
    "odd head": (replace(RAGGED, n=480, columns=320, head=80, dtype="bfloat16"), GemmParameters(64, 96, 3, 1)),
    "all rotated": (replace(RAGGED, columns=192, head=64), replace(SMALL, block_n=32)),
    "several tiles": (
        replace(RAGGED, positions=300, n=1152, columns=768, head=128, normed=True, k=512),
        GemmParameters(128, 192, 3, 2, blocks=5, pingpong=True),
    ),
    "columns short of registers": (
        replace(RAGGED, positions=300, n=1152, columns=768, head=128, k=512),
        GemmParameters(256, 192, 3, 2, group=2),
    ),
}


@pytest.mark.parametrize("head", [16, 64, 80])
def test_columns_of_halves_are_eight_apart(head: int) -> None:
    stored = interleaved_heads(np.arange(2 * head)[None], head)[0]
    analyzer = tvm.sym.Analyzer()

    def number(expr: tirx.Expr) -> int:
        return int(analyzer.simplify(expr))

    for column in range(2 * head):
        at = tirx.IntImm("int32", column)
        place, partner = number(product_column(at, head)), number(partner_column(at, head))
        assert stored[place] == column
        assert stored[partner] == column + (head // 2 if column % head < head // 2 else -head // 2)
        assert partner == place ^ 8
        assert number(output_column(tirx.IntImm("int32", place), head)) == column


@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_template_takes_the_case(case: RotatedCase, parameters: GemmParameters) -> None:
    assert isinstance(GemmSm90().apply(case.func(), TARGET, parameters), tirx.PrimFunc)
    assert known(case.func()).epilogue.head == case.head


@pytest.mark.parametrize("normed", [False, True])
def test_function_agrees_with_float32_on_a_cpu(normed: bool) -> None:
    case = replace(RAGGED, batch=2, positions=3, tables=2, k=48, normed=normed)
    func = case.func().with_attr("global_symbol", "main")
    scheduled = apply_fallback(tvm.IRModule({"main": func}), resolve_target("llvm").target)
    inputs = case.inputs(np.random.default_rng(0))
    output = np.full((2, 3, case.n), np.nan, "float16")
    tensors = [tvm.runtime.tensor(array) for array in (*case.arguments(inputs), output)]
    tvm.compile(scheduled, target=resolve_target("llvm").target)["main"](*tensors)
    np.testing.assert_allclose(tensors[-1].numpy().astype("float32"), case.expected(inputs), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rows", [1, 16])
def test_projection_of_a_decode_step_leaves_multiprocessors_to_the_attention_after_it(rows: int) -> None:
    func = RotatedCase(rows, 1, 2048, 3072, 2560, 64, rows).func().with_attr(CONSTANT_PARAMS_ATTR, [1])
    first = GemmSm90().candidates(func, TARGET)[0]
    assert isinstance(first, GemmParameters)
    assert 3072 // first.block_n * first.split_k <= 132 // 2


def test_other_kernels_are_refused() -> None:
    func = RAGGED.func()
    assert isinstance(recognise_matmul_by_rows(func), Refusal)
    summed = recognise_matmul(keep_partial_sums(func, known(func), 16))
    assert isinstance(summed, Refusal)
    assert "rotates heads" in summed.reason


def test_epilogue_that_reads_another_table_is_refused() -> None:
    x, w = te.placeholder((4, 64), "float16", name="x"), te.placeholder((64, 64), "float16", name="w")
    table = te.placeholder((4, 64), "float16", name="table")
    over = te.reduce_axis((0, 64), name="k")
    product = te.compute((4, 64), lambda i, j: te.sum(x[i, over].astype("float32") * w[over, j], axis=over))
    mixed = te.compute(
        (4, 64), lambda i, j: product[i, product_column(j, 32)] * table[i, j] + product[i, partner_column(j, 32)]
    )
    refusal = recognise_matmul(te.create_prim_func([x, w, table, mixed]))
    assert isinstance(refusal, Refusal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "parameters", "registers_max"),
    [
        (RotatedCase(1, 128, 2048, 3072, 2560, 64), GemmParameters(64, 64, 13, 1, dependent=True), 168),
        (RotatedCase(16, 1, 2048, 3072, 2560, 64, 16), GemmParameters(64, 64, 16, 1, split_k=2, dependent=True), 128),
        (RotatedCase(1, 2048, 2048, 3072, 2560, 64), GemmParameters(128, 192, 5, 2, 132, 1, True, True), 168),
    ],
)
def test_kernel_spills_nothing(case: RotatedCase, parameters: GemmParameters, registers_max: int) -> None:
    func = GemmSm90().apply(case.func().with_attr(CONSTANT_PARAMS_ATTR, [1]), TARGET, parameters)
    with captured_cubins("sm_90a") as cubins:
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        tvm.tirx.build(mod, target=TARGET.target, pipeline=register_mixed_pipeline())
    cubin = read_cubin(cubins[0])
    assert cubin.count(WGMMA) > 0
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
    assert cubin.registers <= registers_max


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_kernel_agrees_with_float32(case: RotatedCase, parameters: GemmParameters) -> None:
    func = GemmSm90().apply(case.func().with_attr(CONSTANT_PARAMS_ATTR, [1]), TARGET, parameters)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with cuda_compiler("sm_90a"):
        kernel = tvm.tirx.build(mod, target=TARGET.target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    for _ in range(20):
        inputs = case.inputs(rng)
        arguments = case.arguments(inputs)
        output = np.full((case.batch, case.positions, case.n), np.nan, arguments[0].dtype)
        tensors = [tvm.runtime.tensor(array, device) for array in (*arguments, output)]
        kernel["main"](*tensors)
        found, right = tensors[-1].numpy().astype("float32"), case.expected(inputs)
        error = np.linalg.norm(found - right) / np.linalg.norm(right)
        # Rounding to 8 or 11 bits of significand, uniformly: 2**-9 or 2**-12 of the value, over the square root of 3.
        assert error < (4e-3 if case.dtype == "bfloat16" else 6e-4)
