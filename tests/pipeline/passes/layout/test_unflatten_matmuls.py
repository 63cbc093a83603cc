from __future__ import annotations

import numpy as np
import pytest

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import Form
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, run_lowered

ROWS, WIDTH, WIDE = (2, 3), 4, 8


def conv1d(*, flat_from_the_start: bool = False) -> OnnxModel:
    """GPT-2's MLP as torch writes it: Reshape, Gemm, Reshape, a gelu, Reshape, Gemm, Reshape, a residual sum."""
    f = Form()
    x = f.x(*ROWS, WIDTH)
    # Flattened from another number of axes, the rows are only known again behind the matmul.
    source = f.op("Reshape", x, [*ROWS, 2, WIDTH // 2]) if flat_from_the_start else x
    flat = f.op("Reshape", source, [-1, WIDTH])
    wide = f.op("Reshape", f.op("Gemm", flat, f.weight(WIDTH, WIDE), f.weight(WIDE)), [*ROWS, WIDE])
    gate = f.op("Mul", wide, f.op("Sigmoid", wide))
    flat = f.op("Reshape", gate, [-1, WIDE])
    narrow = f.op("Reshape", f.op("Gemm", flat, f.weight(WIDE, WIDTH), f.weight(WIDTH)), [*ROWS, WIDTH])
    return f.model(f.op("Add", x, narrow), (*ROWS, WIDTH))


def notes_of(lowered: LoweredModule) -> tuple[str, ...]:
    return next(report.notes for report in lowered.reports if report.name == "unflatten_matmuls")


def agrees(model: OnnxModel, lowered: LoweredModule, rows: tuple[int, ...] = ROWS) -> None:
    feeds = {"x": np.random.default_rng(0).standard_normal((*rows, WIDTH)).astype("float32")}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-5)


@pytest.mark.parametrize("flat_from_the_start", [False, True])
def test_unflatten_matmuls_lets_what_follows_fuse_when_rows_were_flattened(flat_from_the_start: bool) -> None:
    model = conv1d(flat_from_the_start=flat_from_the_start)
    lowered = lower(import_model(model), LLVM)
    assert notes_of(lowered) == ("2 matmuls keep their axes",)
    assert sum(map(len, lowered.kernels.values())) == 2
    agrees(model, lowered)


def test_unflatten_matmuls_leaves_more_kernels_when_it_is_off() -> None:
    model = conv1d()
    lowered = lower(import_model(model), LLVM, LoweringOptions(disabled_passes=frozenset({"unflatten_matmuls"})))
    assert sum(map(len, lowered.kernels.values())) > 2
    agrees(model, lowered)


def test_unflatten_matmuls_leaves_a_matmul_alone_when_its_rows_come_from_elsewhere() -> None:
    f = Form()
    flat = f.op("Reshape", f.x(*ROWS, WIDTH), [-1, WIDTH])
    mixed = f.op("Add", flat, f.weight(ROWS[0] * ROWS[1], WIDTH))
    model = f.model(f.op("MatMul", mixed, f.weight(WIDTH, WIDE)), (ROWS[0] * ROWS[1], WIDE))
    lowered = lower(import_model(model), LLVM)
    assert notes_of(lowered) == ()
    agrees(model, lowered)


def mixture(*rows: int | str, over_all_rows: bool = False) -> OnnxModel:
    """The end of Qwen2's experts: a sum over each row's experts, one expert for all rows by its gate, the residual."""
    f = Form()
    x = f.x(*rows, WIDTH)  # type: ignore[arg-type]
    flat = f.op("Reshape", x, [-1, WIDTH])
    pairs = f.op("Reshape", f.op("MatMul", flat, f.weight(WIDTH, 2 * WIDTH)), [-1, 2, WIDTH])
    experts = f.op("ReduceSum", pairs, [0, 1] if over_all_rows else [1], keepdims=0)
    experts = f.op("Reshape", experts, [-1, WIDTH])
    shared = f.op("MatMul", flat, f.weight(WIDTH, WIDTH))
    gated = f.op("Mul", f.op("Sigmoid", f.op("MatMul", flat, f.weight(WIDTH, 1))), shared)
    total = f.op("Reshape", f.op("Add", experts, gated), f.op("Shape", x))
    return f.model(f.op("Add", x, total), (*rows, WIDTH))  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [ROWS, ("batch", "sequence")])
def test_unflatten_matmuls_reshapes_other_operands_when_a_reshape_behind_restores_axes(rows: tuple[int | str]) -> None:
    model = mixture(*rows)
    lowered = lower(import_model(model), LLVM)
    # The experts, their sum, the gate, and all else behind the matmul of the expert for all rows.
    assert sum(map(len, lowered.kernels.values())) == 4
    for sizes in [ROWS] if rows == ROWS else [ROWS, (1, 1), (1, 5), (4, 1)]:
        agrees(model, lowered, sizes)


def test_unflatten_matmuls_leaves_a_sum_alone_when_an_operand_is_one_row_for_all() -> None:
    model = mixture("batch", "sequence", over_all_rows=True)
    lowered = lower(import_model(model), LLVM)
    for sizes in [ROWS, (1, 1), (1, 5)]:
        agrees(model, lowered, sizes)
