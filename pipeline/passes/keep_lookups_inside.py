"""Pass: the one door of all look-ups. A place that data names stays inside its tensor."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.s_tir.analysis import SBlock, get_sblock_read_write_region
from tvm.sym import Analyzer
from tvm.tirx import BufferStore

from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.expressions import dtype_of, find_all, is_zero, without_casts


def keep_lookups_inside(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with each index that depends on data clamped to its axis.

    ::

        y[i] = table[ids[i], j]     ->   y[i] = table[max(min(ids[i], rows - 1), 0), j]

    On a device nobody looks at the values of indices before a kernel does. All converters, the passes before this one
    and TVM's own operators go through here: gathers, scatters, rotary tables, caches. A clamped index costs two
    comparisons. An index that is surely inside stays as it is.
    """
    del state
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for var, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc) and lookups(function):
            result.update_func(var, _clamped(function))
    return result


def lookups(func: tirx.PrimFunc) -> list[TensorLoad | BufferStore]:
    """Return the reads and writes of a function at places that depend on data and may lie outside the tensor."""
    accesses = [*find_all(func.body, TensorLoad), *find_all(func.body, BufferStore)]
    return [one for one in accesses if _places(one) is not None]


def _clamped(func: tirx.PrimFunc) -> tirx.PrimFunc:
    def load(one: TensorLoad) -> tvm.ir.Expr:
        places = _places(one)
        return one if places is None else one.source[places]

    def store(one: BufferStore) -> tirx.Stmt:
        places = _places(one)
        return one if places is None else BufferStore(one.buffer, one.value, list(places))

    def block(one: SBlock) -> SBlock:
        if not one.reads and not one.writes:  # an external operator does not say
            return one
        buffers = {access.source: access.source for access in (*one.reads, *one.writes)}
        reads, writes = get_sblock_read_write_region(one, buffers)
        return SBlock(
            one.iter_vars, reads, writes, one.name_hint, one.body, one.init, one.alloc_buffers, one.match_buffers,
            one.annotations,
        )  # fmt: skip

    return func.with_body(
        tvm_ffi.structural_map(func.body, [(TensorLoad, load), (BufferStore, store), (SBlock, block)])
    )


def _places(access: TensorLoad | BufferStore) -> tuple[tirx.Expr, ...] | None:
    """Return the indices of an access, those that may leave their axis clamped; None where none may."""
    buffer = access.source if isinstance(access, TensorLoad) else access.buffer
    pairs = zip(access.indices, buffer.ty.shape, strict=True)
    places = tuple(inside(index, size) if _may_leave(index, size) else index for index, size in pairs)
    return None if all(map(tvm.ir.Expr.same_as, places, access.indices)) else places


def inside(index: tirx.Expr, size: tirx.Expr) -> tirx.Expr:
    """Return the index kept from 0 to the last place of an axis."""
    dtype = dtype_of(index) if isinstance(size, tirx.IntImm) else dtype_of(size)
    if dtype not in ("int32", "int64"):
        dtype = "int64"
    if dtype_of(index) != dtype:
        index = tirx.Cast(dtype, index)
    last = tirx.const(int(size) - 1, dtype) if isinstance(size, tirx.IntImm) else size - 1
    return tirx.max(tirx.min(index, last), tirx.const(0, dtype))


def _may_leave(index: tirx.Expr, size: tirx.Expr) -> bool:
    """Whether an index depends on data that may put it outside of its axis."""
    if not find_all(index, TensorLoad):
        return False
    bound = Analyzer().const_int_bound(index)
    within = bound.min_value >= 0 and isinstance(size, tirx.IntImm) and bound.max_value < int(size)
    return not within and not _is_clamped(without_casts(index), size)


def _is_clamped(index: tirx.Expr, size: tirx.Expr) -> bool:
    """Whether an index is the greater of 0 and x, x at most the last place of an axis; or the other way around."""
    if not isinstance(index, tirx.Max | tirx.Min):
        return False
    other = tirx.Min if isinstance(index, tirx.Max) else tirx.Max
    bounds = [*(one for one in (index.a, index.b) if not isinstance(one, other))]
    bounds += [bound for one in (index.a, index.b) if isinstance(one, other) for bound in (one.a, one.b)]
    wanted = (0, size - 1) if isinstance(index, tirx.Max) else (size - 1, 0)
    return (
        len(bounds) == 3
        and is_zero(Analyzer().simplify(bounds[0] - wanted[0]))
        and any(is_zero(Analyzer().simplify(bound - wanted[1])) for bound in bounds[1:])
    )
