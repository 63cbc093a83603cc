"""Read the blocks of a PrimFunc: the one reader of TIR that recognisers, rules, signatures and tolerances share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.sizes import Size as Size
from relaxtune.schedules.tir.expressions import constant_value

_LETTERS = {tirx.IterVar.DataPar: "S", tirx.IterVar.CommReduce: "R"}


@dataclass(frozen=True)
class Block:
    """One compute block, and what follows from its statement; `realize` binds its axes to values of loops."""

    realize: SBlockRealize

    @property
    def stmt(self) -> SBlock:
        """The block's statement."""
        return self.realize.block

    @property
    def _iter_vars(self) -> list[tirx.IterVar]:
        # A slice is a list, in a quarter of the time that TVM's own iteration over an array takes.
        return self.stmt.iter_vars[:]  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """The name hint."""
        return str(self.stmt.name_hint)

    @property
    def init(self) -> tirx.BufferStore | None:
        """The start of a reduction; None for other blocks."""
        return self.stmt.init

    @property
    def kinds(self) -> str:
        """One letter an axis: S (data parallel), R (reduction), O (anything else)."""
        return "".join(_LETTERS.get(axis.iter_type, "O") for axis in self._iter_vars)

    @property
    def axes(self) -> tuple[tirx.Var, ...]:
        """The variables of all axes."""
        return tuple(axis.var for axis in self._iter_vars)

    @property
    def spatial(self) -> tuple[tirx.Var, ...]:
        """The variables of the data-parallel axes."""
        return tuple(var for var, kind in zip(self.axes, self.kinds, strict=True) if kind == "S")

    @property
    def reduced(self) -> tuple[tirx.Var, ...]:
        """The variables of the reduction axes."""
        return tuple(var for var, kind in zip(self.axes, self.kinds, strict=True) if kind == "R")

    @property
    def extents(self) -> tuple[int | None, ...]:
        """The sizes of all axes, None where symbolic."""
        return tuple(static_extent(axis.dom.extent) for axis in self._iter_vars)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes of all axes."""
        return tuple(_size(axis.dom.extent) for axis in self._iter_vars)

    @property
    def reduced_sizes(self) -> tuple[int, ...]:
        """The sizes of the reduction axes, which must be static."""
        axes = zip(self._iter_vars, self.kinds, strict=True)
        return tuple(int(axis.dom.extent) for axis, kind in axes if kind == "R")

    @property
    def stores(self) -> tuple[tirx.BufferStore, ...]:
        """The stores of the body, in order; the start of a reduction is not among them."""
        return tuple(stmt for stmt in list_statements(self.stmt.body) if isinstance(stmt, tirx.BufferStore))

    @property
    def store(self) -> tirx.BufferStore:
        """The body of a block that is one assignment (as those of `plain_blocks` are)."""
        return self.stmt.body

    @property
    def is_spatial(self) -> bool:
        """Whether every axis is data parallel."""
        return set(self.kinds) <= {"S"}

    @property
    def is_reduction(self) -> bool:
        """Whether there is a reduction axis and a start, and nothing opaque."""
        return "R" in self.kinds and "O" not in self.kinds and self.init is not None

    def same_as(self, other: Block) -> bool:
        """Whether both are the same block of one function."""
        return bool(self.stmt.same_as(other.stmt))


def list_blocks(func: tirx.PrimFunc) -> list[Block]:
    """Return the compute blocks of a PrimFunc in execution order; the root block and empty blocks are left out."""
    blocks = [block for block in _all_blocks(func) if block.axes or not holds_block(block.stmt)]
    return [block for block in blocks if block.stores]


def plain_blocks(func: tirx.PrimFunc, *, symbolic: bool = False) -> list[Block] | Refusal:
    """Return the blocks of a function as FuseTIR leaves it: one assignment a block, plain loops.

    Shapes are static; with `symbolic` they may hold variables, which may be parameters too.
    """
    if not symbolic and any(static_shape(param) is None for param in func.params):
        return Refusal("a parameter is no tensor of static shape")
    found = _all_blocks(func)
    inner = [block for block in found if block.axes]
    if len(found) - len(inner) != 1 or not inner:
        return Refusal(f"expected blocks under one root, found {len(inner)} under {len(found) - len(inner)}")
    for block in inner:
        values = block.realize.iter_values
        if constant_value(block.realize.predicate) != 1 or not isinstance(block.stmt.body, tirx.BufferStore):
            return Refusal(f"block {block.name} is guarded, or more than one assignment")
        if not all(isinstance(value, tirx.Var) for value in values if constant_value(value) != 0):
            return Refusal(f"block {block.name} is scheduled already: its axes are not plain loops")
        if None in block.extents and not symbolic:
            return Refusal(f"block {block.name} has an axis of symbolic size")
    return inner


def list_statements(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """Yield a statement and all statements inside it, in execution order; the starts of reductions are left out."""
    yield stmt
    for inner in child_statements(stmt):
        yield from list_statements(inner)


def child_statements(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements directly inside one."""
    if isinstance(stmt, tirx.SeqStmt):
        return stmt.seq[:]  # type: ignore[no-any-return]
    if isinstance(stmt, SBlockRealize):
        return [stmt.block]
    if isinstance(stmt, tirx.IfThenElse):
        return [branch for branch in (stmt.then_case, stmt.else_case) if branch is not None]
    body = getattr(stmt, "body", None)
    return [body] if isinstance(body, tirx.Stmt) else []


