"""Partial sums that blocks hand over to others through global memory, and the flags that say when they are there.

Sums, 4 accumulators each, and flags are variables of the module, zero when it is loaded, which all kernels of a module
that have the same sizes share: launches of such kernels must follow each other, as those in one stream do (with
dependent launch too: they are touched after griddepcontrol.wait alone). One module in two streams at a time would mix
up their sums, as it would what else an artifact keeps in memory of its own (`pipeline.artifact.module.Module` lets
calls take turns). A wait of seconds, which only that can cause, ends the launch with an error.

A warp sets its flag where it has written its sums; who has read them clears it for the next launch. Release and
acquire: PTX ISA 9.0, "Memory Consistency Model".

Blocks that share the sum of a tile each have a run of it, the last one of them writes. The others hand their sums over;
the last one adds them to its own in a fixed order, so that results are the same in every bit from run to run. It waits
for blocks of lower numbers alone, which wait for none, and blocks start in the order of their numbers: no wait is for
ever, however few run at a time. (CUDA promises no order; where all blocks run at a time, none is needed.) `SplitSum` is
that for matmuls whose blocks have equal runs of K.

    sums       [blocks, accumulators / 4, threads] of 4 accumulators
    flags      [blocks, warps]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T

# Each function's source has all of them: the guard keeps one copy, in whatever order a module's kernels call them.
_SOURCE = """
#ifndef {name}_defined
#define {name}_defined
__device__ {type}4 {name}_sums[{sums}];
__device__ unsigned {name}_flags[{flags}];
__forceinline__ __device__ void {name}_put(int at, {type} a, {type} b, {type} c, {type} d) {{
  __stcg({name}_sums + at, make_{type}4(a, b, c, d));
}}
__forceinline__ __device__ void {name}_add(int at, {scalar}& a, {scalar}& b, {scalar}& c, {scalar}& d) {{
  {type}4 sum = __ldcg({name}_sums + at);
  a += sum.x; b += sum.y; c += sum.z; d += sum.w;
}}
__forceinline__ __device__ void {name}_get(int at, {scalar}& a, {scalar}& b, {scalar}& c, {scalar}& d) {{
  {type}4 sum = __ldcg({name}_sums + at);
  a = sum.x; b = sum.y; c = sum.z; d = sum.w;
}}
__forceinline__ __device__ void {name}_set(int flag) {{
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(__cvta_generic_to_global({name}_flags + flag)) : "memory");
}}
__forceinline__ __device__ void {name}_await(int flag) {{
  unsigned found = 0;
  for (int polls = 0; found == 0; ++polls) {{
    if (polls == {polls}) __trap();
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(found) : "l"(__cvta_generic_to_global({name}_flags + flag)) : "memory");
  }}
}}
__forceinline__ __device__ void {name}_clear(int flag) {{
  __syncwarp();
  if (threadIdx.x % 32 == 0) {name}_flags[flag] = 0;
}}
#endif
"""
# Each takes half a microsecond or more.
_POLLS_MAX = 1 << 22
_WARP = 32
_TYPES = {"float32": ("float", "float"), "uint32": ("uint", "unsigned")}


class SumsExchange:
    """Emits calls of `put`, `get` and `add` of 4 accumulators at a place, and of `set`, `await` and `clear` of a flag.

    `register` is the dtype of an accumulator; there are so many `sums` (of 4), and a flag for each of `warps` of each
    of `blocks`. `thread` is of the block.
    """

    def __init__(self, register: str, sums: int, blocks: int, warps: int, thread: tirx.Expr) -> None:
        self._warps, self._thread, flags = warps, thread, blocks * warps
        self._name = f"relaxtune_stream_{register}_{sums}_{flags}"
        kind, scalar = _TYPES[register]
        self._source = _SOURCE.format(
            name=self._name, type=kind, scalar=scalar, sums=sums, flags=flags, polls=_POLLS_MAX
        )

    def call(self, function: str, *arguments: tirx.Expr) -> None:
        """Emit a call of a function by a warp."""
        T.evaluate(T.cuda.func_call(f"{self._name}_{function}", *arguments, source_code=self._source))

    def flag(self, function: str, block: tirx.Expr) -> None:
        """Emit a call that sets, awaits or clears this warp's flag of a block."""
        self.call(function, block * self._warps + self._thread // _WARP)

    def publish(self, block: tirx.Expr, move: Callable[[str, tirx.Expr], None]) -> None:
        """Emit the handing over of a block's sums, which `move` puts."""
        move("put", block)
        self.flag("set", block)

    def add(self, block: tirx.Expr, helpers: tirx.Expr | int, move: Callable[[str, tirx.Expr], None]) -> None:
        """Emit the adding of what `helpers` blocks before this one have, the nearest first; `move` adds one's sums."""
        with T.serial(helpers, unroll=False) as number:
            helper = block - 1 - number
            self.flag("await", helper)
            move("add", helper)
            self.flag("clear", helper)


class SplitSum:
    """Emits the exchange of the sums of a tile of a matmul into the current IRBuilder, the nearest first.

    `split` neighbours of the grid's `blocks` blocks share a sum; `thread` is one of a block's `threads`.
    """

    def __init__(self, split: int, blocks: int, threads: int, thread: tirx.Expr, block: tirx.Expr) -> None:
        self._split, self._blocks, self._threads = split, blocks, threads
        self._thread, self._block = thread, block

    @contextmanager
    def of_the_last(self, accumulators: tirx.Var, count: int) -> Iterator[None]:
        """Emit the handing over of a thread's `count` accumulators, a multiple of 4.

        The last block runs the body, with all sums.
        """
        self._fours = count // 4
        sums, warps = self._blocks * self._fours * self._threads, self._threads // _WARP
        self._exchange = SumsExchange(str(accumulators.ty.dtype), sums, self._blocks, warps, self._thread)

        def move(function: str, block: tirx.Expr) -> None:
            for four in range(self._fours):
                at = (block * self._fours + four) * self._threads + self._thread
                self._exchange.call(function, at, *(accumulators[4 * four + index] for index in range(4)))

        with T.If(self._block % self._split < self._split - 1):
            with T.Then():
                self._exchange.publish(self._block, move)
            with T.Else():
                self._exchange.add(self._block, self._split - 1, move)
                yield
