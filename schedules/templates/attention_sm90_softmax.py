"""Scale, mask and online softmax of the kernel of `schedules.templates.attention_sm90`, on registers.

Of each 8 keys, a thread holds two neighbouring ones of rows `l / 4` and `l / 4 + 8` of its warp's 16 (lane l): the
fragment of wgmma's accumulators (PTX ISA 9.0), whose halves of 2 bytes are the fragment of its operand A.

Of each row it keeps the largest score so far, and its own part of the sum of the weights. A row that has seen no key
has a largest score of -inf; its weights are computed against 0, all exp(-inf) = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from schedules.attention import ScoreBias
from schedules.templates.attention_sm90_plan import AttentionPlan

LOG2_E = math.log2(math.e)
_FLOATS = ("float16", "bfloat16", "float32")
# dtype of a mask -> load of two elements, its registers, their dtype
_PAIR_LOADS = {
    "float16": ("ld.global.u32", 1, "uint32"),
    "bfloat16": ("ld.global.u32", 1, "uint32"),
    "float32": ("ld.global.v2.f32", 2, "float32"),
    "int32": ("ld.global.v2.s32", 2, "int32"),
    "int8": ("ld.global.u16", 1, "uint16"),
    "uint8": ("ld.global.u16", 1, "uint16"),
}
_MINUS_INFINITY = tirx.FloatImm("float32", -math.inf)

_EXP2 = "relaxtune_exp2"
_EXP2_SOURCE = """
__forceinline__ __device__ float relaxtune_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""
_RECIPROCAL = "relaxtune_reciprocal"
_RECIPROCAL_SOURCE = """
__forceinline__ __device__ float relaxtune_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""
_LANE_XOR = "relaxtune_lane_xor"
_LANE_XOR_SOURCE = """
__forceinline__ __device__ float relaxtune_lane_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
"""
_PACK = {"float16": "relaxtune_pack_f16", "bfloat16": "relaxtune_pack_bf16"}
_PACK_SOURCE = """
__forceinline__ __device__ unsigned NAME(float low, float high) {
  unsigned packed;
  asm("cvt.rn.KIND.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
"""
_PACK_KINDS = {"float16": "f16x2", "bfloat16": "bf16x2"}
_UNPACK = {"float16": "relaxtune_unpack_f16", "bfloat16": "relaxtune_unpack_bf16"}
_UNPACK_SOURCE = """
__forceinline__ __device__ float NAME(unsigned packed, int shift) {
  unsigned short half = packed >> shift;
  float value;
  asm("cvt.f32.KIND %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
"""
_UNPACK_KINDS = {"float16": "f16", "bfloat16": "bf16"}


def exp2(value: tirx.Expr) -> tirx.Expr:
    """Return 2^value (ex2.approx: relative error 2^-22)."""
    return T.cuda.func_call(_EXP2, value, source_code=_EXP2_SOURCE, return_type="float32")


def reciprocal(value: tirx.Expr) -> tirx.Expr:
    """Return 1 / value (rcp.approx: error of 1 unit in the last place)."""
    return T.cuda.func_call(_RECIPROCAL, value, source_code=_RECIPROCAL_SOURCE, return_type="float32")


def lane_xor(value: tirx.Expr, mask: int) -> tirx.Expr:
    """Return the value of the lane whose number differs by some bits."""
    return T.cuda.func_call(
        _LANE_XOR, value, tirx.IntImm("int32", mask), source_code=_LANE_XOR_SOURCE, return_type="float32"
    )


def pack(low: tirx.Expr, high: tirx.Expr, dtype: str) -> tirx.Expr:
    """Return two values of 2 bytes in a word."""
    source = _PACK_SOURCE.replace("NAME", _PACK[dtype]).replace("KIND", _PACK_KINDS[dtype])
    return T.cuda.func_call(_PACK[dtype], low, high, source_code=source, return_type="uint32")


@dataclass(frozen=True)
class Rows:
    """The two rows of a thread: their query and head, and the keys they may see (`first <= key < end`)."""

    batch: tirx.Expr
    query: tuple[tirx.Expr, tirx.Expr]
    head: tuple[tirx.Expr, tirx.Expr]
    first: tirx.Var
    end: tirx.Var


class OnlineSoftmax:
    """Emits the softmax of one warpgroup into the current IRBuilder.

    Parameters
    ----------
    plan : AttentionPlan
        Of the kernel.
    bias : Var or None
        The kernel's parameter that is added to the scores or masks them.
    dtype : str
        Of the weights.
    lane : Expr
        Of the thread in its warp.
    """

    def __init__(self, plan: AttentionPlan, bias: tirx.Var | None, dtype: str, lane: tirx.Expr) -> None:
        self._plan = plan
        self._bias = None if bias is None else BiasReader(plan, bias, lane)
        self._dtype = dtype
        self._pairs = plan.parameters.block_k // 8
        self._column = lane % 4 * 2
        # With a bias, scores are scaled before it is added: they count in units of e, else of the plain products.
        self._unit = LOG2_E if bias is not None else plan.spec.scale * LOG2_E
        self._highest, self._total, self._used, self._change = (T.alloc_local([2], "float32") for _ in range(4))

    @property
    def highest(self) -> tirx.Var:
        """Largest score of each row."""
        return self._highest

    @property
    def total(self) -> tirx.Var:
        """Sum of each row's weights."""
        return self._total

    @property
    def unit(self) -> float:
        """Factor from scores to powers of 2."""
        return self._unit

    def begin(self, rows: Rows) -> None:
        """Emit the state before any key."""
        self._rows = rows
        for row in range(2):
            T.buffer_store(self._highest, _MINUS_INFINITY, [row])
            T.buffer_store(self._total, tirx.FloatImm("float32", 0.0), [row])

    def prefetch(self, block: tirx.Expr) -> None:
        """Emit the reading of a block's bias, which `weigh` uses."""
        if self._bias is not None:
            self._bias.read(block, self._rows)

    def weigh(self, scores: tirx.Var, block: tirx.Expr, masked: tirx.Expr | None) -> None:
        """Emit `scores = exp(scores - highest)` of a block of keys, with the change of the rows' statistics.

        Parameters
        ----------
        scores : Var
            Registers; plain products on entry.
        block : Expr
            Which block of keys.
        masked : Expr or None
            Whether some row of the warpgroup does not see all of the block; None when that never happens.
        """
        if self._bias is not None:
            self._bias.apply(scores)
        if masked is not None:
            with T.If(masked), T.Then():
                self._mask(scores, block)
        for row in range(2):
            self._raise_highest(scores, row)
        for row in range(2):
            self._exponentiate(scores, row)

    def rescale(self, output: tirx.Var, count: int) -> None:
        """Emit the adaptation of the output so far to the new largest scores."""
        for index in range(count):
            T.buffer_store(output, output[index] * self._change[index // 2 % 2], [index])

    def convert(self, scores: tirx.Var, weights: tirx.Var) -> None:
        """Emit the weights in 2 bytes, as the fragment of operand A."""
        for word in range(self._pairs * 2):
            T.buffer_store(weights, pack(scores[word * 2], scores[word * 2 + 1], self._dtype), [word])

    def finish(self) -> None:
        """Emit the sum of each row's weights over the four lanes that hold it."""
        for row in range(2):
            for mask in (1, 2):
                T.buffer_store(self._total, self._total[row] + lane_xor(self._total[row], mask), [row])

    def _mask(self, scores: tirx.Var, block: tirx.Expr) -> None:
        spec = self._plan.spec
        here = block * self._plan.parameters.block_k + self._column
        for row in range(2):
            end = _held(self._rows.end[row] - here)
            first = _held(self._rows.first[row] - here) if spec.window else None
            for pair in range(self._pairs):
                for index in range(2):
                    at = pair * 4 + row * 2 + index
                    seen = end > pair * 8 + index
                    if first is not None:
                        seen = tirx.all(seen, first <= pair * 8 + index)
                    T.buffer_store(scores, tirx.Select(seen, scores[at], _MINUS_INFINITY), [at])

    def _raise_highest(self, scores: tirx.Var, row: int) -> None:
        # A tree: a chain of maxima would wait for itself.
        parts = [self._highest[row]]
        for pair in range(self._pairs):
            parts.append(tirx.max(scores[pair * 4 + row * 2], scores[pair * 4 + row * 2 + 1]))
        highest = T.alloc_local([1], "float32")
        T.buffer_store(highest, _tree(parts, tirx.max), [0])
        for mask in (1, 2):
            T.buffer_store(highest, tirx.max(highest[0], lane_xor(highest[0], mask)), [0])
        unit = tirx.FloatImm("float32", self._unit)
        used = highest[0]
        if self._may_see_nothing:
            used = tirx.Select(highest[0] == _MINUS_INFINITY, tirx.FloatImm("float32", 0.0), highest[0])
        T.buffer_store(self._used, used if self._bias else used * unit, [row])
        change = (self._highest[row] - used) * unit if self._bias else self._highest[row] * unit - self._used[row]
        T.buffer_store(self._change, exp2(change), [row])
        T.buffer_store(self._highest, highest[0], [row])

    @property
    def _may_see_nothing(self) -> bool:
        """Whether a row may not have seen any key after a block."""
        spec, p = self._plan.spec, self._plan.parameters
        return spec.bias is not None or spec.window > 0 or p.split > 1 or (spec.causal and spec.keys < spec.queries)

    def _exponentiate(self, scores: tirx.Var, row: int) -> None:
        unit = tirx.FloatImm("float32", self._unit)
        sums = T.alloc_local([2], "float32")
        for pair in range(self._pairs):
            for index in range(2):
                at = pair * 4 + row * 2 + index
                # With a bias the subtraction comes first: a low finite score times log2(e) may be -inf.
                used = self._used[row]
                power = (scores[at] - used) * unit if self._bias else scores[at] * unit - used
                T.buffer_store(scores, exp2(power), [at])
                T.buffer_store(sums, scores[at] if pair == 0 else sums[index] + scores[at], [index])
        T.buffer_store(self._total, self._total[row] * self._change[row] + (sums[0] + sums[1]), [row])


class BiasReader:
    """Reads the part of a mask that belongs to a block of keys into registers, and applies it.

    Two neighbouring elements of 1, 2 or 4 bytes are one load where they lie at a multiple of their size.
    """

    def __init__(self, plan: AttentionPlan, param: tirx.Var, lane: tirx.Expr) -> None:
        assert plan.spec.bias is not None
        self._plan = plan
        self._bias: ScoreBias = plan.spec.bias
        self._column = lane % 4 * 2
        self._pairs = plan.parameters.block_k // 8
        bias = self._bias
        # TVM reads a bool as a byte, 0 or 1.
        self._dtype = str(param.ty.dtype).replace("bool", "int8")
        size = math.prod(int(size) for size in param.ty.shape)
        self._buffer = T.decl_buffer((size,), self._dtype, data=param.data)
        # One row of the mask may serve both rows of a thread.
        self._lines = 1 if bias.query_stride == 0 and (bias.head_stride == 0 or plan.group == 1) else 2
        strides = (bias.batch_stride, bias.head_stride, bias.query_stride)
        even = all(stride % 2 == 0 for stride in strides) and plan.spec.keys % 2 == 0
        load = _PAIR_LOADS.get(self._dtype) if bias.key_stride == 1 and even else None
        self._load = load[0] if load is not None else None
        words, kind = load[1:] if load is not None else (2, self._dtype)
        self._held = [[T.alloc_local([words], kind) for _ in range(self._pairs)] for _ in range(self._lines)]

    def read(self, block: tirx.Expr, rows: Rows) -> None:
        """Emit the reads of one block of keys; past the last key, the last is read."""
        bias, spec, block_k = self._bias, self._plan.spec, self._plan.parameters.block_k
        starts = [
            _held(
                rows.batch * bias.batch_stride
                + rows.head[line] * bias.head_stride
                + tirx.min(rows.query[line], spec.queries - 1) * bias.query_stride
            )
            for line in range(self._lines)
        ]
        first = _held(block * block_k + self._column)
        if spec.keys % block_k == 0 and self._plan.parameters.split == 1:
            self._read(starts, lambda pair: first + pair * 8)
            return
        with T.If(block * block_k + block_k <= spec.keys):
            with T.Then():
                self._read(starts, lambda pair: first + pair * 8)
            with T.Else():
                last = spec.keys - (2 if self._load else 1)
                self._read(starts, lambda pair: tirx.min(first + pair * 8, last))

    def _read(self, starts: list[tirx.Expr], key: Callable[[int], tirx.Expr]) -> None:
        last = self._plan.spec.keys - 1
        for line, start in enumerate(starts):
            for pair in range(self._pairs):
                held = self._held[line][pair]
                if self._load is not None:
                    registers = [held[word] for word in range(int(held.ty.shape[0]))]
                    T.evaluate(T.ptx[self._load](*registers, self._buffer.ptr_to([start + key(pair)])))
                    continue
                for index in range(2):
                    at = tirx.min(key(pair) + index, last) * self._bias.key_stride
                    T.buffer_store(held, self._buffer[start + at], [index])

    def apply(self, scores: tirx.Var) -> None:
        """Emit the scaling of plain products and the adding or masking."""
        scale = tirx.FloatImm("float32", self._plan.spec.scale)
        for pair in range(self._pairs):
            for row in range(2):
                held = self._held[row % self._lines][pair]
                for index in range(2):
                    at = pair * 4 + row * 2 + index
                    scaled, element = scores[at] * scale, self._element(held, index)
                    if self._bias.kind == "add":
                        value = scaled + element
                    else:
                        value = tirx.Select(element != tirx.const(0, str(element.ty.dtype)), scaled, _MINUS_INFINITY)
                    T.buffer_store(scores, value, [at])

    def _element(self, held: tirx.Var, index: int) -> tirx.Expr:
        """Return one of a pair of elements; of a floating mask as float32."""
        if self._load is None:
            return tirx.Cast("float32", held[index]) if self._dtype in _FLOATS else held[index]
        if self._dtype in _PACK:
            source = _UNPACK_SOURCE.replace("NAME", _UNPACK[self._dtype]).replace("KIND", _UNPACK_KINDS[self._dtype])
            return T.cuda.func_call(
                _UNPACK[self._dtype],
                held[0],
                tirx.IntImm("int32", 16 * index),
                source_code=source,
                return_type="float32",
            )
        if self._dtype in ("int8", "uint8"):
            return tirx.bitwise_and(held[0], tirx.const(0xFF << 8 * index, "uint16"))
        return held[index]


def _held(value: tirx.Expr) -> tirx.Expr:
    """Emit the storing of a value in a register of its own, and return that."""
    register = T.alloc_local([1], "int32")
    T.buffer_store(register, value, [0])
    return register[0]


def _tree(parts: list[tirx.Expr], combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]) -> tirx.Expr:
    while len(parts) > 1:
        parts = [combine(*parts[at : at + 2]) if at + 1 < len(parts) else parts[at] for at in range(0, len(parts), 2)]
    return parts[0]