def is_buffer(param: tirx.Var) -> bool:
    """Return whether a PrimFunc parameter is a buffer, and not a scalar."""
    return isinstance(param.ty, tirx.BufferType)


def written_params(func: tirx.PrimFunc) -> tuple[int, ...]:
    """Return the positions of the parameters that the PrimFunc writes: its outputs."""
    stored = [stmt.buffer for stmt in list_statements(func.body) if isinstance(stmt, tirx.BufferStore)]
    return tuple(
        position for position, param in enumerate(func.params) if any(buffer.same_as(param) for buffer in stored)
    )


def position_of(func: tirx.PrimFunc, buffer: tirx.Var) -> int | None:
    """Return which parameter of the function a buffer is, None when it is none."""
    return next((i for i, param in enumerate(func.params) if param.same_as(buffer)), None)


def static_shape(buffer: tirx.Var) -> tuple[int, ...] | None:
    """Return a buffer's shape when all its sizes are numbers."""
    shape = getattr(buffer.ty, "shape", None)
    if shape is None or not all(isinstance(size, tirx.IntImm) for size in shape):
        return None
    return tuple(int(size) for size in shape)


def shape_of(buffer: tirx.Var) -> tuple[Size, ...] | None:
    """Return a buffer's shape, its numbers as `int`; None for a scalar parameter."""
    shape = getattr(buffer.ty, "shape", None)
    return None if shape is None else tuple(map(_size, shape))


def same_sizes(left: Sequence[Size] | None, right: Sequence[Size] | None) -> bool:
    """Whether two shapes are known and equal."""
    if left is None or right is None or len(left) != len(right):
        return False
    return all(_same_size(one, other) for one, other in zip(left, right, strict=True))


def narrow(size: Size) -> Size:
    """Return a size as code counts in 32 bits: a number as it is, an expression in int32."""
    return size if isinstance(size, int) else tirx.Cast("int32", size)


def is_multiple(size: Size, divisor: int) -> bool:
    """Whether a size is known to be a multiple of a number."""
    if isinstance(size, int):
        return size % divisor == 0
    return constant_value(tirx.floormod(size, tirx.IntImm("int64", divisor))) == 0


def static_extent(extent: tirx.Expr) -> int | None:
    """Return the value of a constant extent, None for a symbolic one."""
    return int(extent) if isinstance(extent, tirx.IntImm) else None


@cache
def element_bytes(dtype: str) -> int:
    """Return the bytes of an element in memory."""
    return max(1, int(tvm.DataType(dtype).bits) // 8)


def buffer_bytes(buffer: tirx.Var) -> int:
    """Return the size in bytes of a buffer of static shape."""
    count = 1
    for dim in buffer.shape:
        count *= int(dim)
    dtype = tvm.DataType(str(buffer.dtype))
    return count * ((int(dtype.bits) * int(dtype.lanes) + 7) // 8)


def _size(extent: tirx.Expr) -> Size:
    return int(extent) if isinstance(extent, tirx.IntImm) else extent


def _same_size(left: Size, right: Size) -> bool:
    if isinstance(left, int) or isinstance(right, int):
        return isinstance(left, int) and isinstance(right, int) and left == right
    return bool(tvm_ffi.structural_equal(left, right))


def _all_blocks(func: tirx.PrimFunc) -> list[Block]:
    return [Block(stmt) for stmt in list_statements(func.body) if isinstance(stmt, SBlockRealize)]


def holds_block(stmt: tirx.Stmt) -> bool:
    """Whether a block stands in a statement."""
    return any(isinstance(inner, SBlockRealize) for inner in list_statements(stmt))
