"""The frame of kernels: parameters, flat views, blocks and threads, dependent launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import (
    BLOCKS_ATTR,
    DEPENDENT_LAUNCH,
    KERNEL_ATTR,
    LAUNCH_ATTR,
    NAMED_ROWS_ATTR,
    ROWS_MAX_ATTR,
    SCHEDULED_ATTR,
    constant_params,
)
from relaxtune.schedules.templates.emit.accesses import Access
from relaxtune.schedules.templates.emit.division import Divisor
from relaxtune.schedules.tir.blocks import Size, element_bytes, narrow, shape_of
from relaxtune.schedules.tir.dataflow import Axis, Dataflow
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.expressions import dtype_of


def shared_pool() -> T.SMEMPool:
    """Return a pool of a kernel's shared memory, as `T.SMEMPool()` makes it, but in a tenth of the time.

    TVM's own, for scripts that are printed, looks at the whole Python stack and the files of its frames.
    """
    memory = T.alloc_buffer([0], "uint8", scope="shared.dyn")
    pool = T.SMEMPool(memory.data)
    pool.buf, pool._owns_buffer = memory, True
    return pool


class Frame:
    """The parameters of a kernel under construction.

    `flat` has the kernel's view of each flat buffer of the function's dataflow, `written` its view of each output
    parameter, by position.
    """

    def __init__(self, func: tirx.PrimFunc, flow: Dataflow, params: Sequence[tirx.Var]) -> None:
        self.flat = {buffer: flat_view(params[position]) for buffer, position in flow.flat.items()}
        self.written = {output.param: flat_view(params[output.param]) for output in flow.outputs}
        constants = constant_params(func)
        self._constant = {buffer for buffer, position in flow.flat.items() if position in constants}

    def is_constant(self, access: Access) -> bool:
        """Whether nothing that any kernel writes decides what a load brings."""
        return access.buffer in self._constant and all(self.is_constant(inner) for inner, _ in access.inner.values())


EmitBody = Callable[[tirx.Expr, tirx.Expr], None]


def build_function(
    func: tirx.PrimFunc,
    threads: int,
    dependent: bool,
    begin: Callable[[list[tirx.Var]], tuple[Size, EmitBody]],
    cluster: int = 1,
) -> tirx.PrimFunc:
    """Return a kernel with the parameters and attributes of the function it computes.

    `begin` gets the kernel's parameters and emits code of the host; it returns the blocks of the grid, of `threads`
    threads each, and what gets the block's and the thread's index and emits the body. `dependent` kernels may start
    before the kernel before has ended; `cluster` blocks share their memory.
    """
    with IRBuilder() as builder, T.prim_func():
        T.func_name("main")
        # Variables of symbolic shapes are the function's own.
        params = [
            T.arg(p.name, p if (shape := shape_of(p)) is None else T.Buffer(list(shape), dtype_of(p)))
            for p in func.params
        ]
        blocks, emit = begin(params)
        T.device_entry()
        block = T.cta_id([blocks])
        if cluster > 1:
            T.cta_id_in_cluster([cluster])
        emit(block, T.thread_id([threads]))
    made = builder.get()
    for key, value in func.attrs.items() if func.attrs else ():
        if key not in (BLOCKS_ATTR, NAMED_ROWS_ATTR, ROWS_MAX_ATTR):
            made = made.with_attr(key, value)
    if dependent:
        made = made.with_attr(LAUNCH_ATTR, [DEPENDENT_LAUNCH])
    return made.with_attr(SCHEDULED_ATTR, True).with_attr(KERNEL_ATTR, True)


def bind_rows(matmul: MatmulFunction) -> MatmulFunction:
    """Return a matmul with its number of rows, where that is symbolic, in a variable of the host code, int32."""
    return matmul if matmul.rows is None else replace(matmul, rows=T.Bind(tirx.Cast("int32", matmul.rows)))


def launch_dependents(dependent: bool) -> None:
    """Emit, in a dependent kernel, that the kernel after it may start from now on."""
    if dependent:
        T.evaluate(T.ptx.griddepcontrol.launch_dependents())


def wait_for_predecessor(dependent: bool, *, launches: bool = True) -> None:
    """Emit, in a dependent kernel, the wait for the kernel before it; with `launches`, the one after it may start."""
    launch_dependents(dependent and launches)
    if dependent:
        T.evaluate(T.ptx.griddepcontrol.wait())


def keep_loads_before() -> None:
    """Emit what parts the loads before it from the loads after it, at no cost.

    ptxas moves instructions to save registers: without this it puts each load of weights right before its product, and
    a warp has 5 loads in flight in place of 32 (sm_80, ptxas 13.5). It moves no load over a warp's meeting.
    """
    T.evaluate(T.cuda.warp_sync())


@lru_cache(maxsize=512)
def tensor_bytes(func: tirx.PrimFunc, rows: int = 1) -> int:
    """Return the bytes of all parameters; of symbolic shapes, about those of so many rows."""
    shapes = [(param, shape) for param in func.params if (shape := shape_of(param)) is not None]
    return sum(
        math.prod(size for size in shape if isinstance(size, int))
        * (1 if all(isinstance(size, int) for size in shape) else rows)
        * element_bytes(dtype_of(param))
        for param, shape in shapes
    )


def unflatten(
    position: tirx.Expr, axes: Sequence[Axis], divisors: Mapping[tirx.Var, Divisor] | None = None
) -> Mapping[tirx.Var, tirx.Expr]:
    """Return the position along each of some axes, the last one the fastest.

    `divisors` are sizes of axes as such; others are divided by as they are.
    """
    places: dict[tirx.Var, tirx.Expr] = {}
    for number, axis in reversed(list(enumerate(axes))):
        divisor = (divisors or {}).get(axis.var, Divisor(narrow(axis.size)))
        quotient, rest = divisor.divide(position) if number else (position, position)
        places[axis.var] = rest
        position = quotient
    return places


def flat_view(param: tirx.Var) -> tirx.Var:
    """Return a flat view of a parameter of the kernel."""
    elements = math.prod(shape_of(param) or ())
    size = max(1, elements) if isinstance(elements, int) else elements
    dtype = dtype_of(param)
    view = T.decl_buffer((size,), "uint8" if dtype == "bool" else dtype, data=param.data)
    IRBuilder.name(str(param.name), view)
    return view


def tile_place(tile: tirx.Expr, tiles_m: Size, tiles_n: int, group: int) -> tuple[tirx.Expr, tirx.Expr]:
    """Return the row and the column, in tiles, of a tile by its number.

    Tiles are counted column by column in groups of `group` rows of tiles; the last group may have fewer. Where the
    number of rows is symbolic, it emits them into registers.
    """
    height = min(group, tiles_m) if isinstance(tiles_m, int) else group
    if height == 1 and isinstance(tiles_m, int):
        return tile // tiles_n, tile % tiles_n
    number, inside = tile // (height * tiles_n), tile % (height * tiles_n)
    rows: tirx.Expr | int = height
    if not isinstance(tiles_m, int) or tiles_m % height:
        rows = tirx.min(height, tiles_m - number * height)
    if isinstance(tiles_m, int):
        return number * height + inside % rows, inside // rows
    # Every address has them. As expressions, which passes put in the place of plain variables, they are a quotient of
    # two unknown numbers each time: of 37 KB of code they made 285 KB.
    place = T.alloc_local([2], "int32")
    T.buffer_store(place, tirx.truncdiv(inside, rows), [1])
    T.buffer_store(place, number * height + inside - place[1] * rows, [0])
    return place[0], place[1]
