"""Registers of a thread, and what is done with all of them: values, zeros, sums, reductions, vectors; conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.tir.expressions import dtype_of


def tree(combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr], values: Sequence[tirx.Expr]) -> tirx.Expr:
    """Return values combined pair by pair: a chain would wait for itself."""
    while len(values) > 1:
        pairs = [combine(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = [*pairs, *values[len(values) - len(values) % 2 :]]
    return values[0]


def in_register(value: tirx.Expr, dtype: str = "int32", name: str | None = None) -> tirx.Expr:
    """Emit the storing of a value in a register of its own, which may have a name in the kernel, and return that."""
    register = T.alloc_local([1], dtype)
    if name is not None:
        IRBuilder.name(name, register)
    T.buffer_store(register, value, [0])
    return register[0]


def all_of(registers: tirx.Var) -> list[tirx.Expr]:
    """Return all of some registers."""
    return [registers[index] for index in range(int(registers.ty.shape[0]))]


def clear(registers: tirx.Var, first: int = 0, count: int | None = None) -> None:
    """Emit zeros in registers: in `count` of them from a `first` one on, by default in all."""
    for index in range(int(registers.ty.shape[0]) if count is None else count):
        T.buffer_store(registers, tirx.const(0, dtype_of(registers)), [first + index])


def add_all(sums: tirx.Var, registers: tirx.Var) -> None:
    """Emit the adding of all of some registers to as many others."""
    for index, register in enumerate(all_of(registers)):
        T.buffer_store(sums, sums[index] + register, [index])


_VECTOR_KINDS = {"uint32": "u32", "float32": "f32"}


def load_vector(space: str, registers: tirx.Var, source: tirx.Expr, count: int = 4, first: int = 0) -> None:
    """Emit the load of `count` words from "global" or "shared" memory into registers, from a `first` one on."""
    vector = "" if count == 1 else f".v{count}"
    name = f"ld.{space}{vector}.{_VECTOR_KINDS[dtype_of(registers)]}"
    T.evaluate(T.ptx[name](*(registers[first + index] for index in range(count)), source))


def store_vector(space: str, target: tirx.Expr, registers: tirx.Var, first: int = 0) -> None:
    """Emit the store of 4 words from registers to "global" or "shared" memory."""
    T.evaluate(T.ptx[f"st.{space}.v4.u32"](target, *(registers[first + index] for index in range(4))))


@contextmanager
def when(conditions: Sequence[tirx.Expr]) -> Iterator[None]:
    """Emit what is inside under conditions, or without any if there are none."""
    if not conditions:
        yield
        return
    with T.If(tirx.all(*conditions)), T.Then():
        yield


def repeat(count: tirx.Expr | int, emit: Callable[[tirx.Expr | int], None]) -> None:
    """Emit something for each number below a count: straight code where that is known, else a loop."""
    if isinstance(count, int):
        for number in range(count):
            emit(number)
        return
    with T.serial(count, unroll=False) as number:
        emit(number)
