"""Faster forms of float32 functions for kernels that evaluate them on registers, each with its error stated."""

from __future__ import annotations

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

_FUNCTIONS = {
    "tirx.erf": _ERF_SOURCE,
    "tirx.exp": _EXP_SOURCE,
    "tirx.sigmoid": _SIGMOID_SOURCE,
}


def fast_call(call: Call) -> tirx.Expr:
    """Return a float32 call's faster form: erf by a polynomial, exp and sigmoid by the hardware's functions."""
    found = _FUNCTIONS.get(getattr(call.op, "name", ""))
    if found is None or str(call.ty.dtype) != "float32":
        return call
    return device_call(found, call.args[0])
