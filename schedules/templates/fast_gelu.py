"""The erf form of gelu as one function for kernels that evaluate it on registers: 8 instructions and an exponential."""

from __future__ import annotations

import math

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.tirx.script import builder as T

# gelu(x) = x (1 + erf(x / sqrt 2)) / 2 = max(x, 0) - t 2^(-t q(t) - 1) with t = |x|: the polynomial of
# `schedules.templates.fast_math`'s erf, in x instead of x / sqrt 2. Error: at most 5e-7 |x|; an infinite x gives NaN.
_GELU = "relaxtune_gelu"
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
_TOLERANCE = 1e-4


def fast_gelu(product: tirx.Mul) -> tirx.Expr:
    """Return the fast form of a float32 product that is gelu: x, a half and 1 + erf(x / sqrt 2), in whatever order.

    Any other product is returned as it is.
    """
    if str(product.ty.dtype) != "float32":
        return product
    scale, factors = _factors(product)
    for number, factor in enumerate(factors):
        others = factors[:number] + factors[number + 1 :]
        found = _one_plus_erf(factor)
        if found is None or len(others) != 1:
            continue
        weight, argument = found
        inner_scale, inner = _factors(argument)
        is_gelu = (
            len(inner) == 1
            and tvm_ffi.structural_equal(inner[0], others[0])
            and math.isclose(inner_scale, math.sqrt(0.5), rel_tol=_TOLERANCE)
            and math.isclose(scale * weight, 0.5, rel_tol=_TOLERANCE)
        )
        if is_gelu:
            return T.cuda.func_call(_GELU, others[0], source_code=_GELU_SOURCE, return_type="float32")
    return product


def _one_plus_erf(value: tirx.Expr) -> tuple[float, tirx.Expr] | None:
    """Return w and y of `w + w * erf(y)`."""
    if not isinstance(value, tirx.Add):
        return None
    for constant, rest in ((value.a, value.b), (value.b, value.a)):
        scale, factors = _factors(rest)
        if not isinstance(constant, tirx.FloatImm) or len(factors) != 1 or not _is_erf(factors[0]):
            continue
        if math.isclose(constant.value, scale, rel_tol=_TOLERANCE):
            return scale, factors[0].args[0]
    return None


def _is_erf(value: tirx.Expr) -> bool:
    return isinstance(value, Call) and getattr(value.op, "name", "") == "tirx.erf"


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
