"""The results of matmuls on tensor cores, on whatever GPU is here."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from pipeline.codegen.finish import device_toolchain, finish_kernels
from schedules.targets import resolve_target
from tests.schedules.test_tensor_tile import drawn, matmul

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda(0).exist, reason="there is no GPU")]


@pytest.mark.parametrize(("m", "k", "n"), [(16, 16, 16), (64, 96, 128), (128, 768, 256), (48, 64, 80)])
def test_every_candidate_is_right(m: int, k: int, n: int) -> None:
    version = str(tvm.cuda(0).compute_version).replace(".", "")
    target = resolve_target(f"cuda:sm_{version}").target
    generator, device = np.random.default_rng(0), tvm.cuda(0)
    mod = matmul(m, k, n)
    candidates = drawn(mod, target, 8)
    assert candidates
    for schedule in candidates:
        with device_toolchain(target), target:
            built = tvm.compile(finish_kernels(schedule.mod, target), target)
        a, b = (generator.uniform(-1, 1, shape).astype("float16") for shape in ((1, m, k), (k, n)))
        bias = generator.uniform(-1, 1, n).astype("float32")
        out = np.full((1, m, n), np.nan, "float16")
        tensors = [tvm.runtime.tensor(array, device) for array in (a, b, bias, out)]
        built["main"](*tensors)
        expected = a.astype(np.float64) @ b.astype(np.float64) + bias
        np.testing.assert_allclose(tensors[-1].numpy(), expected, rtol=2e-3, atol=2e-3 * np.sqrt(k))
