"""Norms inside matmuls as functions: right where they are built plainly, and recognised; without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import te, topi

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.libraries.cublaslt import CublasLt
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.normed_matmul import adds_only, find_bias
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import EPSILON, OUTPUTS, NormCase, assert_right, known

SMALL = MatmulCase((3, 2), 32, 48, ("bias",))
CASES = {
    "layer norm": NormCase(SMALL, operand=True),
    "layer norm with beta, statistics kept": NormCase(SMALL, operand=True, shifted=True, keeps=True),
    "RMS norm": NormCase(replace(SMALL, epilogue=()), operand=True, centred=False),
    "weights turned": NormCase(replace(SMALL, transposed=True), operand=True, keeps=True),
    "bias in half precision": NormCase(replace(SMALL, epilogue=("half_bias",)), operand=True, shifted=True),
    "sums": NormCase(replace(SMALL, epilogue=("bias", "residual")), sums=True),
    "residual": NormCase(replace(SMALL, epilogue=("bias", "residual")), residual=True, shifted=True),
    "residual and sums": NormCase(replace(SMALL, epilogue=("bias", "residual")), residual=True, sums=True),
    "operand and sums": NormCase(SMALL, operand=True, sums=True, keeps=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_function_is_right_and_recognised(case: NormCase) -> None:
    func, inputs = case.func(), case.inputs(np.random.default_rng(0))
    matmul = known(func)
    assert (matmul.norm is not None, matmul.partials is not None) == (case.operand, case.sums)
    if matmul.norm is not None:
        assert (matmul.norm.centred, matmul.norm.groups) == (case.centred, 3)
        assert matmul.norm.epsilon == pytest.approx(EPSILON)
        assert (matmul.norm.output is not None) == case.keeps
    outputs = {
        str(param.name): np.full([int(size) for size in param.ty.shape], np.nan, str(param.ty.dtype))
        for param in func.params
        if param.name in OUTPUTS
    }
    tensors = {name: tvm.runtime.tensor(array) for name, array in {**inputs, **outputs}.items()}
    built = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")
    built["main"](*(tensors[str(param.name)] for param in func.params))
    assert_right(case, inputs, {name: tensors[name].numpy() for name in outputs}, 1e-3)


def test_variance_is_never_negative_when_rows_are_constant() -> None:
    case = NormCase(SMALL, operand=True, keeps=True)
    inputs = case.inputs(np.random.default_rng(0))
    inputs["A"][:] = 1000.3
    exact = float(inputs["A"].flat[0])
    inputs["partials"][..., 0], inputs["partials"][..., 1] = 16 * exact, np.nextafter(np.float32(16 * exact**2), 0)
    func = case.func()
    arrays = [inputs.get(str(p.name), np.zeros([int(s) for s in p.ty.shape], str(p.ty.dtype))) for p in func.params]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")["main"](*tensors)
    scales = tensors[-2].numpy()[..., 0]
    np.testing.assert_allclose(scales, EPSILON**-0.5, rtol=1e-3)


def test_other_reductions_are_refused() -> None:
    data, sums = te.placeholder((4, 32), "float16", name="A"), te.placeholder((3, 4, 2), "float32", name="sums")
    weight = te.placeholder((32, 8), "float16", name="B")
    k, g = te.reduce_axis((0, 32), name="k"), te.reduce_axis((0, 3), name="g")
    total = te.compute((4,), lambda i: te.sum(sums[g, i, 0], axis=g), name="total")
    product = te.compute(
        (4, 8), lambda i, j: te.sum(data[i, k].astype("float32") * weight[k, j].astype("float32"), axis=k)
    )
    result = te.compute((4, 8), lambda i, j: product[i, j] * total[i], name="result")
    found = recognise_matmul(te.create_prim_func([data, weight, sums, result]))
    assert isinstance(found, Refusal)
    assert "expected one reduction, found 2" in found.reason


def test_statistics_of_rows_of_another_size_are_refused() -> None:
    func = NormCase(replace(SMALL, k=64), group=16, operand=True).func()
    wrong = func.script().replace("48.0", "64.0") if "48.0" in func.script() else func.script().replace("64.0", "48.0")
    found = recognise_matmul(tvm.script.from_source(wrong))
    assert isinstance(found, Refusal)
    assert found.reason == "the statistics are of rows of 48, the left operand's have 64"


@pytest.mark.parametrize(
    ("epilogue", "is_found"),
    [(("bias",), True), (("bias", "gelu"), True), (("bias", "residual"), True), (("half_bias",), False), ((), False)],
)
def test_find_bias_finds_what_is_added_before_all_else(epilogue: tuple[str, ...], is_found: bool) -> None:
    func = replace(SMALL, epilogue=epilogue).func()
    assert (find_bias(func, known(func)) == 2) == is_found


def test_find_bias_leaves_a_bias_that_is_used_twice() -> None:
    a, b = te.placeholder((4, 32), "float16", name="A"), te.placeholder((32, 8), "float16", name="B")
    bias, k = te.placeholder((8,), "float32", name="bias"), te.reduce_axis((0, 32), name="k")
    product = te.compute((4, 8), lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), axis=k))
    func = te.create_prim_func([a, b, bias, te.compute((4, 8), lambda i, j: (product[i, j] + bias[j]) * bias[j])])
    assert find_bias(func, known(func)) is None


def test_adds_only_is_of_sums_in_float32() -> None:
    plain = replace(SMALL, epilogue=("bias", "residual")).func()
    assert adds_only(plain, known(plain), 3)
    for epilogue in (("half_bias", "residual"), ("bias", "residual", "gelu")):
        func = replace(SMALL, epilogue=epilogue).func()
        assert not adds_only(func, known(func), 3)


def test_the_library_leaves_norms_alone_but_for_those_of_a_residual() -> None:
    target = resolve_target("cuda:sm_90a")
    for case in (CASES["layer norm"], CASES["sums"]):
        assert isinstance(CublasLt().candidates(case.func(), target), Refusal)
    offered = CublasLt().candidates(CASES["residual"].func(), target)
    assert not isinstance(offered, Refusal)
    assert {parameters.epilogue for parameters in offered} == {"kernel"}


def test_a_layer_norm_alone_is_no_matmul() -> None:
    x, gamma = te.placeholder((4, 32), "float16", name="x"), te.placeholder((32,), "float16", name="gamma")
    func = te.create_prim_func([x, gamma, topi.nn.rms_norm(x, gamma, [1], EPSILON)])
    assert isinstance(recognise_matmul(func), Refusal)
