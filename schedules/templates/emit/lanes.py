"""Emit what a thread of a memory-bound kernel does: loads into registers, values of elements, stores.

Half-precision values are computed in float32 and rounded where they are written; roundings in between are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.accesses import VECTOR_BYTES, Access, Accesses, Guard
from relaxtune.schedules.templates.emit.device_function import load_bytes, store_bytes
from relaxtune.schedules.templates.emit.fast_math import fast_call
from relaxtune.schedules.templates.emit.registers import when
from relaxtune.schedules.tir.blocks import element_bytes, narrow
from relaxtune.schedules.tir.dataflow import Dataflow
from relaxtune.schedules.tir.expressions import (
    BINARY,
    UnsupportedExpressionError,
    call_name,
    depends_on,
    dtype_of,
    is_branch,
    rebuild,
)

# Computed in float32.
_HALVES = ("float16", "bfloat16", "float8_e4m3fn")
_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.And, tirx.Or)


class Lanes:
    """Emits one thread's work at one place: some outer position and one vector of the last axis.

    `flow` is what is computed, `accesses` how it is read, by vectors of `count` elements. `buffers` has the kernel's
    buffer for each flat buffer of `flow`, `outer` the position along each axis but the last one, `results` the value of
    each reduction's variable; `vector` is the vector's position along the last axis. Positions are int32.
    """

    def __init__(
        self,
        flow: Dataflow,
        accesses: Accesses,
        count: int,
        buffers: Mapping[tirx.Var, tirx.Var],
        outer: Mapping[tirx.Var, tirx.Expr],
        vector: tirx.Expr,
        results: Mapping[tirx.Var, tirx.Expr],
    ) -> None:
        self._flow, self._accesses, self._count = flow, accesses, count
        self._buffers, self._outer, self._vector, self._results = buffers, outer, vector, results
        self._registers: dict[Access, tirx.Var] = {}

    def share(self, other: Lanes, accesses: Sequence[Access]) -> None:
        """Use the registers of another place for loads that are the same there."""
        for access in accesses:
            self._registers[access] = other._registers[access]

    def load(self, access: Access) -> None:
        """Emit a load; those that its index needs have been emitted."""
        size, count = element_bytes(access.dtype), self._count if access.width else 1
        registers = T.alloc_local([count], _storage(access.dtype))
        self._registers[access] = registers
        source = self._buffers[access.buffer]
        if access.conditions:
            zero = tirx.Cast(dtype_of(registers), tirx.IntImm("int32", 0))
            for place in range(count):
                T.buffer_store(registers, zero, [place])
        width = 1 if access.scattered else max(1, access.width)
        for lane, index in enumerate(access.indices):
            start = self._index(index, access)
            # A condition for all lanes, or one a lane.
            conditions = access.conditions[lane : lane + 1] or access.conditions[:1]
            with when([self._index(condition, access) for condition in conditions]):
                for step in range(0, 1 if access.scattered else count, width):
                    to = registers.ptr_to([lane + step])
                    load_bytes(to, source.ptr_to([start + step]), size * width)

    def value(self, expr: tirx.Expr, lane: int, guards: tuple[Guard, ...] = ()) -> tirx.Expr:
        """Return a lane's value of an expression: float32 where the expression is of half precision."""
        if isinstance(expr, TensorLoad):
            return self._loaded(self._accesses.of(expr, guards), lane)
        if isinstance(expr, tirx.FloatImm):
            return tirx.FloatImm(_computed(dtype_of(expr)), expr.value)
        if isinstance(expr, tirx.IntImm):
            return expr
        if isinstance(expr, tirx.Var):
            if expr in self._results:
                return self._results[expr]
            place = self._places(lane).get(expr)
            # Else it is a symbolic size.
            return expr if place is None else tirx.Cast("int64", place)
        if is_branch(expr):
            condition, when_true, when_false = expr.args
            return tirx.Select(
                self.value(condition, lane, guards),
                self.value(when_true, lane, (*guards, (condition, True))),
                self.value(when_false, lane, (*guards, (condition, False))),
            )
        if isinstance(expr, _COMPARISONS) and _is_of_places(expr):
            return self._narrow(expr, self._places(lane))
        if isinstance(expr, tirx.Cast):
            return _cast(self.value(expr.value, lane, guards), _computed(dtype_of(expr)))
        if isinstance(expr, tirx.Div) and self._is_shared(expr):
            # One division for all lanes.
            one = tirx.FloatImm("float32", 1.0)
            return self.value(expr.a, lane, guards) * (one / self.value(expr.b, lane, guards))
        if isinstance(expr, Call):
            return _call(expr, [self.value(argument, lane, guards) for argument in expr.args])
        return rebuild(expr, lambda operand: self.value(operand, lane, guards))

    def position(self) -> tirx.Expr:
        """Return the flat position of the first lane in the space of all axes."""
        places = self._places(0)
        flat: tirx.Expr = tirx.IntImm("int32", 0)
        for axis in self._flow.axes:
            flat = flat * narrow(axis.size) + places[axis.var]
        return flat

    def store(self, buffer: tirx.Var, index: tirx.Expr, values: Sequence[tirx.Expr], dtype: str) -> None:
        """Emit the rounding of values to a dtype and their writing to neighbouring places of a flat buffer."""
        registers = T.alloc_local([len(values)], _storage(dtype))
        for lane, value in enumerate(values):
            T.buffer_store(registers, _cast(value, _storage(dtype)), [lane])
        size = element_bytes(dtype)
        width = min(VECTOR_BYTES // size, len(values))
        for start in range(0, len(values), width):
            store_bytes(buffer.ptr_to([index + start]), registers.ptr_to([start]), size * width)

    def _loaded(self, access: Access, lane: int) -> tirx.Expr:
        element = self._registers[access][lane if access.width else 0]
        if access.dtype == "bool":
            return tirx.NE(element, tirx.IntImm("uint8", 0))
        return _cast(element, _computed(access.dtype))

    def _is_shared(self, division: tirx.Div) -> bool:
        last = [self._flow.columns.var]
        return (
            _computed(dtype_of(division)) == "float32"
            and not isinstance(division.b, tirx.FloatImm)
            and depends_on(division.a, last)
            and not depends_on(division.b, last)
        )

    def _places(self, lane: int) -> dict[tirx.Var, tirx.Expr]:
        return {**self._outer, self._flow.columns.var: self._vector * self._count + lane}

    def _index(self, index: tirx.Expr, access: Access) -> tirx.Expr:
        """Return an index or a condition of an access in int32."""
        places = {**self._outer, self._accesses.vector: self._vector}
        loaded = {var: self._loaded(inner, lane) for var, (inner, lane) in access.inner.items()}
        return self._narrow(index, places, loaded)

    def _narrow(
        self, expr: tirx.Expr, places: Mapping[tirx.Var, tirx.Expr], loaded: Mapping[tirx.Var, tirx.Expr] | None = None
    ) -> tirx.Expr:
        """Return an integer expression computed in int32 as far as no loaded value has to be compared before."""
        loaded = loaded or {}

        def wide(node: tirx.Expr) -> tirx.Expr:
            if isinstance(node, tirx.Var):
                if node in loaded:
                    return loaded[node]
                return tirx.Cast(dtype_of(node), places[node]) if node in places else node
            return rebuild(node, wide)

        def narrow(node: tirx.Expr) -> tirx.Expr:
            if isinstance(node, tirx.IntImm):
                return node if dtype_of(node) == "bool" else tirx.IntImm("int32", int(node.value))
            if isinstance(node, tirx.Var) and node in places:
                return places[node]
            additive = isinstance(node, (tirx.Add, tirx.Sub, tirx.Mul))
            if additive or (isinstance(node, (*BINARY, tirx.Not)) and not depends_on(node, loaded)):
                return rebuild(node, narrow)
            if isinstance(node, tirx.Cast) and dtype_of(node).startswith("int") and _is_integer(node.value):
                return narrow(node.value)
            whole = wide(node)
            return whole if dtype_of(whole) == "bool" else _cast(whole, "int32")

        return narrow(expr)


def _is_integer(expr: tirx.Expr) -> bool:
    return dtype_of(expr).startswith("int")


def _is_of_places(expr: tirx.Expr) -> bool:
    """Whether an expression is made of integer positions alone."""
    if isinstance(expr, TensorLoad) or not (_is_integer(expr) or dtype_of(expr) == "bool"):
        return False
    if isinstance(expr, (tirx.Var, tirx.IntImm)):
        return True
    if not isinstance(expr, (*BINARY, tirx.Not)):
        return False
    operands = [expr.a] if isinstance(expr, tirx.Not) else [expr.a, expr.b]
    return all(_is_of_places(operand) for operand in operands)


def _call(call: Call, arguments: list[tirx.Expr]) -> tirx.Expr:
    if call_name(call) == "tirx.pow" and isinstance(arguments[1], (tirx.FloatImm, tirx.IntImm)):
        power, x = float(arguments[1].value), arguments[0]
        products = {1.0: lambda: x, 2.0: lambda: x * x, 3.0: lambda: x * x * x, 4.0: lambda: (x * x) * (x * x)}
        if power in products:
            return products[power]()
    return fast_call(Call(call.op, arguments, ret_ty=_computed(dtype_of(call))))


def _cast(value: tirx.Expr, dtype: str) -> tirx.Expr:
    if dtype_of(value) == dtype:
        return value
    if dtype == "bool":
        return tirx.NE(value, tirx.Cast(dtype_of(value), tirx.IntImm("int32", 0)))
    return tirx.Cast(dtype, value)


def _computed(dtype: str) -> str:
    """Return the dtype that values of a dtype are computed in."""
    return "float32" if dtype in _HALVES else dtype


def _storage(dtype: str) -> str:
    """Return the dtype of registers that hold elements as they are in memory."""
    return "uint8" if dtype == "bool" else dtype


def refuse_dtypes(dtypes: Sequence[str]) -> None:
    """Raise where a dtype is none that a kernel loads and stores.

    Raises `UnsupportedExpressionError`: a dtype has less than a byte, or CUDA has no scalar of it.
    """
    integers = ("bool", "int8", "uint8", "int16", "int32", "uint32", "int64")
    known = (*_HALVES, "float32", "float64", *integers)
    for dtype in dtypes:
        if dtype not in known:
            raise UnsupportedExpressionError(f"a tensor is of {dtype}, expected one of {', '.join(known)}")
