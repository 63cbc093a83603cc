"""Copies of 16 bytes from global to shared memory that go on by themselves (cp.async; PTX ISA 9.0, "cp.async").

Copies are counted in groups: a wait is for all groups of the thread but the last ones. Offsets that are known are apart
from the address, so that they become part of the instruction.

`TileChunks` says which chunks of 16 bytes of a tile in shared memory each thread of a block copies: one of every some
rows. Chunks of a row change places, as `tensor_cores.swizzle` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.device_function import device_call
from relaxtune.schedules.templates.emit.registers import when
from relaxtune.schedules.templates.emit.tensor_cores import CHUNK, chunk_place

COPY_BYTES = 16

_COPY = """
__forceinline__ __device__ void {name}(void* to, const void* from, long long offset, int size) {{
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global{prefetch} [%0], [%1], 16, %2;"
               :: "r"(at), "l"(static_cast<const char*>(from) + offset), "r"(size) : "memory");
}}
"""
_COPY_WHERE = """
__forceinline__ __device__ void relaxtune_copy_async_where(int is, void* to, const void* from, long long offset) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("{ .reg .pred is; setp.ne.b32 is, %2, 0; @is cp.async.cg.shared.global [%0], [%1], 16; }"
               :: "r"(at), "l"(static_cast<const char*>(from) + offset), "r"(is) : "memory");
}
"""
_END = """
__forceinline__ __device__ void relaxtune_copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
"""
_WAIT = """
__forceinline__ __device__ void relaxtune_copies_but_{pending}() {{
  asm volatile("cp.async.wait_group {pending};" ::: "memory");
  __syncwarp();
}}
"""
_WAIT_OF_BLOCK = """
__forceinline__ __device__ void relaxtune_copies_of_block_but_{pending}() {{
  asm volatile("cp.async.wait_group {pending};" ::: "memory");
  __syncthreads();
}}
"""


def copy_async(
    to: tirx.Expr, source: tirx.Expr, inside: Sequence[tirx.Expr] = (), offset: int = 0, *, lines: bool = False
) -> None:
    """Emit a copy, of zeros where one of the conditions `inside` does not hold (`source` has to exist there too).

    The addresses `to` and `source` are multiples of 16 bytes; `offset` bytes are added to `source`. With `lines`, the
    L2 cache is asked to fetch whole lines of 128 bytes, which other copies need.
    """
    whole, none = tirx.IntImm("int32", COPY_BYTES), tirx.IntImm("int32", 0)
    size = tirx.Select(tirx.all(*inside), whole, none) if inside else whole
    at = tirx.IntImm("int64", offset)
    name, prefetch = ("relaxtune_copy_async_lines", ".L2::128B") if lines else ("relaxtune_copy_async", "")
    T.evaluate(device_call(_COPY.format(name=name, prefetch=prefetch), to, source, at, size))


def copy_async_where(conditions: Sequence[tirx.Expr], to: tirx.Expr, source: tirx.Expr, offset: int = 0) -> None:
    """Emit a copy by the threads for which all conditions hold; the others leave `to` as it is."""
    T.evaluate(device_call(_COPY_WHERE, tirx.all(*conditions), to, source, tirx.IntImm("int64", offset)))


def end_copies() -> None:
    """Emit the end of a group of copies."""
    T.evaluate(device_call(_END))


def wait_for_copies(pending: int) -> None:
    """Emit the wait for all groups but the last `pending`, and for the warp's other lanes to have waited."""
    T.evaluate(device_call(_WAIT.format(pending=pending)))


def wait_for_copies_of_block(pending: int) -> None:
    """Emit the wait for all groups but the last `pending`, and for all threads of the block to have waited.

    No wait of the warp stands before the wait of the block: the compiler would move other instructions between the two,
    and leave fewer to hide the first loads behind the barrier (GEMM of 4096 cubed, 256 x 128 tiles).
    """
    T.evaluate(device_call(_WAIT_OF_BLOCK.format(pending=pending)))


class Stages:
    """Numbers of stages of a ring in shared memory, in registers: `at`, from `starts` on; all advance together."""

    def __init__(self, depth: int, *starts: int) -> None:
        self._depth = depth
        self._stages = [T.alloc_local([1], "int32") for _ in starts]
        for stage, start in zip(self._stages, starts, strict=True):
            T.buffer_store(stage, start, [0])
        self.at = [stage[0] for stage in self._stages]

    def advance(self) -> None:
        """Emit the step to the next stages."""
        for stage in self._stages:
            following = stage[0] + 1
            wrapped = tirx.Select(following == self._depth, tirx.IntImm("int32", 0), following)
            T.buffer_store(stage, wrapped, [0])


class TileChunks:
    """A thread's chunks of a tile of `rows` rows of `width` chunks of some elements, at most one for each thread.

    `row` and `chunk` are of the first one, the others are `step` rows apart each; `count` is how many there are for a
    thread at most, and `inside` says which exist. `shape` is the tile's, in elements.
    """

    def __init__(
        self, threads: int, thread: tirx.Expr, rows: int, width: int, elements: int = CHUNK, together: int = 1
    ) -> None:
        self._rows, self._width, self.elements, self._together = rows, width, elements, together
        self.shape = rows, width * elements
        self.step = min(threads // width, rows)
        self.count = math.ceil(rows / self.step)
        self.row, self.chunk = thread // width, thread % width
        # Threads that are too few for one more row have nothing to do: they would copy behind the last one.
        self._idle = [thread < self.step * width] if self.step * width < threads else []

    def place(self, number: int) -> tirx.Expr:
        """Return the element of the tile at which a chunk starts."""
        if self.step % 8 == 0:
            # The pattern of rows some eights apart is the same.
            first = self._at(self.row)
            return first + number * (self.step * self._width * self.elements)
        return self._at(self.row + number * self.step)

    def _at(self, row: tirx.Expr) -> tirx.Expr:
        return chunk_place(row, self.chunk, self._width, self.elements, self._together)

    def inside(self, number: int) -> list[tirx.Expr]:
        """Return the conditions under which a chunk exists."""
        ragged = (number + 1) * self.step > self._rows
        return [*self._idle, *([self.row + number * self.step < self._rows] if ragged else [])]

    def copy(
        self,
        to: Callable[[tirx.Expr], tirx.Expr],
        source: tirx.Var,
        find: Callable[[int], tuple[tirx.Expr, list[tirx.Expr]]],
        only: Callable[[int], list[tirx.Expr]] | None = None,
    ) -> None:
        """Emit the copies of a thread's chunks from `source`, flat, to the addresses `to` of elements of the tile.

        `find` gives the place of a chunk in `source` and the conditions under which it is read; else it is zeros. One
        for which `only` does not hold is left as it is.
        """
        for number in range(self.count):
            at, exists = find(number)
            with when([*self.inside(number), *(only(number) if only is not None else [])]):
                copy_async(to(self.place(number)), source.ptr_to([at]), exists, lines=True)
