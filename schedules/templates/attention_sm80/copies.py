"""Copies of rows of Q, K and V between global and shared memory by all threads of a block; see `template.py`.

`TileChunks` says which thread copies what. Zeros stand for positions and columns that do not exist.

Caches that grow are written from shared memory: each thread writes what it has copied there to the grown cache too,
positions of the cache before and new ones. One thread block works on each head of K and V (with `split`, on some of its
blocks of keys), so that every element is read and written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.sizes import Size
from relaxtune.schedules.templates.attention.sizes import flat_view
from relaxtune.schedules.templates.attention.tiles import Tile
from relaxtune.schedules.templates.attention_sm80.plan import AttentionPlan
from relaxtune.schedules.templates.emit.async_copy import TileChunks
from relaxtune.schedules.templates.emit.registers import in_register, load_vector, store_vector, when
from relaxtune.schedules.templates.emit.tensor_cores import CHUNK

# The conditions under which a row is copied.
Only: TypeAlias = "Callable[[tirx.Expr], list[tirx.Expr]]"
# Chunks that a thread reads from shared memory before it writes them: a wait for each would be as long.
_STORED_TOGETHER = 4


class RowCopies:
    """Emits the copies of tiles of rows into the current IRBuilder.

    `tile` returns the address of an element of a stage in shared memory, `start` the place in `memory`, which is flat
    and global, at which a row starts. `shape` is a tile's: rows, chunks of a row, at most one for each of the threads,
    and the columns that these have.
    """

    def __init__(
        self,
        tile: Callable[[tirx.Expr | int, tirx.Expr], tirx.Expr],
        memory: tirx.Var,
        start: Callable[[tirx.Expr], tirx.Expr],
        shape: tuple[int, int, int],
        threads: int,
        thread: tirx.Expr,
    ) -> None:
        self._tile, self._memory, self._start = tile, memory, start
        rows, self._width, self._columns = shape
        self._chunks = TileChunks(threads, thread, rows, self._width)

    def load(
        self, stage: tirx.Expr | int, first: tirx.Expr | int, limit: Size | None, only: Only | None = None
    ) -> None:
        """Emit the copies of a tile from global memory, of rows from a `first` one on.

        Rows from `limit` on are zeros; None where all exist. Rows for which `only` does not hold are left as they are.
        """

        def find(number: int) -> tuple[tirx.Expr, list[tirx.Expr]]:
            row, exists = self._row(number, limit)
            at = self._start(first + row) + self._chunks.chunk * CHUNK
            # The address has to exist even where nothing is read.
            return tirx.Select(tirx.all(*exists), at, tirx.IntImm("int32", 0)) if exists else at, exists

        some = None if only is None else lambda number: only(self._row(number, limit)[0])
        self._chunks.copy(lambda place: self._tile(stage, place), self._memory, find, some)

    def store(self, stage: tirx.Expr | int, first: tirx.Expr | int, limit: Size | None) -> None:
        """Emit the copies of a tile to global memory, of what this thread copied from there and has waited for."""
        chunks = self._chunks
        for begin in range(0, chunks.count, _STORED_TOGETHER):
            numbers = range(begin, min(begin + _STORED_TOGETHER, chunks.count))
            words = T.alloc_local([4 * len(numbers)], "uint32")
            for turn, number in enumerate(numbers):
                with when(chunks.inside(number)):
                    load_vector("shared", words, self._tile(stage, chunks.place(number)), first=4 * turn)
            for turn, number in enumerate(numbers):
                row, exists = self._row(number, limit)
                with when([*chunks.inside(number), *exists]):
                    target = self._memory.ptr_to([self._start(first + row) + chunks.chunk * CHUNK])
                    store_vector("global", target, words, 4 * turn)

    def _row(self, number: int, limit: Size | None) -> tuple[tirx.Expr, list[tirx.Expr]]:
        """Return the row of a thread's chunk, and the conditions under which the chunk exists in global memory."""
        row = self._chunks.row + number * self._chunks.step
        exists = [] if limit is None else [row < limit]
        if self._columns < self._width * CHUNK:
            exists.append(self._chunks.chunk * CHUNK < self._columns)
        return row, exists


class KeyBlocks:
    """Emits the copies of K, or of V, into the current IRBuilder.

    `role` is "key" or "value", `tile` [stages, elements] in shared memory, `at` the tile of queries; `thread` is of the
    block, `params` are the kernel's.
    """

    def __init__(
        self, plan: AttentionPlan, role: str, tile: tirx.Var, at: Tile, thread: tirx.Expr, params: list[tirx.Var]
    ) -> None:
        self._plan, self._at = plan, at

        def positions(age: str) -> RowCopies:
            layout = plan.spec.layouts()[age + role]
            shape = plan.parameters.block_k, plan.value_width if role == "value" else plan.width, plan.spec.width(role)
            memory = flat_view(params[layout.param])
            start = at.batch * layout.batch_stride + at.kv_head * layout.head_stride + layout.offset
            start = in_register(start, name=f"{age}{role}_start".replace(" ", "_"))
            stride = layout.position_stride
            return RowCopies(address, memory, lambda row: start + row * stride, shape, plan.threads, thread)

        def address(stage: tirx.Expr | int, place: tirx.Expr) -> tirx.Expr:
            return tile.ptr_to([stage, place])

        ages = ("",) if plan.spec.growth is None else ("", "past ", "new ")
        self._tensors = {age: positions(age) for age in ages}

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
