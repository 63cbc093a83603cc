"""The results of matmuls on tensor cores, on whatever GPU is here."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.finish import device_toolchain
from relaxtune.pipeline.passes.precision.round_to_tf32 import tf32_array
from relaxtune.schedules.targets import resolve_target
from tests.schedules.search.test_tensor_tile import compiled, drawn, matmul

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda(0).exist, reason="there is no GPU")]

SHAPES = [(16, 16, 16), (128, 768, 256), (48, 64, 80), (197, 100, 203), (37, 52, 1001), (1, 7, 17), (77, 129, 330)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_candidate_is_right(m: int, k: int, n: int, turned: bool, dtype: str) -> None:
    version = str(tvm.cuda(0).compute_version).replace(".", "")
    # Without the suffix of Hopper, whose halves have a template.
    target = resolve_target(f"cuda:sm_{version}").target
    generator, device = np.random.default_rng(0), tvm.cuda(0)
    mod = matmul(m, k, n, dtype, turned=turned, tf32=True)
    for schedule in drawn(mod, target, 4):
        with device_toolchain(target):
            built = compiled(schedule, target)
        shapes = ((1, m, k), (n, k) if turned else (k, n))
        a, b = (tf32_array(generator.uniform(-1, 1, shape).astype("float32")).astype(dtype) for shape in shapes)
        bias = generator.uniform(-1, 1, n).astype("float32")
        out = np.full((1, m, n), np.nan, dtype)
        tensors = [tvm.runtime.tensor(array, device) for array in (a, b, bias, out)]
        built["main"](*tensors)
        expected = a.astype(np.float64) @ (b.T if turned else b).astype(np.float64) + bias
        # Tensor cores cut off what does not fit a sum of float32.
        rounding = 2e-3 if dtype == "float16" else 1e-5
        np.testing.assert_allclose(tensors[-1].numpy(), expected, rtol=rounding, atol=rounding * np.sqrt(k))
