"""exp, erf, tanh, sigmoid, sinh, cosh and whole powers as vector arithmetic for LLVM, not a call to libm per lane.

TVM lowers `exp` to LLVM's intrinsic and `erf` to a call of `erff`; neither has a vector form without a vector libm, so
LLVM takes a vector apart and calls a scalar function for every lane. The functions here are lowered to polynomials that
were fitted for this project (minimax, by iteratively reweighted least squares in float64, then rounded to float32).

LLVM has no code for vectors of sinh and cosh at all.

Largest error measured against float64, in units of the last place: exp 1.1, erf 1.2, tanh 1.4, sigmoid 2.5 (the tests
hold them to 2, 2, 2 and 4; sinh and cosh to 6). Infinities and NaN come out as libm's do; results that would be
subnormal are 0.

The replacement happens in TVM's intrinsic lowering, after vectorisation and unrolling, and so serves fallback schedules
and tuned ones alike. It holds for the process in which `register_vector_math` ran: build workers must call it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tvm
import tvm_ffi
from tvm import DataType, tirx
from tvm.ir import Call, Expr

from relaxtune.schedules.tir.expressions import call_name, call_names, dtype_of

# TVM's own rules are registered at levels 10 and 99.
_LEVEL = 110
_VECTOR_ERF = "relaxtune.erf"

_EXP_LOW, _EXP_HIGH = -87.33654, 88.72283  # ln of the smallest normal and of the largest float32
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts: n * high is exact for |n| < 2**14

# exp(r) = 1 + r + r^2 * E(r) for |r| <= ln(2) / 2
_EXP = (0.5, 0.166665181517601, 0.04166620597243309, 0.008368889801204205, 0.001395049155689776)
# erf(x) = x + x * S(x^2) for |x| < 0.93
_ERF_SMALL = (
    0.12837915122509003, -0.37612494826316833, 0.11281802505254745, -0.026765568181872368, 0.004990980960428715,
    -0.0005976896500214934,
)  # fmt: skip
# erf(t) = 1 - exp(-t - t * L(t)) for 0.93 <= t <= 4
_ERF_LARGE = (
    0.12864096462726593, 0.6351814866065979, 0.106187604367733, -0.023720180615782738, 0.003622916294261813,
    -0.00031805908656679094, 1.0763112186396029e-05,
)  # fmt: skip
_ERF_SPLIT, _ERF_ONE = 0.93, 4.0  # from 4 on, erf rounds to 1
# tanh(x) = x + x^3 * T(x^2) for |x| < 0.6; else 1 - 2 / (exp(2 |x|) + 1)
_TANH = (-0.33333298563957214, 0.13331958651542664, -0.053786683827638626, 0.02080538310110569, -0.00590586569160223)
_TANH_SPLIT, _TANH_ONE = 0.6, 10.0
# sinh(x) = x + x^3 * H(x^2) for |x| < 1: the first terms of its series.
_SINH, _SINH_SPLIT = (1 / 6, 1 / 120, 1 / 5040, 1 / 362880), 1.0


@functools.cache
def register_vector_math() -> None:
    """Make this process lower these functions for LLVM to vector arithmetic; repeating it is harmless."""
    functions = {"exp": _exp, "erf": _erf, "tanh": _tanh, "sigmoid": _sigmoid, "sinh": _sinh, "cosh": _cosh}
    for name, function in functions.items():
        tirx.register_intrin_lowering(f"tirx.{name}", target="llvm", f=_lowering(function), level=_LEVEL)
    tirx.register_intrin_lowering("tirx.pow", target="llvm", f=_lower_power, level=_LEVEL)
    tvm_ffi.get_global_func("ir.RegisterOp")(_VECTOR_ERF, "erf, of vectors too")
    for key, value in (
        ("TVectorizable", True),
        ("TScriptPrinterName", "erf"),
        ("TCallEffectKind", tvm.ir.Op.get("tirx.erf").get_attr("TCallEffectKind")),
    ):
        tvm.ir.register_op_attr(_VECTOR_ERF, key, value)
    tirx.register_intrin_lowering(_VECTOR_ERF, target="llvm", f=_lowering(_erf), level=_LEVEL)


def keep_erf_in_vectors(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with erf as an operation that TVM makes vectors of, in a process with `register_vector_math`.

    TVM marks the other functions so. It takes vectors with its own erf apart, of which LLVM makes vectors of 32 bytes;
    to mark that one would change a GPU's code in this process, too.
    """
    vector_erf = tvm.ir.Op.get(_VECTOR_ERF)

    def replaced(call: Call) -> Call:
        if call_name(call) != "tirx.erf" or dtype_of(call) not in ("float32", "float16"):
            return call
        return Call(vector_erf, list(call.args), ret_ty=call.ty)

    kept = {
        var: func.with_body(tvm_ffi.structural_map(func.body, (Call, replaced)))
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and "tirx.erf" in call_names(func.body)
    }
    if not kept:
        return mod
    return tvm.IRModule({**dict(mod.functions_items()), **kept}, attrs=mod.attrs, global_infos=mod.global_infos)


