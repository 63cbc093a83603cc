"""Scale, mask and online softmax of the kernel of `template.py`, on registers.

Of each 8 keys, a thread holds two neighbouring ones of rows `l / 4` and `l / 4 + 8` of its warp's 16 (lane l): the
fragment of wgmma's accumulators (PTX ISA 9.0), whose halves of 2 bytes are the fragment of its operand A.

Of each row it keeps the largest score so far, and its own part of the sum of the weights. A row that has seen no key
has a largest score of -inf; its weights are computed against 0, all exp(-inf) = 0.

Where a warp finds nothing but zeros in a block of a mask to be added, which is most blocks of a mask of padding, it
adds nothing: its products stay plain, and the scale is part of the power's one multiplication.

Where it finds nothing in a mask of padding at all, its tile is made by code of its own, without a mask: 7 % faster
(H200, a Llama's 32 heads of 64 over 2048 positions).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions.attention import AttentionSpec
from relaxtune.schedules.templates.attention.mask import LOG2_E, MINUS_INFINITY, BiasReader
from relaxtune.schedules.templates.attention.padding_search import PaddingSearch
from relaxtune.schedules.templates.attention.tiles import Rows, TilePlan
from relaxtune.schedules.templates.emit.device_function import device_call
from relaxtune.schedules.templates.emit.registers import all_of, in_register, tree, when
from relaxtune.schedules.templates.emit.tensor_cores import MMA_KINDS

# About the lowest finite number.
_LOWEST = -3.0e38

_EXP2 = """
__forceinline__ __device__ float relaxtune_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""
# Error of 1 unit in the last place.
_RECIPROCAL = """
__forceinline__ __device__ float relaxtune_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""
_LANE_XOR = """
__forceinline__ __device__ float relaxtune_lane_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
"""
_PACK = """
__forceinline__ __device__ unsigned relaxtune_pack_KIND(float low, float high) {
  unsigned packed;
  asm("cvt.rn.KINDx2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
"""


def exp2(value: tirx.Expr) -> tirx.Expr:
    """Return 2^value (ex2.approx: relative error 2^-22)."""
    return device_call(_EXP2, value)


def inverse_total(spec: AttentionSpec, total: tirx.Expr) -> tirx.Expr:
    """Return what a row's sum of weighted values is multiplied by: 1 / total; 0 for a guarded row that saw no key."""
    inverse = device_call(_RECIPROCAL, total)
    if not spec.guarded:
        return inverse
    zero = tirx.FloatImm("float32", 0.0)
    return tirx.Select(total == zero, zero, inverse)


def lane_xor(value: tirx.Expr, mask: int) -> tirx.Expr:
    """Return the value of the lane whose number differs by some bits."""
    return device_call(_LANE_XOR, value, tirx.IntImm("int32", mask))


def pack(low: tirx.Expr, high: tirx.Expr, dtype: str) -> tirx.Expr:
    """Return two values of 2 bytes in a word."""
    return device_call(_PACK.replace("KIND", MMA_KINDS[dtype]), low, high)


class OnlineSoftmax:
    """Emits the softmax of one warpgroup into the current IRBuilder.

    `bias` is the kernel's parameter that is added to the scores or masks them, if there is one; `dtype` is the
    weights', `lane` the thread's number in its warp; `searches` says whether `find_nothing` is asked. `highest` has the
    largest score of each row, `total` the sum of its weights.
    """

    def __init__(
        self, plan: TilePlan, bias: tirx.Var | None, dtype: str, lane: tirx.Expr, *, searches: bool = True
    ) -> None:
        self._plan, self._dtype = plan, dtype
        self._bias = None if bias is None else BiasReader(plan, bias, lane)
        searched = searches and bias is not None and PaddingSearch.serves(plan, bias)
        self._search = PaddingSearch(plan, bias, lane) if searched else None
        self._pairs, self._column = plan.parameters.block_k // 8, lane % 4 * 2
        self.highest, self.total, self._used, self._change = (T.alloc_local([2], "float32") for _ in range(4))

    @property
    def unit(self) -> float:
        """Factor from scores to powers of 2."""
        added = None if self._bias is None else self._bias.unit
        return self._plan.spec.scale * LOG2_E if added is None else added

    @property
    def _plain(self) -> bool:
        """Whether nothing is added to the scores: they are plain products."""
        return self._bias is None or self._bias.unit is None

    def find_nothing(self) -> tirx.Expr | None:
        """Return whether there is nothing but zeros in a tile's mask; None where that is not looked for."""
        return None if self._search is None else self._search.found_nothing()

    @contextmanager
    def without_bias(self) -> Iterator[None]:
        """Emit what is inside for a tile whose mask holds nothing."""
        bias, self._bias = self._bias, None
        yield
        self._bias = bias

    def begin(self, rows: Rows) -> None:
        """Emit the state before any key."""
        self._rows = rows
        for row in range(2):
            T.buffer_store(self.highest, MINUS_INFINITY, [row])
            T.buffer_store(self.total, tirx.FloatImm("float32", 0.0), [row])
        if self._search is not None:
            self._search.begin(rows.batch)

    def prefetch(self, block: tirx.Expr) -> None:
        """Emit the reading of a block's bias, which `weigh` uses."""
        if self._bias is not None:
            self._bias.prefetch(block, self._rows)

    def weigh(self, scores: tirx.Var, block: tirx.Expr, masked: tirx.Expr | None) -> None:
        """Emit `scores = exp(scores - highest)` of a block of keys, with the change of the rows' statistics.

        `scores` are registers, with plain products on entry. `masked` is whether some row of the warpgroup does not see
        all of the block; None when that never happens.
        """
        added = None if self._bias is None else self._bias.find_added()
        scale = None
        if added is not None:
            # The factor from what a thread holds of a block to scores: plain products where nothing is added.
            of_products = tirx.FloatImm("float32", self._plan.spec.scale * LOG2_E / self.unit)
            scale = _held(tirx.Select(added, tirx.FloatImm("float32", 1.0), of_products))
        if self._bias is not None:
            with when([] if added is None else [added]):
                self._bias.apply(scores, block, self._rows)
        if masked is not None:
            with T.If(masked), T.Then():
                self._mask(scores, block)
        for row in range(2):
            self._raise_highest(scores, row, scale)
        if self._subtracts:
            with when([] if added is None else [added]):
                for row in range(2):
                    for at in self._places(row):
                        T.buffer_store(scores, scores[at] - self._used[row], [at])
        factor: tirx.Expr | None = None if self.unit == 1.0 else tirx.FloatImm("float32", self.unit)
        if scale is not None:
            factor = scale if factor is None else scale * factor
        for row in range(2):
            # Still to be subtracted from the row's powers of 2; None for nothing.
            less: tirx.Expr | None = None if self._subtracts else self._used[row]
            if self._subtracts and added is not None:
                # Finite, for products of -inf (keys that are not seen).
                lowest = tirx.FloatImm("float32", _LOWEST)
                power = tirx.max(self._used[row] * tirx.FloatImm("float32", self.unit), lowest)
                less = tirx.Select(added, tirx.FloatImm("float32", 0.0), power)
            self._exponentiate(scores, row, factor, less)

    @property
    def _subtracts(self) -> bool:
        """Whether the largest score is subtracted first: a low finite score times log2(e) may be -inf."""
        return not self._plain and self.unit != 1.0

    def _places(self, row: int) -> list[int]:
        """Return a thread's registers of a row's scores, two neighbouring keys after another."""
        return [pair * 4 + row * 2 + index for pair in range(self._pairs) for index in range(2)]

    def rescale(self, output: tirx.Var) -> None:
        """Emit the adaptation of the output so far to the new largest scores."""
        for index, register in enumerate(all_of(output)):
            T.buffer_store(output, register * self._change[index // 2 % 2], [index])

    def convert(self, scores: tirx.Var, weights: tirx.Var) -> None:
        """Emit the weights in 2 bytes, as the fragment of operand A."""
        for word in range(self._pairs * 2):
            T.buffer_store(weights, pack(scores[word * 2], scores[word * 2 + 1], self._dtype), [word])

    def finish(self) -> None:
        """Emit the sum of each row's weights over the four lanes that hold it."""
        for row in range(2):
            for mask in (1, 2):
                T.buffer_store(self.total, self.total[row] + lane_xor(self.total[row], mask), [row])

    def _mask(self, scores: tirx.Var, block: tirx.Expr) -> None:
        spec = self._plan.spec
        here = block * self._plan.parameters.block_k + self._column
        for row in range(2):
            end = in_register(self._rows.end[row] - here)
            first = in_register(self._rows.first[row] - here) if spec.hides_earlier else None
            for number, at in enumerate(self._places(row)):
                key = number // 2 * 8 + number % 2
                seen = end > key if first is None else tirx.all(end > key, first <= key)
                T.buffer_store(scores, tirx.Select(seen, scores[at], MINUS_INFINITY), [at])

    def _raise_highest(self, scores: tirx.Var, row: int, scale: tirx.Expr | None) -> None:
        parts = [] if scale is not None else [self.highest[row]]
        parts += [tirx.max(scores[at], scores[at + 1]) for at in self._places(row)[::2]]
        found = tree(tirx.max, parts)
        highest = T.alloc_local([1], "float32")
        T.buffer_store(highest, found if scale is None else tirx.max(self.highest[row], found * scale), [0])
        for mask in (1, 2):
            T.buffer_store(highest, tirx.max(highest[0], lane_xor(highest[0], mask)), [0])
        unit = tirx.FloatImm("float32", self.unit)
        used = highest[0]
        spec, plan = self._plan.spec, self._plan
        # A row may not have seen any key after a block.
        if self._bias is not None or spec.hides_earlier or plan.parameters.split > 1 or plan.sees_nothing:
            used = tirx.Select(highest[0] == MINUS_INFINITY, tirx.FloatImm("float32", 0.0), highest[0])
        T.buffer_store(self._used, used * unit if self._plain else used, [row])
        if self._plain:
            power = self.highest[row] * unit - self._used[row]
        else:
            # The subtraction comes first: a low finite score times log2(e) may be -inf.
            power = self.highest[row] - self._used[row]
            power = power if self.unit == 1.0 else power * unit
        T.buffer_store(self._change, exp2(power), [row])
        T.buffer_store(self.highest, highest[0], [row])

    def _exponentiate(self, scores: tirx.Var, row: int, factor: tirx.Expr | None, less: tirx.Expr | None) -> None:
        """Emit the weights of a row: 2 to the power of what is there, by a factor, less something; None for neither."""
        factor, less = (None if value is None else _held(value) for value in (factor, less))
        sums = T.alloc_local([2], "float32")
        for number, at in enumerate(self._places(row)):
            power = scores[at] if factor is None else scores[at] * factor
            T.buffer_store(scores, exp2(power if less is None else power - less), [at])
            T.buffer_store(sums, scores[at] if number < 2 else sums[number % 2] + scores[at], [number % 2])
        T.buffer_store(self.total, self.total[row] * self._change[row] + (sums[0] + sums[1]), [row])


def _held(value: tirx.Expr) -> tirx.Expr:
    """Emit the storing of a value in a register of its own, and return that; a constant stays one."""
    return value if isinstance(value, tirx.FloatImm) else in_register(value, "float32")
