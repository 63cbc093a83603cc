"""Functions that update the state of a generation in place: caches, position, and the tokens so far.

Notation: T visible positions, S new tokens, B sequences, H heads of width D; `position` [1] is the place of the first
new token.

::

    write_cache(cache [T, B, H, D], new [S, B, H, D], position):    cache[position + s] = new[s]
    advance(position, history [N + 1, B], tokens [B, S], token [B]):    history[position + S] = token; position += S
                                                                    tokens[:, 0] = token                    (S = 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.schedules.sizes import Size

# TVM's OpPatternKind.kOpaque: fused with nothing.
_OPAQUE = 8
INDEX = "int64"


def write_cache(cache: Sequence[Size], new: Sequence[Size], dtype: str) -> tirx.PrimFunc:
    """Return the function that writes new tokens into a cache from a position on."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("write_cache")
        T.func_attr({"op_pattern": _OPAQUE, "tirx.noalias": True})
        kept, added, position = (
            T.arg(name, T.Buffer(list(shape), kind))
            for name, shape, kind in (("cache", cache, dtype), ("new", new, dtype), ("position", [1], INDEX))
        )
        with T.grid(*new) as loops, T.sblock("write"):
            s, *rest = T.axis.remap("SSSS", list(loops))
            T.buffer_store(kept, added[(s, *rest)], [position[0] + s, *rest])
    return builder.get().without_attr("global_symbol")


def advance(batch: Size, new: Size, capacity: int, *, on_gpu: bool) -> tirx.PrimFunc:
    """Return the function that appends a token of each sequence to the history; with one new token it is the next.

    One thread runs it, of a GPU too: a sequence is a store or two, and the position is written last.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("advance")
        T.func_attr({"op_pattern": _OPAQUE, "tirx.noalias": True, SCHEDULED_ATTR: True})
        shapes = {"position": [1], "history": [capacity + 1, batch], "tokens": [batch, new], "token": [batch]}
        position, history, tokens, token = (T.arg(name, T.Buffer(shape, INDEX)) for name, shape in shapes.items())
        with ExitStack() as stack:
            for axis in ("blockIdx.x", "threadIdx.x") if on_gpu else ():
                stack.enter_context(T.thread_binding(0, 1, thread=axis))
            with T.serial(0, batch) as row:
                T.buffer_store(history, token[row], [position[0] + new, row])
                if new == 1:
                    T.buffer_store(tokens, token[row], [row, 0])
            T.buffer_store(position, position[0] + new, [0])
    return builder.get().without_attr("global_symbol")
