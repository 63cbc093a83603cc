"""Avoids vector loops that LLVM compiles wrongly: branches beside an index that wraps at a power of two.

A rotary embedding of heads of 8 elements on 16 lanes, say:

    for lane in range(16):  out[lane] = a[lane % 8] if lane % 8 < 4 else b[lane % 8 - 4]

TVM makes a scalar loop of a vector loop whose branch depends on the lane, or that calls a function which TVM has no
vectors of (`isnan`); there, any branch counts. LLVM 22.1, which TVM 0.27 holds, vectorises that with wrong numbers: a
check that `base + lane` does not wrap in 32 bits counts as one that `lane % 8` does not in three, and a vector then
reads on beyond its row (llvm/llvm-project issue 191382, mended by 191498; any CPU). Unrolled lanes leave it no loop,
and their remainders are constants.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Range
from tvm.s_tir import Schedule

from relaxtune.schedules.tir.expressions import call_name, dtype_of, find_all, is_branch, used_vars
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock, loop_extents

# LLVM takes the step of a remainder by 2 for a negative one, and so does not draw the wrong conclusion.
_HARMLESS_DIVISOR = 2


def wraps_by_lane(sch: Schedule, block: ScheduledBlock, lanes: int, first: int) -> bool:
    """Whether a vector of so many lanes becomes a scalar loop in which there are branches and a remainder starts anew.

    The vector runs along the last axis of a canonical block, and on over the axes before, down to the first of them,
    where that is shorter.
    """
    branches = [call.args[0] for call in find_all(block.stmt.body, Call) if is_branch(call)]
    remainders = find_all(block.stmt.body, tirx.FloorMod)
    if not branches:
        return False
    along = _Vector(sch, block, lanes)
    scalar = [*branches, *(call for call in find_all(block.stmt.body, Call) if not _has_vectors(call))]
    moving = {along.lane, *block.axes[first:]}
    if not any(moving & set(used_vars(along.place(one))) for one in scalar):
        return False
    short = along.extent is not None and along.extent < lanes and _can_mislead(along.extent)
    return short or any(_takes_remainder(along.place(remainder), along.lane) for remainder in remainders)


def _has_vectors(call: Call) -> bool:
    """Whether a call may stay one of vectors: TVM says so, `vector_math` makes it arithmetic, or it is a branch."""
    vectorizable = isinstance(call.op, tvm.ir.Op) and call.op.get_attr("TVectorizable")
    narrow_erf = call_name(call) == "tirx.erf" and dtype_of(call) != "float64"
    return bool(vectorizable) or is_branch(call) or call_name(call) == "tirx.reinterpret" or narrow_erf


class _Vector:
    """A vector of a block: `place` writes an expression of the block's iterators as one of the vector's lane."""

    def __init__(self, sch: Schedule, block: ScheduledBlock, lanes: int) -> None:
        extents = loop_extents(sch, block.rv)
        self.extent = extents[-1]
        self._last = block.stmt.iter_vars[-1].var
        dtype = str(self._last.ty.dtype)
        self.lane = tirx.Var("lane", dtype)
        self._analyzer = tvm.sym.Analyzer()
        for iter_var, extent in zip(block.stmt.iter_vars[:-1], extents[:-1], strict=True):
            self._bind(iter_var.var, extent)
        if self.extent is not None and self.extent < lanes:
            self._bind(self.lane, self.extent)
            self._position: tirx.Expr = self.lane
        else:
            start = tirx.Var("start", dtype)
            self._bind(start, None if self.extent is None else -(-self.extent // lanes))
            self._bind(self.lane, lanes)
            self._position = start * tirx.const(lanes, dtype) + self.lane

    def _bind(self, var: tirx.Var, extent: int | None) -> None:
        if extent is not None:
            dtype = str(var.ty.dtype)
            self._analyzer.bind(var, Range(tirx.const(0, dtype), tirx.const(extent, dtype)))

    def place(self, expr: tirx.Expr) -> tirx.Expr:
        def position(var: tirx.Var) -> tirx.Expr:
            return self._position if var.same_as(self._last) else var

        return self._analyzer.simplify(tvm_ffi.structural_map(expr, (tirx.Var, position)))


def _takes_remainder(expr: tirx.Expr, lane: tirx.Var) -> bool:
    """Whether an expression takes the remainder of the lane; of a quotient of it is harmless."""

    def zero(quotient: tirx.FloorDiv) -> tirx.Expr:
        # A quotient does not grow by the same step from lane to lane.
        return tirx.const(0, str(quotient.ty.dtype))

    return any(
        isinstance(remainder.b, tirx.IntImm)
        and _can_mislead(int(remainder.b))
        and lane in used_vars(tvm_ffi.structural_map(remainder.a, (tirx.FloorDiv, zero)))
        for remainder in find_all(expr, tirx.FloorMod)
    )


def _can_mislead(divisor: int) -> bool:
    """Whether LLVM sees a remainder by so much as an integer of few bits."""
    return divisor > _HARMLESS_DIVISOR and divisor & (divisor - 1) == 0
