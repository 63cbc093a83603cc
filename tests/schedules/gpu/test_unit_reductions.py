"""Functions with reductions over one place: what follows is applied once, and what TVM cannot lower is passed over."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.gpu.dlight_rules import without_unit_reductions
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.tir.blocks import list_blocks
from tests.schedules.kernel_cases import prim_func


@pytest.fixture(scope="module")
def target() -> tvm.target.Target:
    return resolve_target("cuda:sm_90a").target


def biased_matmul(inner: int) -> tirx.PrimFunc:
    x, w, bias = (te.placeholder(shape, "float32") for shape in ((6, inner), (inner, 3), (3,)))
    return prim_func([x, w, bias, topi.add(topi.matmul(x, w), bias)])


def test_matmul_of_one_step_is_an_assignment_and_computes_the_same() -> None:
    plain = without_unit_reductions(biased_matmul(1))
    assert [block.init for block in list_blocks(plain)] == [None, None]
    rng = np.random.default_rng(0)
    x, w, bias = (rng.standard_normal(shape).astype("float32") for shape in ((6, 1), (1, 3), (3,)))
    out = tvm.runtime.tensor(np.zeros((6, 3), "float32"))
    tvm.compile(plain, target="llvm")(*map(tvm.runtime.tensor, (x, w, bias)), out)
    np.testing.assert_allclose(out.numpy(), x @ w + bias, rtol=1e-6)


def test_matmul_of_several_steps_stays_a_reduction() -> None:
    func = biased_matmul(2)
    assert without_unit_reductions(func).same_as(func)


def test_bias_behind_a_matmul_of_one_step_is_added_once(target: tvm.target.Target) -> None:
    """Before, dlight inlined the bias into the start and into the step."""
    made = apply_fallback(tvm.IRModule({"main": biased_matmul(1)}), target)["main"]
    assert [block.init for block in list_blocks(made)] == [None]


def test_schedule_that_cannot_be_lowered_is_passed_over(target: tvm.target.Target) -> None:
    """A grouped convolution with a bias: before, code generation refused it."""
    data, kernel, bias = (te.placeholder(s, "float32") for s in ((2, 4, 8, 12), (8, 2, 2, 2), (1, 8, 1, 1)))
    conv = topi.nn.group_conv2d_nchw(data, kernel, 4, 0, 1, 2)
    module = tvm.IRModule({"main": prim_func([data, kernel, bias, topi.add(conv, bias)])})
    tvm.s_tir.transform.LowerCrossThreadReduction()(apply_fallback(module, target))
