"""The arithmetic of sampling on a CPU, to the same bits as on a GPU; `schedules.functions.sampling` says the formulas.

Expressions are emitted into the current IRBuilder.
"""

from __future__ import annotations

import struct

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions import sampling as rules

_INFINITY = float("inf")


def random(seed: tirx.Expr, position: tirx.Expr) -> tirx.Expr:
    """Return the number of a seed and a position in [0, 1), float64."""

    def whole(value: int) -> tirx.Expr:
        return tirx.const(value, "uint64")

    low, half = whole(2**32 - 1), whole(32)
    position, seed = (T.Bind(tirx.Cast("uint64", one)) for one in (position, seed))
    words, key = [position & low, position >> half, whole(0), whole(0)], [seed & low, seed >> half]
    for _ in range(rules.PHILOX_ROUNDS):
        one, other = (T.Bind(words[2 * at] * whole(factor)) for at, factor in enumerate(rules.PHILOX_MULTIPLIERS))
        mixed = [(other >> half) ^ words[1] ^ key[0], other & low, (one >> half) ^ words[3] ^ key[1], one & low]
        words = [T.Bind(word) for word in mixed]
        key = [T.Bind((own + whole(added)) & low) for own, added in zip(key, rules.PHILOX_KEYS, strict=True)]
    bits = (words[0] >> whole(5)) * whole(2**26) + (words[1] >> whole(6))
    return tirx.Cast("float64", tirx.Cast("int64", bits)) * tirx.const(2.0**-53, "float64")


def single(value: float) -> tirx.Expr:
    """Return a float32 number."""
    return tirx.const(value, "float32")


def long(value: int) -> tirx.Expr:
    """Return an int64 number."""
    return tirx.const(value, "int64")


def multiply_add(a: tirx.Expr, b: tirx.Expr, c: tirx.Expr) -> tirx.Expr:
    """Return a * b + c, rounded once."""
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", a, b, c)


def without_nan(x: tirx.Expr) -> tirx.Expr:
    """Return x, or -inf where it is NaN."""
    # TVM takes `x == x` for true.
    return tirx.Select(x >= single(-_INFINITY), x, single(-_INFINITY))


def difference(x: tirx.Expr, largest: tirx.Expr) -> tirx.Expr:
    """Return d; 0 where both are +inf."""
    return tirx.Select(x == largest, single(0), x - largest)


def mass(d: tirx.Expr) -> tirx.Expr:
    """Return 2**MASS_BITS * exp(d), in the same operations on all devices."""
    d = T.Bind(tirx.max(d, single(rules.LOWEST)))
    rounded = T.Bind(multiply_add(d, single(rules.LOG2_E), single(rules.ROUNDER)))
    n = T.Bind(rounded - single(rules.ROUNDER))
    r = T.Bind(multiply_add(n, single(-rules.LN2_LOW), multiply_add(n, single(-rules.LN2_HIGH), d)))
    polynomial = single(rules.EXP_COEFFICIENTS[-1])
    for coefficient in reversed(rules.EXP_COEFFICIENTS[:-1]):
        polynomial = multiply_add(polynomial, r, single(coefficient))
    exponential = multiply_add(polynomial, r * r, r) + single(1)
    (start,) = struct.unpack("<i", struct.pack("<f", rules.ROUNDER))
    power = tirx.reinterpret("int32", rounded) - tirx.const(start - 127 - rules.MASS_BITS, "int32")
    return exponential * tirx.reinterpret("float32", power << 23)


def whole_mass(d: tirx.Expr) -> tirx.Expr:
    """Return a mass as an integer."""
    return tirx.Cast("int32", mass(d) + single(0.5))


def bin_of(d: tirx.Expr) -> tirx.Expr:
    """Return the bin of d."""
    return tirx.Cast("int32", tirx.min((single(0) - d) * single(rules.STEPS), single(rules.BINS - 1)))


def share(part: tirx.Expr, total: tirx.Expr) -> tirx.Expr:
    """Return the least whole sum that is at least a part of a total, and 1 at least."""
    product = tirx.Cast("float64", part) * tirx.Cast("float64", total)
    return tirx.max(tirx.Cast("int64", tirx.ceil(product)), long(1))
