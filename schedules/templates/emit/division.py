"""Division by a symbolic size, in a multiplication and a shift.

::

    n // d  =  n * factor >> shift          0 <= n < 2**31, 0 < d < 2**31
    shift   =  31 + l                       l: the bits of d - 1, so that d <= 2**l
    factor  =  2**shift / d, rounded up

Host code computes factor and shift, once a call. With e = factor * d - 2**shift, which is less than d, the product is
too large by n * e / (d * 2**shift). As n * e < 2**31 * 2**l, that is less than 1 / d: the result is the right integer.

A division as such takes a GPU some 25 instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.registers import in_register
from relaxtune.schedules.tir.blocks import Size, narrow

_BITS, _WIDE_BITS = 31, 64


@dataclass(frozen=True)
class Divisor:
    """A size, int32 where symbolic, with what divides by it; a known one is left to the compiler."""

    size: Size
    factor: tirx.Expr | None = None
    shift: tirx.Expr | None = None

    @classmethod
    def of(cls, size: Size) -> Divisor:
        """Return a size as a divisor; emits code of the host into the current IRBuilder."""
        if isinstance(size, int):
            return cls(size)
        one = tirx.IntImm("int64", 1)
        wide = tirx.max(tirx.Cast("int64", size), one)
        # Results of pure expressions would be computed where they are used, by each thread.
        zeros = T.Bind(tirx.call_llvm_intrin("int64", "llvm.ctlz.i64", wide - one, tirx.const(False, "bool")))
        shift = tirx.IntImm("int64", _BITS + _WIDE_BITS) - zeros
        factor = tirx.truncdiv(tirx.shift_left(one, shift) + wide - one, wide)
        return cls(narrow(size), T.Bind(tirx.call_llvm_intrin("int64", "llvm.smax.i64", factor, one)), shift)

    def divide(self, number: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the quotient and the rest of a number that is not negative, int32; emits code."""
        if self.factor is None or self.shift is None:
            return number // self.size, number % self.size
        number = in_register(number)
        product = _unsigned(number) * _unsigned(self.factor)
        shifted = tirx.shift_right(product, tirx.Cast("uint64", self.shift))
        quotient = in_register(tirx.Cast("int32", shifted))
        return quotient, in_register(number - quotient * self.size)


def _unsigned(number: tirx.Expr) -> tirx.Expr:
    """Return a number of 32 bits in 64: the product of two is one instruction."""
    return tirx.Cast("uint64", tirx.Cast("uint32", number))
