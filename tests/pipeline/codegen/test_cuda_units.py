"""Kernels in units, compiled side by side."""

from __future__ import annotations

import pytest
import tvm
from tvm import te, topi

from relaxtune.pipeline.codegen import cuda_units
from relaxtune.pipeline.codegen.cuda_units import split_units
from relaxtune.pipeline.codegen.finish import device_toolchain
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target

TARGET = resolve_target("cuda:sm_90a").target


def scaled(count: int) -> tvm.IRModule:
    """Return a module of some functions, scheduled: each scales a vector by its number."""
    functions = {}
    for number in range(count):
        x = te.placeholder((256,), "float32", name="x")
        y = topi.multiply(x, float(number + 2))
        functions[f"scale_{number}"] = te.create_prim_func([x, y]).with_attr("global_symbol", f"scale_{number}")
    return apply_fallback(tvm.IRModule(functions), TARGET)


def test_units_hold_each_kernel_once_and_do_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = scaled(20)
    units = split_units(mod)
    names = [[var.name_hint for var in unit.functions] for unit in units]
    assert sorted(name for unit in names for name in unit) == sorted(var.name_hint for var in mod.functions)
    assert [len(unit) for unit in names] == [5, 5, 5, 5]
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {0})
    assert [[var.name_hint for var in unit.functions] for unit in split_units(mod)] == names
    assert len(split_units(scaled(19))) == 1


def test_module_of_several_units_has_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_units, "_KERNELS_MIN", 2)
    monkeypatch.setattr(cuda_units, "_UNIT_KERNELS", 2)
    with device_toolchain(TARGET), TARGET:
        built = tvm.compile(scaled(3), TARGET).mod
    (first,) = built.imports
    (second,) = first.imports
    assert (first.kind, second.kind) == ("cuda", "cuda")
    for number in range(3):
        holders = [one for one in (first, second) if one.implements_function(f"scale_{number}_kernel")]
        assert len(holders) == 1
