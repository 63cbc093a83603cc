"""How a thread that makes neighbouring elements of the last axis reads what they depend on.

A thread makes `lanes` elements whose last index is `vector * lanes + lane`. Of each load it is found here whether all
lanes read one element, neighbouring ones (as one access of up to 16 bytes, as far as the index is a multiple of its
width), or each its own. A load in one side of a branch is made only where the branch is taken, which is decided once
for all lanes where the condition allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad
from tvm_ffi import StructuralKey

from relaxtune.schedules.tir.blocks import element_bytes
from relaxtune.schedules.tir.dataflow import Dataflow
from relaxtune.schedules.tir.expressions import (
    constant_value,
    depends_on,
    dtype_of,
    is_branch,
    ranged_analyzer,
    rebuild,
    substitute,
)

VECTOR_BYTES = 16

# A condition, and whether it has to hold or not.
Guard = tuple[tirx.Expr, bool]


@dataclass(frozen=True, eq=False)
class Access:
    """One load, for all lanes of a thread."""

    # The tensor that is read, and its elements.
    buffer: tirx.Var
    dtype: str
    width: int  # Elements that one instruction reads: 0 when one element serves all lanes.
    # Of the first lane alone where one element serves all or lanes are neighbours, else of each; over the outer axes,
    # `vector`, and the variables of `inner`.
    indices: tuple[tirx.Expr, ...]
    # Under which the load is made, none where it always is; one for all lanes or one a lane, like `indices`.
    conditions: tuple[tirx.Expr, ...]
    # A variable in `indices` or `conditions` -> the load, and its lane, that it stands for.
    inner: Mapping[tirx.Var, tuple[Access, int]]
    per_row: bool  # Whether it is the same for all vectors of a row.

    @property
    def scattered(self) -> bool:
        """Whether each lane reads by itself."""
        return self.width == 1 and len(self.indices) > 1


class Accesses:
    """The loads of a function's expressions, inner ones before those whose index needs them.

    `vector` is the variable of the vector's position: elements `vector * lanes` to `vector * lanes + lanes - 1` of the
    last axis. `found` has the accesses in an order in which each can be made.
    """

    def __init__(self, flow: Dataflow, lanes: int) -> None:
        self.vector = tirx.Var("vector", "int64")
        self.found: list[Access] = []
        self._by_load: dict[tuple[object, ...], Access] = {}
        self._flow, self._lanes = flow, lanes
        outer = [(axis.var, axis.size) for axis in flow.axes[:-1]]
        self._analyzer = ranged_analyzer([*outer, (self.vector, flow.columns.size // lanes)])
        for expr in flow.expressions():
            self._note_all(expr, ())

    def of(self, load: TensorLoad, guards: Sequence[Guard]) -> Access:
        """Return the access that makes a load in the expressions under the branches around it."""
        found = self._known(load, guards)
        if found is None:
            raise KeyError(f"{load} is no load of these expressions under {len(guards)} branches")
        return found

    def _known(self, load: TensorLoad, guards: Sequence[Guard]) -> Access | None:
        """Return the access that makes a load under all or the outer ones of some branches."""
        keys = (_key(load, guards[:count]) for count in range(len(guards) + 1))
        return next((self._by_load[key] for key in keys if key in self._by_load), None)

    def needed(self, expr: tirx.Expr) -> list[Access]:
        """Return the accesses that one of the expressions depends on, in an order in which each can be made."""
        wanted: set[Access] = set()

        def want(access: Access) -> None:
            wanted.add(access)
            for inner, _ in access.inner.values():
                want(inner)

        for load, guards in guarded_loads(expr):
            want(self.of(load, guards))
        return [access for access in self.found if access in wanted]

    def simplify(self, expr: tirx.Expr) -> tirx.Expr:
        """Return a simpler expression over the outer axes and the vector."""
        return self._analyzer.simplify(expr)

    def _note_all(self, expr: tirx.Expr, guards: tuple[Guard, ...]) -> None:
        for load, around in guarded_loads(expr, guards):
            if self._known(load, around) is None:
                self._note_all(load.indices[0], around)
                access = self._access(load, around)
                self._by_load[_key(load, around)] = access
                self.found.append(access)

    def _access(self, load: TensorLoad, guards: tuple[Guard, ...]) -> Access:
        flow, lanes = self._flow, self._lanes
        inner: dict[tirx.Var, tuple[Access, int]] = {}
        shared: dict[tuple[Access, int], tirx.Var] = {}

        def at(expr: tirx.Expr, lane: int, around: tuple[Guard, ...]) -> tirx.Expr:
            def named(node: tirx.Expr, around: tuple[Guard, ...]) -> tirx.Expr:
                if isinstance(node, TensorLoad):
                    access = self.of(node, around)
                    # Lanes that share an element share its variable, so that it cancels out of differences.
                    key = (access, lane if access.width else 0)
                    if key not in shared:
                        shared[key] = tirx.Var(f"{node.source.name}_{len(shared)}", dtype_of(node))
                        inner[shared[key]] = access, lane
                    return shared[key]
                if is_branch(node):
                    condition, *sides = node.args
                    guarded = zip(sides, (True, False), strict=True)
                    taken = [named(side, (*around, (condition, holds))) for side, holds in guarded]
                    return Call(node.op, [named(condition, around), *taken], ret_ty=node.ty)
                return rebuild(node, lambda operand: named(operand, around))

            return substitute(named(expr, around), {flow.columns.var: self.vector * lanes + lane})

        conditions: list[list[tirx.Expr]] = []
        around: tuple[Guard, ...] = ()
        for guard in guards:
            found = [at(guard[0], lane, around) for lane in range(lanes)]
            conditions.append(found if guard[1] else [tirx.Not(one) for one in found])
            around = (*around, guard)
        with ExitStack() as scopes:
            simple = [[self._analyzer.simplify(one) for one in each] for each in conditions]
            agreed = all(len({StructuralKey(one) for one in each}) == 1 for each in simple)
            if agreed:
                for each in simple:
                    scopes.enter_context(self._analyzer.constraint_scope(each[0]))
            raw = [at(load.indices[0], lane, guards) for lane in range(lanes)]
            indices = [self._analyzer.simplify(one) for one in raw]
            width = self._width(indices, dtype_of(load)) if agreed else 1
        merged = tuple(tirx.all(*lane) for lane in zip(*simple, strict=True)) if simple else ()
        each_lane = width == 1 and lanes > 1 and not (agreed and self._are_neighbours(indices))
        kept = {var for expr in (*indices, *merged) for var in inner if depends_on(expr, [var])}
        reads = (load, *(condition for condition, _ in guards))
        return Access(
            buffer=load.source,
            dtype=dtype_of(load),
            width=width,
            indices=tuple(indices) if each_lane else tuple(indices[:1]),
            conditions=merged if each_lane else merged[:1],
            inner={var: value for var, value in inner.items() if var in kept},
            per_row=not any(depends_on(one, [flow.columns.var]) for one in reads),
        )

    def _width(self, indices: Sequence[tirx.Expr], dtype: str) -> int:
        """Return the elements that one instruction reads, 0 when all lanes read the same."""
        steps = {constant_value(self._analyzer.simplify(one - indices[0])) for one in indices}
        if steps == {0}:
            return 0
        if not self._are_neighbours(indices):
            return 1
        width = min(self._lanes, VECTOR_BYTES // element_bytes(dtype))
        while width > 1 and constant_value(self._analyzer.simplify(tirx.floormod(indices[0], width))) != 0:
            width //= 2
        return width

    def _are_neighbours(self, indices: Sequence[tirx.Expr]) -> bool:
        return all(
            constant_value(self._analyzer.simplify(one - indices[0])) == lane for lane, one in enumerate(indices)
        )


def guarded_loads(expr: tirx.Expr, guards: tuple[Guard, ...] = ()) -> Iterator[tuple[TensorLoad, tuple[Guard, ...]]]:
    """Yield the outermost loads of an expression with the branches that lead to each, conditions before sides."""
    if isinstance(expr, TensorLoad):
        yield expr, guards
        return
    if is_branch(expr):
        condition, when_true, when_false = expr.args
        yield from guarded_loads(condition, guards)
        yield from guarded_loads(when_true, (*guards, (condition, True)))
        yield from guarded_loads(when_false, (*guards, (condition, False)))
        return
    operands: list[tirx.Expr] = []

    def note(operand: tirx.Expr) -> tirx.Expr:
        operands.append(operand)
        return operand

    rebuild(expr, note)
    for operand in operands:
        yield from guarded_loads(operand, guards)


def _key(load: TensorLoad, guards: Sequence[Guard]) -> tuple[object, ...]:
    return (StructuralKey(load), *((StructuralKey(condition), holds) for condition, holds in guards))
