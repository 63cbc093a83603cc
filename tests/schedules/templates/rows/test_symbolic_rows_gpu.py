"""Kernels for a symbolic number of rows and elements on a GPU, at many sizes, against NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.registry import TEMPLATES
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.ranges import Ranges
from tests.schedules.templates import memory_cases as cases
from tests.schedules.templates.memory_cases import MemoryCase
from tests.schedules.templates.rows.test_memory_bound_gpu import needs_gpu

BATCH, LENGTH = tirx.Var("batch", "int64"), tirx.Var("length", "int64")
SIZES = ((1, 1), (1, 7), (2, 8), (1, 50), (4, 25), (3, 111), (8, 64), (5, 200), (1, 1031))

Make = Callable[[int | tirx.Var, int | tirx.Var], MemoryCase]
CASES: dict[str, Make] = {
    "layer norm": lambda batch, length: cases.layer_norm((batch, length, 768), residual=True),
    "layer norm of prime columns": lambda batch, length: cases.layer_norm((batch, length, 131)),
    "softmax": lambda batch, length: cases.softmax((batch, length, 40), masked=True),
    "mean": lambda batch, length: cases.mean((batch, length, 200)),
    "one flat axis": lambda batch, length: cases.bias_gelu((batch, length, 264)),
    "no column is apart": lambda batch, length: cases.silu((batch, length, 1000)),
    "gather": lambda batch, length: cases.embedding(length, 40, 29),
    "heads": lambda batch, length: cases.transpose((batch, length, 3, 64), (0, 2, 1, 3)),
    "symbolic columns": lambda batch, length: cases.transpose((batch, length, 24), (0, 2, 1)),
    "row put first": lambda batch, length: cases.append((batch, length, 40), 1),
    "mask of symbolic columns": lambda batch, length: cases.masked_bias(batch, 8, length),
    "causal": lambda batch, length: cases.causal_mask(length),
    "booleans": lambda batch, length: cases.both_marks((batch, length)),
}


def made(make: Make) -> tirx.PrimFunc:
    func, target, ranges = make(BATCH, LENGTH).func(), resolve_target("cuda:sm_90a"), Ranges(TEMPLATES)
    found = ranges.candidates(func, target)
    assert isinstance(found, list), found
    return ranges.apply(func, target, found[0])


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_case_can_be_made(make: Make) -> None:
    assert isinstance(made(make), tirx.PrimFunc)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_values_are_right_at_every_size(make: Make) -> None:
    mod = tvm.IRModule({"main": made(make).with_attr("global_symbol", "main")})
    with cuda_compiler("sm_90a"):
        kernel = tvm.tirx.build(mod, target=resolve_target("cuda:sm_90a").target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    for batch, length in SIZES:
        case = make(batch, length)
        func = case.func()
        arrays = cases.random_inputs(func, rng)
        like = cases.random_array(func.params[-1], rng)
        poison = np.nan if like.dtype.kind not in "ib" else True
        # What is behind the output must stay as it is.
        poisoned = tvm.runtime.tensor(np.full(like.size + 4096, poison, like.dtype), device)
        inputs = [tvm.runtime.tensor(array, device) for array in arrays]
        kernel["main"](*inputs, poisoned._create_view(like.shape))
        everything = poisoned.numpy()
        found, beyond = everything[: like.size].reshape(like.shape), everything[like.size :]
        assert np.array_equal(beyond, np.full_like(beyond, poison), equal_nan=poison is not True)
        right = case.expected(*map(cases.widened, arrays))
        if found.dtype.kind in "ib":
            np.testing.assert_array_equal(found, right)
            continue
        error = np.linalg.norm(cases.widened(found) - right) / max(np.linalg.norm(right), 1e-30)
        # Twice the limits of kernels for known sizes: some of these have few elements.
        assert error < 2 * {"float16": 6e-4}.get(str(found.dtype), 2e-6), (batch, length)
