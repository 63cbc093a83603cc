"""Blocks of keys, or of values, in shared memory; those of caches that grow are written from there (`template.py`).

Each thread writes what it has copied to shared memory to the grown cache too: positions of the cache before, and new
ones. One thread block works on each head of K and V (with `split`, on some of its blocks of keys), so that every
element is read and written once.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.attention.sizes import flat_view
from relaxtune.schedules.templates.attention.tiles import Tile, named
from relaxtune.schedules.templates.attention_sm80.plan import AttentionPlan
from relaxtune.schedules.templates.attention_sm80.row_copies import Only, RowCopies
from relaxtune.schedules.templates.emit.registers import when


class KeyBlocks:
    """Emits the copies of K, or of V, into the current IRBuilder.

    `role` is "key" or "value", `tile` [stages, elements] in shared memory, `at` the tile of queries; `thread` is of the
    block, `params` are the kernel's.
    """

    def __init__(
        self, plan: AttentionPlan, role: str, tile: tirx.Var, at: Tile, thread: tirx.Expr, params: list[tirx.Var]
    ) -> None:
        self._plan, self._at = plan, at
        ages = ("",) if plan.spec.growth is None else ("", "past ", "new ")
        self._tensors = {age: _Positions(plan, age + role, tile, at, thread, params) for age in ages}

    def load(self, step: tirx.Expr, stage: tirx.Expr | int) -> None:
        """Emit the copies of the tile's `step`-th block of keys to a stage of shared memory."""
        first, growth = self._first(step), self._plan.spec.growth
        if growth is None:
            self._tensors[""].load(stage, first, self._limit(first))
            return
        cached = growth.past - first
        with when([cached >= self._plan.parameters.block_k]):
            self._tensors["past "].load(stage, first, None)
        with when([cached < self._plan.parameters.block_k]):
            self._tensors["past "].load(stage, first, None, lambda row: [row < cached])
            self._tensors["new "].load(stage, -cached, self._limit(first), lambda row: [row >= cached])

    def keep(self, step: tirx.Expr, stage: tirx.Expr | int) -> None:
        """Emit the writing of a block of a cache that grows, of what this thread loaded and has waited for."""
        if self._plan.spec.growth is not None:
            first = self._first(step)
            self._tensors[""].store(stage, first, self._limit(first))

    def _first(self, step: tirx.Expr) -> tirx.Expr:
        return (self._at.first_block + step) * self._plan.parameters.block_k

    def _limit(self, first: tirx.Expr) -> Size | None:
        return None if self._plan.whole_blocks else self._plan.spec.keys - first


class _Positions:
    """Emits the copies of some positions of one tensor, all of them from a `first` one on."""

    def __init__(
        self, plan: AttentionPlan, role: str, tile: tirx.Var, at: Tile, thread: tirx.Expr, params: list[tirx.Var]
    ) -> None:
        layout, columns = plan.spec.layouts()[role], plan.spec.width(role)
        self._tile, self._stride = tile, layout.position_stride
        width = plan.value_width if role.endswith("value") else plan.width
        memory = flat_view(params[layout.param])
        self._copies = RowCopies(memory, plan.threads, thread, plan.parameters.block_k, width, columns)
        start = at.batch * layout.batch_stride + at.kv_head * layout.head_stride + layout.offset
        self._start = named(role.replace(" ", "_") + "_start", start)

    def load(self, stage: tirx.Expr | int, first: tirx.Expr, limit: Size | None, only: Only | None = None) -> None:
        self._copies.load(self._place(stage), self._row(first), limit, only)

    def store(self, stage: tirx.Expr | int, first: tirx.Expr, limit: Size | None) -> None:
        self._copies.store(self._place(stage), self._row(first), limit)

    def _place(self, stage: tirx.Expr | int) -> Callable[[tirx.Expr], tirx.Expr]:
        return lambda place: self._tile.ptr_to([stage, place])

    def _row(self, first: tirx.Expr) -> Callable[[tirx.Expr], tirx.Expr]:
        return lambda row: self._start + (first + row) * self._stride
