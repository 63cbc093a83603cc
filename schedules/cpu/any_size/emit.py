"""What kernels of symbolic size begin with: parameters, jobs shared among the cores, places along axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import PrimFunc
from tvm.tirx.script import builder as T

from relaxtune.schedules.sizes import Size
from relaxtune.schedules.tir.blocks import Block, shape_of
from relaxtune.schedules.tir.expressions import substitute

# What LLVM's prefetch is told: to read, into the first or the second cache, data.
INTO_FIRST, INTO_SECOND = (0, 3, 1), (0, 2, 1)


@dataclass(frozen=True)
class View:
    """A tensor that lies in another one: `at` says where each of its places is."""

    buffer: tirx.Var
    at: Callable[[Sequence[tirx.Expr]], list[tirx.Expr]]

    def __getitem__(self, place: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return an element by its place in the view."""
        return self.buffer[tuple(self.at(place))]


Buffers = dict[tirx.Var, tirx.Var | View]


def build_function(func: PrimFunc, emit: Callable[[Buffers], None]) -> PrimFunc:
    """Return a function with the parameters and attributes of another; `emit` gets its buffers by the other's."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        buffers: Buffers = {}
        for param in func.params:
            shape = shape_of(param)
            buffers[param] = T.arg(param.name, param if shape is None else T.Buffer(list(shape), str(param.dtype)))
        emit(buffers)
    made = builder.get().without_attr("global_symbol")
    for key, value in func.attrs.items() if func.attrs else ():
        made = made.with_attr(key, value)
    return made


def share_jobs(sizes: Sequence[Size], body: Callable[[list[tirx.Expr]], object]) -> None:
    """Run a body on all cores for each place of a space, given along each axis."""
    with T.parallel(0, wide(math.prod(sizes))) as job:
        body(places(job, sizes))


def places(number: tirx.Expr, sizes: Sequence[Size]) -> list[tirx.Expr]:
    """Return the place along each axis of the element of that number, the last axis the fastest; in variables."""
    found: list[tirx.Expr] = []
    for count, size in reversed(list(enumerate(sizes))):
        if isinstance(size, int) and size == 1:
            found.append(wide(0))
            continue
        found.append(T.Bind(number % size if count else number))
        number = number // size
    return found[::-1]


def row_buffer(elements: int, dtype: str = "float32") -> tirx.Var:
    """Return a buffer of the current loop. TVM puts one of scope "local" on the heap, however small it is."""
    return T.alloc_buffer([elements], dtype, scope="global")


def load_at(buffers: Buffers, load: TensorLoad, values: Mapping[tirx.Var, tirx.Expr]) -> tirx.Expr:
    """Return what a load of the function reads at a place."""
    return buffers[load.source][tuple(substitute(index, values) for index in load.indices)]


def store_result(
    buffers: Buffers, block: Block, epilogue: Block | None, total: tirx.Expr, values: Mapping[tirx.Var, tirx.Expr]
) -> None:
    """Store what an epilogue makes of the sum of a reduction block at a place, given as values of that block's axes."""
    store, value, at = block.store, total, values
    if epilogue is not None:
        # The epilogue walks the sums in their order.
        at = {own: values[axis] for own, axis in zip(epilogue.axes, block.spatial, strict=True)}
        store = epilogue.store

        def replaced(load: TensorLoad) -> tirx.Expr:
            return total if load.source.same_as(block.store.buffer) else load_at(buffers, load, {})

        value = tvm_ffi.structural_map(substitute(store.value, at), (TensorLoad, replaced))
    T.buffer_store(buffers[store.buffer], value, [substitute(index, at) for index in store.indices])


def unfolded(value: tirx.Expr) -> tirx.Expr:
    """Return a value by way of memory, which LLVM removes: TVM takes minutes to simplify indices made of quotients."""
    kept = T.alloc_buffer([1], "int64", scope="global")
    T.buffer_store(kept, value, [0])
    return kept[0]


def prefetch(place: TensorLoad, purpose: tuple[int, int, int]) -> None:
    """Fetch the line of an element, which may lie past the end of its buffer, into a cache."""
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", T.address_of(place), *map(T.int32, purpose)))


def wide(number: Size) -> tirx.Expr:
    """Return a size or an index as an expression in 64 bits."""
    if isinstance(number, int):
        return tirx.IntImm("int64", number)
    return number if str(number.ty.dtype).startswith("int64") else tirx.Cast("int64", number)
