from __future__ import annotations

from pathlib import Path

import pytest
import tvm

from pipeline.codegen.finish import device_toolchain, finish_kernels
from pipeline.codegen.gpu_check import unbound_kernels
from pipeline.errors import LoweringError
from schedules.targets import resolve_target
from tests.pipeline.codegen.cubins import machine_code
from tests.pipeline.tuning.tuning_cases import add_one_mod

CUDA = resolve_target("cuda:sm_90a").target


def test_a_cpu_module_stays_as_it_is() -> None:
    mod = add_one_mod()
    target = resolve_target("llvm").target
    with device_toolchain(target):
        assert finish_kernels(mod, target) is mod


def test_an_unbound_kernel_is_bound_from_its_unscheduled_form_or_refused() -> None:
    mod = add_one_mod()
    assert unbound_kernels(finish_kernels(mod, CUDA, mod)) == []
    with pytest.raises(LoweringError, match="kernels main have blocks that no GPU thread runs"):
        finish_kernels(mod, CUDA)


def test_the_toolchain_makes_a_cubin(tmp_path: Path) -> None:
    mod = finish_kernels(add_one_mod(), CUDA, add_one_mod())
    with device_toolchain(CUDA), CUDA:
        executable = tvm.compile(mod, CUDA)
    executable.mod.imports[0].write_to_file(str(tmp_path / "kernels.cubin"), "cubin")
    assert set(machine_code((tmp_path / "kernels.cubin").read_bytes())) == {"main_kernel"}
