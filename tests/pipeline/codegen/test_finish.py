from __future__ import annotations

import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import CubinRequest
from relaxtune.pipeline.codegen.finish import device_toolchain, finish_kernels
from relaxtune.pipeline.errors import LoweringError
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.codegen.cubins import machine_code
from tests.pipeline.tuning.tuning_cases import add_one_mod

CUDA = resolve_target("cuda:sm_90a").target


def test_a_cpu_module_stays_as_it_is() -> None:
    mod = add_one_mod()
    target = resolve_target("llvm").target
    with device_toolchain(target):
        assert finish_kernels(mod, target) is mod


def test_a_kernel_outside_every_thread_is_refused() -> None:
    mod = add_one_mod()
    assert "threadIdx.x" in finish_kernels(apply_fallback(mod, CUDA), CUDA).script()
    with pytest.raises(LoweringError, match="kernels main have blocks that no GPU thread runs"):
        finish_kernels(mod, CUDA)


def test_the_toolchain_makes_a_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    cubins: list[bytes] = []
    made = CubinRequest.compile

    def keep(request: CubinRequest, on_log: object) -> bytes:
        assert on_log is None
        cubins.append(made(request))
        return cubins[-1]

    monkeypatch.setattr(CubinRequest, "compile", keep)
    with device_toolchain(CUDA), CUDA:
        tvm.compile(finish_kernels(apply_fallback(add_one_mod(), CUDA), CUDA), CUDA)
    (cubin,) = cubins
    assert set(machine_code(cubin)) == {"main_kernel"}
