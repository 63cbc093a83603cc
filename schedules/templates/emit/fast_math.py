"""Faster forms of float32 functions for kernels that evaluate them on registers, each with its error stated."""

from __future__ import annotations

import math

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from relaxtune.schedules.templates.emit.device_function import device_call

# 1 - erf(t) = 2^(-t q(t)) for t >= 0, q the polynomial of degree 4 that was fitted to the least maximum of
# |error of erf| on [0, 4.2]: 6e-7, in float32 arithmetic 7e-7; ex2.approx adds less than 3e-7. About 8 instructions;
# CUDA's erff, exact to 2 units in the last place, takes three times as many.
_ERF_SOURCE = """
__forceinline__ __device__ float relaxtune_erf(float x) {
  float t = fabsf(x);
  float q = fmaf(fmaf(fmaf(fmaf(0.00294415699f, t, -0.0295900386f), t, 0.148665622f), t, 0.918509364f), t, 1.62788904f);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-t * q));
  return copysignf(1.0f - e, x);
}
"""

# e^x by the hardware's exponential, as CUDA's __expf: an error of 2 + 1.2 |x| units in the last place; 0 where the
# result is below the least normal number. CUDA's expf, exact to 1 unit, takes four times as many instructions.
_EXP_SOURCE = """
__forceinline__ __device__ float relaxtune_exp(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(1.44269504f * x));
  return e;
}
"""

# 1 / (1 + e^-x) by the hardware's exponential and division: 2 units in the last place each; 0 from e^-x = 2^126 on.
_SIGMOID_SOURCE = """
__forceinline__ __device__ float relaxtune_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
"""

_FUNCTIONS = {"tirx.erf": _ERF_SOURCE, "tirx.exp": _EXP_SOURCE, "tirx.sigmoid": _SIGMOID_SOURCE}


def fast_call(call: Call) -> tirx.Expr:
    """Return a float32 call's faster form: erf by a polynomial, exp and sigmoid by the hardware's functions."""
    found = _FUNCTIONS.get(getattr(call.op, "name", ""))
    return call if found is None or str(call.ty.dtype) != "float32" else device_call(found, call.args[0])


# gelu(x) = x (1 + erf(x / sqrt 2)) / 2 = max(x, 0) - t 2^(-t q(t) - 1) with t = |x|: the polynomial of
# `schedules.templates.emit.fast_math`'s erf, in x instead of x / sqrt 2. Error: at most 5e-7 |x|; an infinite x gives
# NaN.
_GELU_SOURCE = """
__forceinline__ __device__ float relaxtune_gelu(float x) {
  float t = fabsf(x);
  float q = fmaf(fmaf(fmaf(fmaf(0.000520458319f, t, -0.00739750965f), t, 0.0525612348f), t, 0.459254682f), t,
                 1.15109135f);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(fmaf(-t, q, -1.0f)));
  return fmaf(-t, e, fmaxf(x, 0.0f));
}
"""
# The tanh form: x (1 + tanh(u)) / 2 = x / (1 + e^(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3). The constants are
# those of -2u / log(2). Error: at most 1e-6 |x|.
_GELU_TANH_SOURCE = """
__forceinline__ __device__ float relaxtune_gelu_tanh(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * fmaf(-0.102943240f, x * x, -2.302208198f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return x * r;
}
"""
_TANH_COEFFICIENTS = {1: (2 / math.pi) ** 0.5, 3: (2 / math.pi) ** 0.5 * 0.044715}
_TOLERANCE = 1e-4


def fast_gelu(product: tirx.Mul) -> tirx.Expr:
    """Return the fast form of a float32 product that is gelu: x, a half and 1 + erf or 1 + tanh, in whatever order.

    Any other product is returned as it is.
    """
    found = find_gelu(product)
    if found is None:
        return product
    form, x = found
    return device_call(_GELU_TANH_SOURCE if form == "tanh" else _GELU_SOURCE, x)


def find_gelu(product: tirx.Mul) -> tuple[str, tirx.Expr] | None:
    """Return which form of gelu a float32 product is ("erf" or "tanh"), and of what; None when it is none."""
    if str(product.ty.dtype) != "float32":
        return None
    scale, factors = _factors(product)
    for number, factor in enumerate(factors):
        others = factors[:number] + factors[number + 1 :]
        found = _weighted_one_plus(factor)
        if found is None or len(others) != 1 or not math.isclose(scale * found[0], 0.5, rel_tol=_TOLERANCE):
            continue
        call, x = found[1], others[0]
        inner = _polynomial(call.args[0], x)
        if _is(call, "erf") and _close(inner, {1: math.sqrt(0.5)}):
            return "erf", x
        if _is(call, "tanh") and _close(inner, _TANH_COEFFICIENTS):
            return "tanh", x
    return None


def _weighted_one_plus(value: tirx.Expr) -> tuple[float, Call] | None:
    """Return w and the call of `w + w * erf(y)` or `w + w * tanh(y)`."""
    if not isinstance(value, tirx.Add):
        return None
    for constant, rest in ((value.a, value.b), (value.b, value.a)):
        scale, factors = _factors(rest)
        if not isinstance(constant, tirx.FloatImm) or len(factors) != 1 or not _is(factors[0], "erf", "tanh"):
            continue
        if math.isclose(constant.value, scale, rel_tol=_TOLERANCE):
            return scale, factors[0]
    return None


def _is(value: tirx.Expr, *names: str) -> bool:
    return isinstance(value, Call) and getattr(value.op, "name", "") in [f"tirx.{name}" for name in names]


def _polynomial(value: tirx.Expr, x: tirx.Expr) -> dict[int, float] | None:
    """Return the coefficients, by power, of an expression that is a polynomial in another."""
    if tvm_ffi.structural_equal(value, x):
        return {1: 1.0}
    if isinstance(value, tirx.FloatImm):
        return {0: value.value}
    if isinstance(value, tirx.Div) and isinstance(value.b, tirx.FloatImm):
        inner = _polynomial(value.a, x)
        return None if inner is None else {power: c / value.b.value for power, c in inner.items()}
    if not isinstance(value, (tirx.Add, tirx.Mul)):
        return None
    a, b = _polynomial(value.a, x), _polynomial(value.b, x)
    if a is None or b is None:
        return None
    total: dict[int, float] = {}
    if isinstance(value, tirx.Add):
        terms = [*a.items(), *b.items()]
    else:
        terms = [(m + n, c * d) for m, c in a.items() for n, d in b.items()]
    for power, coefficient in terms:
        total[power] = total.get(power, 0.0) + coefficient
    return total


def _close(found: dict[int, float] | None, expected: dict[int, float]) -> bool:
    return (
        found is not None
        and found.keys() == expected.keys()
        and all(math.isclose(found[power], expected[power], rel_tol=_TOLERANCE) for power in expected)
    )


def _factors(value: tirx.Expr) -> tuple[float, list[tirx.Expr]]:
    """Return the constant factor and the others of a product, or of a quotient by a constant."""
    if isinstance(value, tirx.FloatImm):
        return value.value, []
    if isinstance(value, tirx.Mul):
        (scale_a, a), (scale_b, b) = _factors(value.a), _factors(value.b)
        return scale_a * scale_b, a + b
    if isinstance(value, tirx.Div) and isinstance(value.b, tirx.FloatImm):
        scale, factors = _factors(value.a)
        return scale / value.b.value, factors
    return 1.0, [value]
