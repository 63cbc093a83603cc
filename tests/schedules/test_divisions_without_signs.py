"""Divisions by symbolic sizes look at no signs where none can be negative."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.tirx.compilation_pipeline import PIPELINE_MAP

from relaxtune.schedules.divisions_without_signs import divides_by_sizes, truncate_divisions
from relaxtune.schedules.templates.lowering import MIXED_PIPELINE, tir_pipeline_for
from relaxtune.schedules.tir.expressions import find_all

LLVM = tvm.target.Target("llvm")


def places(shift: int) -> tvm.ir.IRModule:
    """Return a function that writes `(i + shift) // m % n` and `(i + shift) % m` of places i of a tensor (n, m)."""
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    read = te.placeholder((n, m), "int64", name="read")
    written = te.compute((n * m,), lambda i: read[(i + shift) // m % n, (i + shift) % m], name="written")
    func = te.create_prim_func([read, written]).with_attr("global_symbol", "places")
    return tvm.ir.IRModule({"places": func})


def divisions(mod: tvm.ir.IRModule) -> int:
    """Return how many floor divisions by an expression a lowered module has after the pass."""
    lower, _, _ = PIPELINE_MAP["s_tir"]()
    bound = tirx.transform.BindTarget(LLVM.with_host(LLVM))(mod)
    (func,) = truncate_divisions(lower(bound)).functions.values()
    kinds = (tirx.FloorDiv, tirx.FloorMod)
    return sum(not isinstance(one.b, tirx.IntImm) for kind in kinds for one in find_all(func.body, kind))


def test_quotients_of_sizes_and_places_are_truncated() -> None:
    assert divides_by_sizes(places(0)["places"])
    assert divisions(places(0)) == divisions(places(7)) == 0


def test_divisions_of_what_may_be_negative_stay() -> None:
    assert divisions(places(-3)) > 0


@pytest.mark.parametrize("shift", [0, 7, -3])
def test_places_are_those_of_floor_division(shift: int) -> None:
    mod = places(shift)
    assert tir_pipeline_for(mod) == MIXED_PIPELINE
    built = tvm.compile(mod, LLVM, tir_pipeline=tir_pipeline_for(mod))
    data = np.arange(5 * 3, dtype="int64").reshape(5, 3)
    written = tvm.runtime.tensor(np.zeros(15, "int64"))
    built["places"](tvm.runtime.tensor(data), written)
    np.testing.assert_array_equal(written.numpy(), np.roll(data.reshape(-1), -shift))


def test_functions_of_known_sizes_keep_their_pipeline() -> None:
    read = te.placeholder((4, 6), "int64", name="read")
    written = te.compute((24,), lambda i: read[i // 6, i % 6], name="written")
    func = te.create_prim_func([read, written])
    assert tir_pipeline_for(tvm.ir.IRModule({"main": func})) == "default"
