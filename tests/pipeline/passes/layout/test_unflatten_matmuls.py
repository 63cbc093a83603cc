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


def agrees(model: OnnxModel, lowered: LoweredModule) -> None:
    feeds = {"x": np.random.default_rng(0).standard_normal((*ROWS, WIDTH)).astype("float32")}
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
