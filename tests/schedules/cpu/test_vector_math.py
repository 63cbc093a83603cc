from __future__ import annotations

import numpy as np
import pytest
import tvm
from scipy import special
from tvm import te, tirx
from tvm.ir import Call
from tvm.script import tirx as T

from relaxtune.pipeline.codegen.finish import finish_kernels
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.tir.expressions import call_name, find_all
from tests.schedules.kernel_cases import Case, host, run

REFERENCE = {
    **{"exp": np.exp, "erf": special.erf, "tanh": np.tanh, "sigmoid": special.expit},
    **{"sinh": np.sinh, "cosh": np.cosh},
}
# In units of the last place, as the module's docstring promises.
LIMITS = {"exp": 2.0, "erf": 2.0, "tanh": 2.0, "sigmoid": 4.0, "sinh": 6.0, "cosh": 6.0}
COUNT = 1 << 16


def evaluate(name: str, x: np.ndarray) -> np.ndarray:
    a = te.placeholder(x.shape, str(x.dtype), name="A")
    func = te.create_prim_func([a, te.compute(x.shape, lambda i: getattr(tirx, name)(a[i]), name="B")])
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    scheduled = finish_kernels(apply_fallback(module, host().target), host().target)
    library = tirx.build(scheduled, target=host().target)
    out = tvm.runtime.tensor(np.full(x.shape, np.nan, x.dtype))
    library["main"](tvm.runtime.tensor(x), out)
    return out.numpy()


@pytest.mark.parametrize("name", list(REFERENCE))
@pytest.mark.parametrize("span", [1e-3, 1.0, 6.0, 100.0])
def test_function_is_within_its_ulps_when_arguments_are_drawn(name, span):
    x = np.random.default_rng(0).uniform(-span, span, COUNT).astype("float32")
    want = REFERENCE[name](x.astype("float64"))
    with np.errstate(over="ignore"):
        rounded = want.astype("float32")
    usable = np.isfinite(rounded) & (np.abs(rounded) > np.finfo("float32").tiny)
    ulps = np.abs(evaluate(name, x).astype("float64") - want)[usable] / np.spacing(np.abs(rounded[usable]))
    assert ulps.max() <= LIMITS[name]


@pytest.mark.parametrize("name", list(REFERENCE))
def test_function_follows_libm_when_arguments_are_special(name):
    x = np.array([np.inf, -np.inf, np.nan, 0.0, 1e38, -1e38, 88.7, -87.0, -104.0] + [0.5] * 23, "float32")
    with np.errstate(over="ignore", under="ignore"):
        want = REFERENCE[name](x.astype("float64")).astype("float32")
    np.testing.assert_allclose(evaluate(name, x), want, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("name", list(REFERENCE))
@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 2e-3), ("float64", 1e-12)])
@pytest.mark.parametrize("count", [50, 64])
def test_function_keeps_its_type_when_it_is_not_float32(name, dtype, rtol, count):
    # 64 are whole vectors, 50 are not.
    x = np.random.default_rng(0).uniform(-4, 4, count).astype(dtype)
    got = evaluate(name, x)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got, REFERENCE[name](x.astype("float64")), rtol=rtol, atol=rtol)


@T.prim_func(private=True, s_tir=True)
def vector_of_erf(x: T.Buffer((16,), "float32"), y: T.Buffer((16,), "float32")) -> None:
    for lane in T.vectorized(16):
        y[lane] = T.erf(x[lane]) * x[lane]


def test_vectors_with_an_erf_stay_whole_on_a_cpu_and_a_gpu_does_not_see_it():
    module = finish_kernels(tvm.IRModule({"main": vector_of_erf}), host().target)
    func = tirx.transform.VectorizeLoop()(tirx.transform.BindTarget(host().target)(module))["main"]
    names = {call_name(call): tvm.DataType(call.ty.dtype).lanes for call in find_all(func.body, Call)}
    assert [lanes for name, lanes in names.items() if name.endswith(".erf")] == [16]
    assert tvm.ir.Op.get("tirx.erf").get_attr("TVectorizable") is None


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5, 2.5, -1.0])
def test_power_matches_numpy_when_exponent_is_whole_or_not(power):
    a = te.placeholder((100,), "float32", name="A")
    out = te.compute(a.shape, lambda i: te.power(a[i], tirx.const(power, "float32")), name="P")
    x = np.random.default_rng(0).uniform(0.1, 4, 100).astype("float32")
    run(Case(te.create_prim_func([a, out]), [x], [x**power]))


def test_negative_base_is_squared_exactly_when_exponent_is_two():
    a = te.placeholder((40,), "float32", name="A")
    out = te.compute(a.shape, lambda i: te.power(a[i], tirx.const(2.0, "float32")), name="P")
    x = np.linspace(-3, 3, 40).astype("float32")
    run(Case(te.create_prim_func([a, out]), [x], [x * x], rtol=0, atol=0))
