"""The loops that list the tokens of a mask on a CPU; on a GPU, `schedules.templates.token_list`."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.cpu.any_size.emit import Buffers, View, build_function, wide
from relaxtune.schedules.marks import SCHEDULED_ATTR


def token_list_loops(func: tirx.PrimFunc, kept: Sequence[int]) -> tirx.PrimFunc:
    """Return the code of a function of (mask, rows, spans, slots, count), which keeps some places of each row.

    It goes through the mask twice: all tokens are counted, then each row's are numbered, those that the mask shows
    first. `relaxtune.models.unpadding.Unpadding` says what it writes.
    """
    return build_function(func, lambda buffers: _emit(buffers, kept)).with_attr(SCHEDULED_ATTR, True)


def _emit(buffers: Buffers, kept: Sequence[int]) -> None:
    mask, rows, spans, slots, count = (one for one in buffers.values() if not isinstance(one, View))
    batch, width = (wide(size) for size in mask.ty.shape)
    start, shown, slot = (T.alloc_buffer([1], "int32", scope="global") for _ in range(3))
    following = T.alloc_buffer([2], "int32", scope="global")

    def is_seen(b: tirx.Expr, s: tirx.Expr) -> tirx.Expr:
        return mask[b, s] if mask.ty.dtype == "bool" else mask[b, s] != tirx.const(0, str(mask.ty.dtype))

    def is_kept(s: tirx.Expr) -> tirx.Expr:
        wanted = [s == wide(place) if place >= 0 else s == width + place for place in kept]
        return tirx.any(*wanted) if wanted else tirx.const(False, "bool")

    def put(at: tirx.Expr, place: tirx.Expr) -> None:
        T.buffer_store(rows, tirx.Cast("int32", place), [at])
        T.buffer_store(spans, start[0], [at, 0])
        T.buffer_store(spans, start[0] + tirx.max(shown[0], 1), [at, 1])

    T.buffer_store(count, 0, [0])
    with T.serial(0, batch) as b, T.serial(0, width) as s, T.If(tirx.any(is_seen(b, s), is_kept(s))), T.Then():
        T.buffer_store(count, count[0] + 1, [0])
    T.buffer_store(following, 0, [1])
    with T.serial(0, batch) as b:
        T.buffer_store(start, following[1], [0])
        T.buffer_store(shown, 0, [0])
        with T.serial(0, width) as s, T.If(is_seen(b, s)), T.Then():
            T.buffer_store(shown, shown[0] + 1, [0])
        T.buffer_store(following, start[0], [0])
        T.buffer_store(following, start[0] + shown[0], [1])
        with T.serial(0, width) as s:
            T.buffer_store(slot, tirx.max(tirx.min(start[0], count[0] - 1), 0), [0])
            for kind, condition in enumerate((is_seen(b, s), tirx.all(tirx.Not(is_seen(b, s)), is_kept(s)))):
                with T.If(condition), T.Then():
                    T.buffer_store(slot, following[kind], [0])
                    T.buffer_store(following, following[kind] + 1, [kind])
                    put(slot[0], b * width + s)
            T.buffer_store(slots, slot[0], [b, s])
    # Behind the last token, the last place.
    with T.serial(wide(count[0]), batch * width) as at:
        put(at, batch * width - 1)
