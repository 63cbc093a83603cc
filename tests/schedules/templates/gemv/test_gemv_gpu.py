"""Kernels for few rows on a GPU: right on fresh inputs, into outputs full of NaN, for every form."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import Template
from relaxtune.schedules.templates.gemv.template import Gemv, GemvStream
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.tir.blocks import static_shape
from tests.schedules.templates.gemv_cases import CASES, GemvCase

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(0)
# Of a case's candidates, each of which is compiled and run on 20 inputs: the parts are tests that can run side by side.
PARTS = 4


def arguments_of(case: GemvCase, shift: float = 0) -> dict[str, np.ndarray]:
    """Return random inputs by parameter name, x around `shift`."""
    arrays: dict[str, np.ndarray] = {}
    for param in case.func().params[:-1]:
        shape, name = static_shape(param) or (), str(param.name)
        if name == "packed":
            arrays[name] = RNG.integers(0, 256, shape, dtype=np.uint8)
        elif name == "scales":
            arrays[name] = RNG.uniform(0.001, 0.01, shape).astype(np.float16)
        else:
            around = shift if name == "x" else 0
            arrays[name] = (RNG.standard_normal(shape) + around).astype(str(param.ty.dtype))
    return arrays


def expected_of(case: GemvCase, arrays: dict[str, np.ndarray], *, rounded: bool = False) -> np.ndarray:
    """Return the output in float64, of weights as they are or `rounded` to half precision."""
    if case.bits == 16:
        weight = arrays["w"].astype(np.float64)
    else:
        levels = arrays["packed"]
        if case.bits == 4:
            levels = np.stack([levels & 15, levels >> 4], axis=-1).reshape(case.n, case.k)
        scales = arrays["scales"].astype(np.float64).repeat(min(case.group, case.k), axis=0)[: case.k].T
        weight = (levels.astype(np.float64) - 2 ** (case.bits - 1)) * scales
        weight = weight.astype(np.float16).astype(np.float64) if rounded else weight
    result = arrays["x"].astype(np.float64) @ weight.T
    if "bias" in arrays:
        result = result + arrays["bias"]
    if "other" in arrays:
        result = result + arrays["other"]
    if case.epilogue == "gated":
        pairs = result.reshape(*result.shape[:-1], -1, 2, 8)
        gate, value = pairs[..., 0, :], pairs[..., 1, :]
        result = (gate / (1 + np.exp(-gate)) * value).reshape(*result.shape[:-1], -1)
    return result


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == "float16"])
def test_every_candidate_is_right(name: str, part: int) -> None:
    check_candidates(Gemv(), CASES[name], part)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.bits < 16 and case.k > 256])
def test_every_candidate_that_streams_is_right(name: str, part: int) -> None:
    check_candidates(GemvStream(), CASES[name], part)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.bits == 16 and case.dtype == "float16"])
def test_every_candidate_without_wgmma_that_streams_is_right(name: str, part: int) -> None:
    target = resolve_target(f"cuda:{resolve_target('cuda').arch.removesuffix('a')}")
    check_candidates(GemvStream(), CASES[name], part, target)


def check_candidates(template: Template, case: GemvCase, part: int, target: ResolvedTarget | None = None) -> None:
    """Run a part of a template's candidates on fresh inputs."""
    target = target or resolve_target("cuda")
    func = case.func()
    found = template.candidates(func, target)
    assert not isinstance(found, Refusal), found
    # Sums of x that do not cancel show an offset of levels that is taken off late.
    draws = [arguments_of(case, shift) for shift in (0, 4) for _ in range(10)]
    expected = [expected_of(case, arrays) for arrays in draws]
    device = tvm.cuda()
    for parameters in found[part::PARTS]:
        kernel = template.apply(func, target, parameters)
        assert not isinstance(kernel, Refusal)
        module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
        with cuda_compiler(target.arch):
            built = tvm.tirx.build(module, target=target.target, pipeline=register_mixed_pipeline())
        for arrays, right in zip(draws, expected, strict=True):
            output = tvm.runtime.tensor(np.full(right.shape, np.nan, case.output), device=device)
            built["main"](*(tvm.runtime.tensor(array, device=device) for array in arrays.values()), output)
            error = np.linalg.norm(output.numpy().astype(np.float64) - right) / np.linalg.norm(right)
            assert error < 1e-3, parameters
