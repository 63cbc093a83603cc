"""Copies of 16 bytes from global to shared memory that go on by themselves (cp.async; PTX ISA 9.0, "cp.async").

Copies are counted in groups: a wait is for all groups of the thread but the last ones. Offsets that are known are apart
from the address, so that they become part of the instruction.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.device_function import device_call

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
