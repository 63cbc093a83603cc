"""Kernels for rows and elements on a GPU at odd shapes and extreme values, against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.targets import Feature, ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import Parameters, Template
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.rows.elementwise import Elementwise, ElementwiseParameters
from relaxtune.schedules.templates.rows.kernel import RowsParameters
from relaxtune.schedules.templates.rows.template import Rows
from tests.schedules.templates import memory_cases as cases
from tests.schedules.templates.memory_cases import MemoryCase

FRESH_INPUTS = 20

needs_gpu = pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")

ROWS = {
    "one row": (cases.layer_norm((1, 768)), RowsParameters(8, 96, 1, dependent=True)),
    "prime rows": (cases.layer_norm((127, 768), residual=True), RowsParameters(8, 32, 4, dependent=True)),
    "prime columns": (cases.layer_norm((5, 7, 131)), RowsParameters(1, 32, 2, dependent=True)),
    "one column": (cases.softmax((37, 1)), RowsParameters(1, 1, 32)),
    "parts of a warp": (cases.softmax((4, 33, 40), masked=True), RowsParameters(4, 8, 16, dependent=True)),
    "ragged warps": (cases.softmax((3, 50, 1000), masked=True), RowsParameters(4, 96, 2, dependent=True)),
    "long rows": (cases.softmax((3, 32000)), RowsParameters(8, 1024, 1)),
    "rows read again": (
        cases.layer_norm((3, 9000), residual=True),
        RowsParameters(8, 128, 1, held=False, dependent=True),
    ),
    "odd rows read again": (cases.softmax((3, 5003), masked=True), RowsParameters(1, 512, 1, held=False)),
    "means read again": (cases.mean((5, 1000)), RowsParameters(8, 16, 4, held=False, dependent=True)),
    "bfloat16": (cases.rms_norm((33, 2048), "bfloat16"), RowsParameters(8, 128, 1, dependent=True)),
    "float32": (cases.layer_norm((19, 300), "float32"), RowsParameters(4, 16, 8, dependent=True)),
    "mean": (cases.mean((301, 200)), RowsParameters(8, 16, 4, dependent=True)),
    "extremes": (cases.row_extremes((61, 96)), RowsParameters(4, 8, 4)),
}
ELEMENTS = {
    "one element": (cases.bias_gelu((1, 1)), ElementwiseParameters(1, 1, 32, True)),
    "prime": (cases.bias_gelu((101, 103)), ElementwiseParameters(1, 2, 64, True)),
    "vectors": (cases.bias_gelu((129, 264)), ElementwiseParameters(8, 4, 64, True)),
    "silu": (cases.silu((7, 1000)), ElementwiseParameters(8, 2, 128, True)),
    "bfloat16": (cases.silu((5, 24), "bfloat16"), ElementwiseParameters(8, 1, 32)),
    "gather": (cases.embedding(67, 40, 29), ElementwiseParameters(8, 1, 64, True)),
    "rotary": (cases.rotary(2, 33, 3, 64), ElementwiseParameters(8, 1, 128, True)),
    "rotary with small heads": (cases.rotary(1, 5, 2, 12), ElementwiseParameters(4, 1, 32, True)),
    "transpose": (cases.transpose((3, 40, 24), (0, 2, 1)), ElementwiseParameters(8, 1, 64, True)),
    "heads": (cases.transpose((2, 33, 3, 64), (0, 2, 1, 3)), ElementwiseParameters(8, 1, 64, True)),
    "row put first": (cases.append((3, 16, 40), 1), ElementwiseParameters(8, 1, 32, True)),
    "column put first": (cases.append((3, 15), 1), ElementwiseParameters(8, 1, 32, True)),
    "causal": (cases.causal_mask(72), ElementwiseParameters(2, 2, 32)),
    "choice": (cases.chosen((5, 7, 24)), ElementwiseParameters(8, 1, 32, True)),
    "booleans": (cases.both_marks((9, 32)), ElementwiseParameters(8, 1, 32, True)),
}
ALL = {
    **{f"rows, {name}": (Rows(), *case) for name, case in ROWS.items()},
    **{f"elements, {name}": (Elementwise(), *case) for name, case in ELEMENTS.items()},
}
every_case = pytest.mark.parametrize(("template", "case", "parameters"), ALL.values(), ids=ALL.keys())


@every_case
def test_case_can_be_made_and_its_reference_is_right(
    template: Template, case: MemoryCase, parameters: Parameters
) -> None:
    """Without a GPU: the template takes the case; NumPy agrees with the function itself, built for the CPU."""
    func = case.func()
    assert isinstance(template.apply(func, resolve_target("cuda:sm_90a"), parameters), tvm.tirx.PrimFunc)
    arrays = cases.random_inputs(func, np.random.default_rng(1))
    output = np.zeros_like(cases.random_array(func.params[-1], np.random.default_rng(0)))
    tensors = [tvm.runtime.tensor(array) for array in (*arrays, output)]
    tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")["main"](*tensors)
    found, right = tensors[-1].numpy(), case.expected(*map(cases.widened, arrays))
    tolerance = 4e-2 if "bfloat16" in str(found.dtype) else 1e-2
    np.testing.assert_allclose(cases.widened(found), right, rtol=tolerance, atol=tolerance)


def compiled(
    template: Template, case: MemoryCase, parameters: Parameters
) -> tuple[tvm.tirx.PrimFunc, tvm.runtime.Module]:
    target = resolve_target("cuda")
    if Feature.DEPENDENT_LAUNCH not in target.features:
        parameters = replace(parameters, dependent=False)  # type: ignore[call-arg]
    func = case.func()
    kernel = template.apply(func.with_attr(CONSTANT_PARAMS_ATTR, [len(func.params) - 2]), target, parameters)
    assert not isinstance(kernel, Refusal)
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        return func, tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())


def run(func: tvm.tirx.PrimFunc, kernel: tvm.runtime.Module, arrays: list[np.ndarray]) -> np.ndarray:
    device = tvm.cuda(0)
    output = cases.random_array(func.params[-1], np.random.default_rng(0))
    poison = np.nan if output.dtype.kind not in "ib" else True
    tensors = [tvm.runtime.tensor(array, device) for array in (*arrays, np.full_like(output, poison))]
    kernel["main"](*tensors)
    return tensors[-1].numpy()


@pytest.mark.gpu
@needs_gpu
@every_case
def test_kernel_agrees_with_numpy(template: Template, case: MemoryCase, parameters: Parameters) -> None:
    func, kernel = compiled(template, case, parameters)
    rng = np.random.default_rng(0)
    for _ in range(FRESH_INPUTS):
        arrays = cases.random_inputs(func, rng)
        found, right = run(func, kernel, arrays), case.expected(*map(cases.widened, arrays))
        if found.dtype.kind in "ib":
            np.testing.assert_array_equal(found, right)
            continue
        error = np.linalg.norm(cases.widened(found) - right) / np.linalg.norm(right)
        # Rounding to 8 or 11 bits of significand, uniformly: 2**-9 or 2**-12 of the value, over the square root of 3.
        # One element alone may be off by the square root of 3 times that.
        limit = {"bfloat16": 4e-3, "float16": 6e-4}.get(str(found.dtype), 2e-6)
        assert error < limit


@pytest.mark.gpu
@needs_gpu
def test_norm_of_values_that_overflow_in_float16_is_finite() -> None:
    case = cases.rms_norm((16, 512))
    func, kernel = compiled(Rows(), case, RowsParameters(8, 32, 4, dependent=True))
    arrays = cases.random_inputs(func, np.random.default_rng(0))
    arrays[0] = np.copysign(np.float16(60000), arrays[0])
    found = run(func, kernel, arrays)
    np.testing.assert_allclose(found, case.expected(*map(cases.widened, arrays)), rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@needs_gpu
def test_softmax_of_masked_and_of_large_values_is_numpys() -> None:
    case = cases.softmax((2, 8, 96), masked=True)
    func, kernel = compiled(Rows(), case, RowsParameters(4, 8, 4, dependent=True))
    rng = np.random.default_rng(0)
    x, mask = cases.random_inputs(func, rng)
    x *= np.float16(1000)
    mask[...] = np.where(rng.integers(0, 2, mask.shape), 0, -np.inf)
    mask[0, 3] = -np.inf
    found, right = run(func, kernel, [x, mask]), case.expected(cases.widened(x), cases.widened(mask))
    # A row of which nothing is left is NaN, as ONNX Runtime's is.
    assert np.isnan(right[:, 3]).all()
    np.testing.assert_allclose(found, right, rtol=2e-3, atol=2e-3)


def test_a_kernel_for_an_older_gpu_is_never_dependent() -> None:
    target: ResolvedTarget = resolve_target("cuda:sm_80")
    for template, case in ((Rows(), cases.softmax((64, 64))), (Elementwise(), cases.silu((64, 64)))):
        found = template.candidates(case.func(), target)
        assert not isinstance(found, Refusal)
        assert not any(parameters.dependent for parameters in found)
        refused = template.apply(case.func(), target, replace(found[0], dependent=True))
        assert refused == Refusal("the target is cuda sm_80, expected cuda sm_90 or later (dependent launch)")