class _Lanes:
    """Constants and bindings of one vector width, so that the functions below read like arithmetic."""

    def __init__(self, lanes: int) -> None:
        self.float = "float32" if lanes == 1 else f"float32x{lanes}"
        self.int = "int32" if lanes == 1 else f"int32x{lanes}"
        self._bound: list[tuple[tirx.Var, Expr]] = []

    def const(self, value: float) -> Expr:
        return tirx.const(value, self.float)

    def bind(self, name: str, value: Expr) -> tirx.Var:
        """Name a value that is used more than once."""
        var = tirx.Var(name, value.ty)
        self._bound.append((var, value))
        return var

    def close(self, value: Expr) -> Expr:
        """Wrap a value in the bindings made so far."""
        for var, bound in reversed(self._bound):
            value = tirx.Let(var, bound, value)
        return value

    def horner(self, coefficients: Sequence[float], x: Expr) -> Expr:
        """Return c0 + c1 x + c2 x^2 + ..."""
        result = self.const(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            result = result * x + self.const(coefficient)
        return result


def _lowering(function: Callable[[_Lanes, Expr], Expr]) -> Callable[[Call], Expr]:
    """Return the lowering rule for a function: float32 and float16 are rewritten, other types keep TVM's own rule."""

    def lower(call: Call) -> Expr:
        dtype = DataType(call.ty.dtype)
        if not str(dtype).startswith(("float32", "float16")):
            return _scalar_call(call, dtype)
        lanes = _Lanes(dtype.lanes)
        argument = call.args[0]
        if dtype.bits == 16:
            argument = tirx.Cast(lanes.float, argument)
        value = lanes.close(function(lanes, lanes.bind("x", argument)))
        return tirx.Cast(str(dtype), value) if dtype.bits == 16 else value

    return lower


def _exp(v: _Lanes, x: Expr) -> Expr:
    n = v.bind("n", tirx.floor(x * v.const(_LOG2_E) + v.const(0.5)))
    # 2**n goes into the exponent by an addition of integers: n reaches 128, which no float32 factor holds.
    power = tirx.shift_left(tirx.Cast(v.int, n), tirx.const(23, v.int))
    scaled = tirx.reinterpret(v.float, tirx.reinterpret(v.int, _exp_of_rest(v, x, n)) + power)
    # NaN is not at most the highest: it comes out of the sum, as infinity does.
    within = tirx.Select(x < v.const(_EXP_LOW), v.const(0.0), scaled)
    return tirx.Select(x <= v.const(_EXP_HIGH), within, x + v.const(float("inf")))


def _exp_of_rest(v: _Lanes, x: Expr, n: Expr) -> Expr:
    """Return exp(x - n ln 2), for an n that leaves at most half of ln 2."""
    r = v.bind("r", (x - n * v.const(_LN2_HIGH)) - n * v.const(_LN2_LOW))
    return v.horner(_EXP, r) * (r * r) + r + v.const(1.0)


def _exp_within(v: _Lanes, x: Expr) -> Expr:
    """Return exp(x) for an |x| below 87 or NaN: nothing to clamp, and one factor 2**n does."""
    n = v.bind("n", tirx.floor(x * v.const(_LOG2_E) + v.const(0.5)))
    # 2**n by the bits of a float32: n is in [-126, 127].
    bits = tirx.shift_left(tirx.Cast(v.int, n) + tirx.const(127, v.int), tirx.const(23, v.int))
    return _exp_of_rest(v, x, n) * tirx.reinterpret(v.float, bits)


def _erf(v: _Lanes, x: Expr) -> Expr:
    t = v.bind("t", tirx.abs(x))
    s = v.bind("s", x * x)
    small = v.horner(_ERF_SMALL, s) * x + x
    bounded = v.bind("bounded", tirx.Select(t > v.const(_ERF_ONE), v.const(_ERF_ONE), t))
    exponent = v.bind("exponent", v.const(0.0) - (v.horner(_ERF_LARGE, bounded) * bounded + bounded))
    large = v.bind("large", v.const(1.0) - _exp_within(v, exponent))
    signed = tirx.Select(x < v.const(0.0), v.const(0.0) - large, large)
    return tirx.Select(t < v.const(_ERF_SPLIT), small, signed)


def _tanh(v: _Lanes, x: Expr) -> Expr:
    t = v.bind("t", tirx.abs(x))
    s = v.bind("s", x * x)
    small = v.horner(_TANH, s) * s * x + x
    bounded = v.bind("bounded", tirx.Select(t > v.const(_TANH_ONE), v.const(_TANH_ONE), t))
    doubled = v.bind("doubled", bounded + bounded)
    large = v.bind("large", v.const(1.0) - v.const(2.0) / (_exp_within(v, doubled) + v.const(1.0)))
    signed = tirx.Select(x < v.const(0.0), v.const(0.0) - large, large)
    return tirx.Select(t < v.const(_TANH_SPLIT), small, signed)


def _sigmoid(v: _Lanes, x: Expr) -> Expr:
    negated = v.bind("negated", v.const(0.0) - x)
    return v.const(1.0) / (v.const(1.0) + _exp(v, negated))


def _sinh(v: _Lanes, x: Expr) -> Expr:
    t = v.bind("t", tirx.abs(x))
    s = v.bind("s", x * x)
    small = v.horner(_SINH, s) * s * x + x
    half = _half_exp(v, t)
    large = v.bind("large", half - v.const(0.25) / half)
    return tirx.Select(t < v.const(_SINH_SPLIT), small, tirx.Select(x < v.const(0.0), v.const(0.0) - large, large))


def _cosh(v: _Lanes, x: Expr) -> Expr:
    half = _half_exp(v, v.bind("t", tirx.abs(x)))
    return half + v.const(0.25) / half


def _half_exp(v: _Lanes, t: Expr) -> Expr:
    """Return exp(t) / 2, which is finite where exp(t) is not any more."""
    root = v.bind("root", _exp(v, v.bind("halved", t * v.const(0.5))))
    return v.bind("half", root * v.const(0.5) * root)


def _lower_power(call: Call) -> Expr:
    """Return a product for the small whole exponents of norms and GELU, LLVM's `pow` for every other."""
    base, exponent = call.args
    value = exponent.value if isinstance(exponent, tirx.Broadcast) else exponent
    power = float(value.value) if isinstance(value, tirx.FloatImm | tirx.IntImm) else None
    if power not in (1.0, 2.0, 3.0, 4.0):
        return tirx.call_llvm_pure_intrin(call.ty, "llvm.pow", base, exponent)
    x = tirx.Var("x", base.ty)
    square = tirx.Var("square", base.ty)
    product = {1.0: x, 2.0: square, 3.0: square * x, 4.0: square * square}[power]
    return tirx.Let(x, base, tirx.Let(square, x * x, product))


def _scalar_call(call: Call, dtype: DataType) -> Expr:
    """Return what TVM's own rule would make of a float64: the function of libm, called for each lane of a vector."""
    name = str(call.op.name).removeprefix("tirx.")
    if name == "sigmoid":
        one = tirx.const(1.0, str(dtype))
        return one / (one + tirx.exp(-call.args[0]))
    if dtype.lanes == 1:
        return tirx.call_pure_extern(call.ty, name, *call.args)
    scalar = str(dtype).partition("x")[0]
    lanes = [
        tirx.call_pure_extern(scalar, name, *(tirx.Shuffle([argument], [lane]) for argument in call.args))
        for lane in range(dtype.lanes)
    ]
    return tirx.Shuffle(lanes, list(range(dtype.lanes)))
