"""Kernels for a symbolic number of rows on a Hopper GPU, at numbers that no tile divides, against float32 NumPy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.registry import TEMPLATES
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.ranges import Ranges, RangesParameters, SizeRange
from tests.schedules.templates.gemm_sm90.test_gemm_sm90_gpu import expected, needs_hopper
from tests.schedules.templates.matmul_cases import MatmulCase

BATCH, LENGTH = tirx.Var("batch", "int64"), tirx.Var("length", "int64")
ROWS = (1, 7, 16, 50, 64, 100, 128, 333, 512, 1000, 4097)
RAGGED = MatmulCase((BATCH, LENGTH), 200, 200, ("bias", "residual"))


def table(*ranges: tuple[int, GemmParameters]) -> RangesParameters:
    return RangesParameters(tuple(SizeRange(most, one.to_json()) for most, one in ranges))


FEW = GemmParameters(64, 64, 3, 1, dependent=True)
# Every role has rows in its range.
CASES = {
    "defaults": (RAGGED, None),
    "defaults of a layer": (MatmulCase((BATCH, LENGTH), 768, 768, ("half_bias", "residual")), None),
    "defaults, gated": (replace(RAGGED, n=816, epilogue=("gated", "residual")), None),
    "split": (
        replace(RAGGED, k=1032, epilogue=("bias", "gelu")),
        table((16, replace(FEW, split_k=3)), (1024, GemmParameters(128, 64, 3, 2, split_k=2))),
    ),
    "by turns and in groups": (
        replace(RAGGED, epilogue=("bias", "row_scale")),
        table(
            (50, replace(FEW, blocks=7, group=3)),
            (512, GemmParameters(64, 128, 3, 2, 7, 1, True, True)),
            (2048, GemmParameters(128, 64, 3, 2, 132, pingpong=True, dependent=True, group=4)),
        ),
    ),
    "multicast": (
        replace(RAGGED, epilogue=("bias", "masked")),
        table(
            (64, GemmParameters(128, 96, 4, 2, 0, dependent=True, multicast=2, group=2)),
            (333, GemmParameters(64, 64, 3, 1, 0, dependent=True, multicast=4)),
            (2048, GemmParameters(128, 192, 4, 2, 5, 1, True, True, 2, 2)),
        ),
    ),
    "prime columns": (
        replace(RAGGED, n=257, transposed=True),
        table((1, FEW), (4096, GemmParameters(128, 64, 3, 2, dependent=True))),
    ),
    "one axis, others known": (replace(RAGGED, rows=(3, LENGTH)), None),
}


@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_case_can_be_made(case: MatmulCase, parameters: RangesParameters | None) -> None:
    assert isinstance(made(case, parameters), tirx.PrimFunc)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("case", "parameters"), CASES.values(), ids=CASES.keys())
def test_values_are_right_at_every_number_of_rows(case: MatmulCase, parameters: RangesParameters | None) -> None:
    func = made(case, parameters)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with cuda_compiler("sm_90a"):
        kernel = tvm.tirx.build(mod, target=resolve_target("cuda:sm_90a").target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    for rows in ROWS:
        batch = 3 if case.rows[0] is not BATCH or rows % 3 == 0 else 1
        sizes = {"batch": batch, "length": math.ceil(rows / batch)}
        shapes = [[sizes.get(str(size)) or int(size) for size in param.ty.shape] for param in func.params]
        arrays = [
            rng.integers(0, 2, shape, dtype="int8")
            if str(param.ty.dtype) == "int8"
            else rng.normal(size=shape).astype(str(param.ty.dtype))
            for param, shape in zip(func.params, shapes, strict=True)
        ]
        # What is behind the output must stay as it is.
        count, beyond = math.prod(shapes[-1]), 130 * case.n
        poisoned = tvm.runtime.tensor(np.full(count + beyond, np.nan, case.output), device)
        output = poisoned._create_view(shapes[-1])
        kernel["main"](*(tvm.runtime.tensor(array, device) for array in arrays[:-1]), output)
        everything = poisoned.numpy().astype("float32")
        found, right = everything[:count].reshape(shapes[-1]), expected(case, arrays[:-1])
        assert np.isnan(everything[count:]).all(), rows
        error = np.linalg.norm(found - right) / np.linalg.norm(right)
        assert error < 8e-4, (rows, error)


def made(case: MatmulCase, parameters: RangesParameters | None) -> tirx.PrimFunc:
    target, ranges, func = resolve_target("cuda:sm_90a"), Ranges(TEMPLATES), case.func()
    constants = [place for place, param in enumerate(func.params) if place == 1 or len(param.ty.shape) == 1]
    func = func.with_attr(CONSTANT_PARAMS_ATTR, constants)
    return ranges.apply(func, target, parameters or ranges.candidates(func, target)[0])
