"""PrimFuncs that call a C function of this folder, and the small kernels of our own around such a call.

A call is host code: it tells the library's handle what to launch on TVM's stream, where kernels before and after it in
the same PrimFunc are launched too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tvm import s_tir, tirx
from tvm.ir.expr import StringImm

from relaxtune.schedules.libraries.vendors import VendorLibrary
from relaxtune.schedules.marks import BLOCKS_ATTR, SCHEDULED_ATTR, SOURCES_ATTR

_THREADS = 256
_ERROR = "RuntimeError"


class LibraryCall:
    """A call of a C function that answers 0 when it is done, and the checks of its answer.

    `arguments` are numbers, strings, and pointers to data; `answers` has a message for each answer besides 0 and 1 (1:
    the library is not there).
    """

    def __init__(
        self, library: VendorLibrary, function: str, arguments: Sequence[tirx.Expr], answers: Mapping[int, str]
    ) -> None:
        self.library = library
        answer = tirx.Var("answer", "int32")
        # The constructor takes them in this order, whatever names its Python signature gives them.
        self.statements: list[tirx.Stmt] = [
            tirx.Bind(answer, tirx.call_extern("int32", function, *arguments)),
            *(
                tirx.AssertStmt(answer != value, StringImm(_ERROR), [StringImm(message)])
                for value, message in {1: library.missing, **answers}.items()
            ),
        ]


def no_pointer() -> tirx.Expr:
    """Return a null pointer."""
    return tirx.reinterpret("handle", tirx.const(0, "uint64"))


def call_alone(func: tirx.PrimFunc, call: LibraryCall) -> tirx.PrimFunc:
    """Return a PrimFunc, its body replaced by a call."""
    return _with_body(func, call, call.statements, [])


def call_on_made(
    func: tirx.PrimFunc, made: tirx.Var, element: Callable[[tirx.Var], tirx.Expr], call: LibraryCall
) -> tirx.PrimFunc:
    """Return a PrimFunc, its body replaced by a kernel that makes a flat buffer, and a call that reads it.

    `made` is the buffer, of one axis, and no parameter of the function; `element` returns its element at a position.
    """
    (size,) = (int(extent) for extent in made.ty.shape)
    blocks = math.ceil(size / _THREADS)
    block, thread = tirx.Var("block", "int32"), tirx.Var("thread", "int32")
    position = block * _THREADS + thread
    store: tirx.Stmt = tirx.BufferStore(made, element(position), [position])
    if size % _THREADS:
        store = tirx.IfThenElse(position < size, store, None)
    kernel = _bound(block, blocks, "blockIdx.x", _bound(thread, _THREADS, "threadIdx.x", store))
    return _with_body(func, call, [kernel, *call.statements], [made])


def call_before(func: tirx.PrimFunc, product: str, call: Callable[[tirx.Var], LibraryCall]) -> tirx.PrimFunc:
    """Return a PrimFunc whose first block is replaced by a call, all that follows made by one kernel of our own.

    `product` is the name of the first block; those after it are elementwise. `call` gets the buffer that the first
    block writes, and returns what fills it.
    """
    schedule = s_tir.Schedule(func)
    root = schedule.get_sblock("root")
    *inner, last = [one for one in schedule.get_child_blocks(root) if schedule.get(one).name_hint != product]
    for one in inner:
        schedule.compute_inline(one)
    fused = schedule.fuse(*schedule.get_loops(last))
    blocks, threads = schedule.split(fused, [None, _THREADS])
    schedule.bind(blocks, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")
    made = schedule.mod["main"]
    block = made.body.block
    (buffer,) = block.alloc_buffers
    library_call = call(buffer)
    return _with_body(made, library_call, [*library_call.statements, *list(block.body.seq)[1:]], [buffer])


def _bound(var: tirx.Var, extent: int, thread: str, body: tirx.Stmt) -> tirx.Stmt:
    axis = tirx.IterVar(None, var, tirx.IterVar.ThreadIndex, thread)
    return tirx.For(var, 0, extent, tirx.ForKind.THREAD_BINDING, body, axis)


def _with_body(
    func: tirx.PrimFunc, call: LibraryCall, statements: Sequence[tirx.Stmt], buffers: Sequence[tirx.Var]
) -> tirx.PrimFunc:
    body = statements[0] if len(statements) == 1 else tirx.SeqStmt(list(statements))
    if buffers:
        root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=list(buffers))
        made = tirx.PrimFunc(func.params, s_tir.SBlockRealize([], True, root), func.ret_type, func.attrs)
    else:
        made = tirx.PrimFunc(func.params, body, func.ret_type, func.attrs).without_attr(BLOCKS_ATTR)
    return made.with_attr(SCHEDULED_ATTR, True).with_attr(SOURCES_ATTR, [call.library.source])
