"""Kernels in units, compiled side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

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


def test_each_kernel_of_many_is_a_unit_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = scaled(20)
    names = unit_names(mod)
    assert sorted(names) == sorted((var.name_hint,) for var in mod.functions)
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {0})
    assert unit_names(mod) == names
    assert len(split_units(scaled(19))) == 1


def test_kernels_of_most_rows_are_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_units, "KERNELS_MIN", 2)
    (func, *_) = scaled(1).functions.values()
    kernels = ("add_kernel", "mul_kernel", "mul_kernel_1", "mul_kernel_2", "sub2_kernel", "sub2_kernel_1")
    order = [name for (name,) in unit_names(tvm.IRModule(dict.fromkeys(kernels, func)))]
    assert order == ["mul_kernel_2", "mul_kernel_1", "sub2_kernel_1", "add_kernel", "mul_kernel", "sub2_kernel"]


def test_module_of_several_units_has_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_units, "KERNELS_MIN", 2)
    with device_toolchain(TARGET), TARGET:
        built = tvm.compile(scaled(3), TARGET).mod
    (first,) = built.imports
    units = (first, *first.imports)
    assert [one.kind for one in units] == ["cuda"] * 3
    for number in range(3):
        holders = [one for one in units if one.implements_function(f"scale_{number}_kernel")]
        assert len(holders) == 1


def test_kernel_is_compiled_once_for_several_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_units, "KERNELS_MIN", 2)
    asked = []
    ask = cuda_units._ask
    monkeypatch.setattr(cuda_units, "_CUBINS", {})
    monkeypatch.setattr(cuda_units, "_ask", lambda *given: asked.append(given) or ask(*given))
    with device_toolchain(TARGET), TARGET:
        for count in (2, 3, 3):
            built = tvm.compile(scaled(count), TARGET).mod
            assert built.imports[0].implements_function("scale_1_kernel", query_imports=True)
    assert len(asked) == 3


def test_module_of_another_thread_is_compiled_while_a_thread_keeps_what_it_writes() -> None:
    with device_toolchain(TARGET), TARGET, ThreadPoolExecutor(1) as pool:
        kept = cuda_units._THREAD.written = list[tuple[object, ...]]()
        try:
            other = pool.submit(lambda: tvm.compile(scaled(1), TARGET).mod).result()
            assert not kept
            own = tvm.compile(scaled(1), TARGET).mod
        finally:
            cuda_units._THREAD.written = None
    # A cubin is no text.
    with pytest.raises(UnicodeDecodeError):
        other.imports[0].inspect_source("cubin")
    assert own.imports[0].inspect_source("cubin") == ""
    assert len(kept) == 1


def unit_names(mod: tvm.IRModule) -> list[tuple[str, ...]]:
    return [tuple(var.name_hint for var in unit.functions) for unit in split_units(mod)]
