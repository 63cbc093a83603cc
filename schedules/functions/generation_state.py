"""Functions that update the state of a generation in place: caches, position, and the tokens so far.

Notation: T visible positions, S new tokens, B sequences, H heads of width D; `position` [1] is the place of the first
new token.

::

    write_caches(caches [T, B, H, D], new [S, B, H, D], position):    cache[position + s] = new[s]
    advance(position, place [B], history [N + 1, B], tokens [B, S], token [B]):
        history[position + S] = token; position = position + S; place = position + 1; tokens[:, 0] = token (S = 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.schedules.sizes import Size, element_at

# TVM's OpPatternKind.kOpaque: fused with nothing.
_OPAQUE = 8
INDEX = "int64"
# Attribute of a function that writes caches in place.
WRITES_CACHES = "relaxtune.writes_caches"


@dataclass(frozen=True)
class Source:
    """Where the new part [S, B, H, D] of a cache lies in a tensor: element (s, b, h, d) at offset + their strides."""

    shape: tuple[Size, ...]  # Of the tensor.
    dtype: str
    offset: Size
    strides: tuple[Size, ...]

    def element(self, tensor: tirx.Var, place: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return an element of the new part."""
        flat = sum((at * stride for at, stride in zip(place, self.strides, strict=True)), start=self.offset)
        return element_at(tensor, self.shape, flat, {})


def write_caches(
    caches: Sequence[Sequence[Size]], dtypes: Sequence[str], new: Sequence[Size], sources: Sequence[Source]
) -> tirx.PrimFunc:
    """Return the function (caches..., tensors..., position) that writes new parts [S, B, H, D] from a position on."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("write_caches")
        T.func_attr({"op_pattern": _OPAQUE, "tirx.noalias": True, WRITES_CACHES: True})
        count = len(caches)
        kept = [T.arg(f"cache_{n}", T.Buffer(list(caches[n]), dtypes[n])) for n in range(count)]
        given = [T.arg(f"new_{n}", T.Buffer(list(sources[n].shape), sources[n].dtype)) for n in range(count)]
        position = T.arg("position", T.Buffer([1], INDEX))
        with T.grid(*new) as loops, T.sblock("write"):
            place = T.axis.remap("SSSS", list(loops))
            for cache, dtype, tensor, source in zip(kept, dtypes, given, sources, strict=True):
                new_part = source.element(tensor, place)
                new_part = new_part if source.dtype == dtype else tirx.Cast(dtype, new_part)
                T.buffer_store(cache, new_part, [position[0] + place[0], *place[1:]])
    return builder.get().without_attr("global_symbol")


def advance(batch: Size, new: Size, capacity: int, *, on_gpu: bool) -> tirx.PrimFunc:
    """Return the function that appends a token of each sequence to the history; with one new token it is the next.

    One thread runs it, of a GPU too: a sequence is a few stores, and the position is written last.
    """
    shapes: dict[str, list[Size]] = {"position": [1], "place": [batch], "history": [capacity + 1, batch]}
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("advance")
        T.func_attr({"op_pattern": _OPAQUE, "tirx.noalias": True, SCHEDULED_ATTR: True})
        shapes |= {"tokens": [batch, new], "token": [batch]}
        position, place, history, tokens, token = (T.arg(name, T.Buffer(shapes[name], INDEX)) for name in shapes)
        with ExitStack() as stack:
            for axis in ("blockIdx.x", "threadIdx.x") if on_gpu else ():
                stack.enter_context(T.thread_binding(0, 1, thread=axis))
            with T.serial(0, batch) as row:
                T.buffer_store(history, token[row], [position[0] + new, row])
                T.buffer_store(place, position[0] + new + 1, [row])
                if new == 1:
                    T.buffer_store(tokens, token[row], [row, 0])
            T.buffer_store(position, position[0] + new, [0])
    return builder.get().without_attr("global_symbol")
