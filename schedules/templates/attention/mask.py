"""The mask of the kernel of `template.py`, read from memory and applied to registers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import tvm
from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions.attention import ScoreBias
from relaxtune.schedules.templates.attention.padding_search import any_lane
from relaxtune.schedules.templates.attention.sizes import flat_view, is_zero
from relaxtune.schedules.templates.attention.tiles import Rows, TilePlan
from relaxtune.schedules.templates.emit.device_function import device_call
from relaxtune.schedules.templates.emit.registers import all_of, in_register, load_vector
from relaxtune.schedules.templates.emit.tensor_cores import MMA_KINDS

LOG2_E = math.log2(math.e)
MINUS_INFINITY = tirx.FloatImm("float32", -math.inf)

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
_UNPACK = """
__forceinline__ __device__ float relaxtune_unpack_KIND(unsigned packed, int shift) {
  unsigned short half = packed >> shift;
  float value;
  asm("cvt.f32.KIND %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
"""
_OF_LANE = """
__forceinline__ __device__ unsigned relaxtune_of_lane(unsigned x, int lane) { return __shfl_sync(~0u, x, lane); }
"""


class _OfLanes:
    """A block of a mask of padding in the registers of a warp, of each 64 keys two neighbouring ones a lane.

    Rows may begin anywhere: elements are read one by one, each by one lane.
    """

    def __init__(self, plan: TilePlan, buffer: tirx.Var, dtype: str, lane: tirx.Expr) -> None:
        self._plan, self._buffer, self._dtype, self._lane = plan, buffer, dtype, lane
        self._bits = 8 * int(tvm.DataType(dtype).itemsize)
        # Two elements of 4 bytes are two words; smaller ones share one.
        self._each = 2 if self._bits == 32 else 1
        self._held = T.alloc_local([math.ceil(plan.parameters.block_k / 64) * self._each], "uint32")

    @property
    def words(self) -> list[tirx.Expr]:
        """The registers of the lane."""
        return all_of(self._held)

    def read(self, start: tirx.Expr, block: tirx.Expr) -> None:
        """Emit the reads of a block, of a row that begins at an element; past the last key, the last is read."""
        block_k, keys = self._plan.parameters.block_k, self._plan.spec.keys
        for number in range(math.ceil(block_k / 64)):
            bits = []
            for index in range(2):
                inside = tirx.min((number * 32 + self._lane) * 2 + index, block_k - 1)
                element = self._buffer[start + tirx.min(block * block_k + inside, keys - 1)]
                bits.append(tirx.Cast("uint32", tirx.reinterpret(f"uint{self._bits}", element)))
            if self._each == 1:
                bits = [tirx.bitwise_or(bits[0], tirx.shift_left(bits[1], tirx.const(self._bits, "uint32")))]
            for word, value in enumerate(bits):
                T.buffer_store(self._held, value, [number * self._each + word])

    def pair(self, pair: int) -> tirx.Var:
        """Emit the fetching of a pair of 8 keys that belongs to this lane's scores; return its words."""
        words = T.alloc_local([self._each], "uint32")
        number, owner = divmod(pair, 8)
        for word in range(self._each):
            held = self._held[number * self._each + word]
            T.buffer_store(words, device_call(_OF_LANE, held, owner * 4 + self._lane % 4), [word])
        return words


class BiasReader:
    """Reads the part of a mask that belongs to a block of keys into registers, and applies it.

    Two neighbouring elements of 1, 2 or 4 bytes are one load where they lie at a multiple of their size.

    Of a mask to be added, `find_added` tells whether there is anything in it. Where all queries have the same one (a
    mask of padding), a warp reads it with a load or two to see that, and only then as each thread needs it; where its
    rows begin anywhere, lanes hand on what they have read then.
    """

    def __init__(self, plan: TilePlan, param: tirx.Var, lane: tirx.Expr) -> None:
        assert plan.spec.bias is not None
        self._plan, self._lane, self._column = plan, lane, lane % 4 * 2
        self._pairs = plan.parameters.block_k // 8
        self._bias: ScoreBias = plan.spec.bias
        bias = self._bias
        # TVM reads a bool as a byte, 0 or 1.
        self._dtype = str(param.ty.dtype).replace("bool", "int8")
        self._buffer = flat_view(param, self._dtype)
        # One row of the mask may serve both rows of a thread.
        self._lines = 1 if is_zero(bias.query_stride) and (is_zero(bias.head_stride) or plan.group == 1) else 2
        strides = (bias.batch_stride, bias.head_stride, bias.query_stride, bias.offset)
        even = all(isinstance(size, int) and size % 2 == 0 for size in (*strides, plan.spec.keys))
        bytes_each = int(tvm.DataType(self._dtype).itemsize)
        of_lanes = not even and bias.of_padding and bytes_each <= 4
        self._of_lanes = _OfLanes(plan, self._buffer, self._dtype, lane) if of_lanes else None
        # Where some of them are symbolic, a call says whether they are even.
        unknown = not even and not any(isinstance(size, int) and size % 2 for size in (*strides, plan.spec.keys))
        neighbours = isinstance(bias.key_stride, int) and bias.key_stride == 1 and not bias.limit
        pairs = neighbours and (even or unknown) and not of_lanes
        load = _PAIR_LOADS.get(self._dtype) if pairs else None
        self._even: tirx.Expr | None = None
        if load is not None and not even:
            bits = plan.spec.keys
            for stride in strides:
                bits = bits if is_zero(stride) else tirx.bitwise_or(bits, stride)
            self._even = in_register(bits % 2) == 0
        self._load = load[0] if load is not None else None
        words, kind = load[1:] if load is not None else (2, self._dtype)
        self._held = [[T.alloc_local([words], kind) for _ in range(self._pairs)] for _ in range(self._lines)]
        # Elements of a load and loads by which a warp sees whether there is anything in a block of a mask of padding.
        self._scan: tuple[int, int] | None = None
        if bias.kind == "add" and self._load is not None and self._even is None and bias.of_padding:
            block_k = plan.parameters.block_k
            fours = block_k > 64 and plan.spec.keys % 4 == 0 and bias.batch_stride % 4 == 0
            elements = 4 if fours else 2
            loads = math.ceil(block_k / (32 * elements))
            self._scan = elements, loads
            self._scanned = T.alloc_local([loads * elements * bytes_each // 4], "uint32")

    def prefetch(self, block: tirx.Expr, rows: Rows) -> None:
        """Emit the reads of one block of keys that come before `find_added`."""
        if self._of_lanes is not None:
            self._of_lanes.read(in_register(rows.batch * self._bias.batch_stride), block)
            return
        if self._scan is None:
            self._read_block(block, rows)
            return
        (elements, loads), plan = self._scan, self._plan
        block_k = plan.parameters.block_k
        each = len(all_of(self._scanned)) // loads
        for load in range(loads):
            inside = tirx.min((load * 32 + self._lane) * elements, block_k - elements)
            key = tirx.min(block * block_k + inside, plan.spec.keys - elements)
            at = self._buffer.ptr_to([rows.batch * self._bias.batch_stride + key])
            load_vector("global", self._scanned, at, each, load * each)

    def _read_block(self, block: tirx.Expr, rows: Rows) -> None:
        """Emit what this thread's rows need of one block of keys; past the last key, the last is read."""
        bias, spec, block_k = self._bias, self._plan.spec, self._plan.parameters.block_k
        queries = [tirx.min(rows.query[line], spec.queries - 1) for line in range(self._lines)]
        begins = [bias.row(rows.batch, rows.head[line]) for line in range(self._lines)]
        first = in_register(block * block_k + self._column)
        if bias.limit:
            self._read_diagonals(
                list(map(in_register, begins)), [in_register(bias.place(query, first)) for query in queries]
            )
            return
        zero = tirx.IntImm("int32", 0)
        starts = [in_register(begin + bias.place(query, zero)) for begin, query in zip(begins, queries, strict=True)]
        if self._even is None:
            self._read_whole_pairs(starts, block, first)
            return
        with T.If(self._even):
            with T.Then():
                self._read_whole_pairs(starts, block, first)
            with T.Else():
                self._read_halves(starts, first)

    def _read_whole_pairs(self, starts: list[tirx.Expr], block: tirx.Expr, first: tirx.Expr) -> None:
        """Emit the reads of pairs that lie at a multiple of their size, or of single elements that nothing packs."""
        spec, block_k = self._plan.spec, self._plan.parameters.block_k
        if self._plan.whole_blocks and self._plan.parameters.split == 1:
            self._read(starts, lambda pair: first + pair * 8)
            return
        with T.If(block * block_k + block_k <= spec.keys):
            with T.Then():
                self._read(starts, lambda pair: first + pair * 8)
            with T.Else():
                last = spec.keys - (2 if self._load else 1)
                self._read(starts, lambda pair: tirx.min(first + pair * 8, last))

    def _read_diagonals(self, begins: list[tirx.Expr], places: list[tirx.Expr]) -> None:
        """Emit the reads of elements of tables, from places on of which some may be outside."""
        stride, limit = self._bias.key_stride, self._bias.limit
        span = (self._pairs * 8 - 7) * stride
        inside = [tirx.all(place + min(span, 0) >= 0, place + max(span, 0) <= limit) for place in places]

        def read(place_in: Callable[[tirx.Expr], tirx.Expr]) -> None:
            for line, (begin, place) in enumerate(zip(begins, places, strict=True)):
                for pair in range(self._pairs):
                    for index in range(2):
                        at = place_in(place + (pair * 8 + index) * stride)
                        T.buffer_store(self._held[line][pair], self._buffer[begin + at], [index])

        with T.If(tirx.all(*inside)):
            with T.Then():
                read(lambda place: place)
            with T.Else():
                read(lambda place: tirx.max(tirx.min(place, limit), 0))

    def _read_halves(self, starts: list[tirx.Expr], first: tirx.Expr) -> None:
        """Emit the reads of pairs that lie anywhere, one element after another."""
        last = self._plan.spec.keys - 1
        for line, start in enumerate(starts):
            for pair in range(self._pairs):
                held = self._held[line][pair]
                low, high = (self._buffer[start + tirx.min(first + (pair * 8 + index), last)] for index in range(2))
                if len(all_of(held)) == 2:
                    T.buffer_store(held, low, [0])
                    T.buffer_store(held, high, [1])
                    continue
                kind, bits = str(held.ty.dtype), 8 * tvm.DataType(self._dtype).itemsize
                low, high = (tirx.Cast(kind, tirx.reinterpret(f"uint{bits}", half)) for half in (low, high))
                packed = tirx.bitwise_or(low, tirx.shift_left(high, tirx.const(bits, kind)))
                T.buffer_store(held, packed, [0])

    def _read(self, starts: list[tirx.Expr], key: Callable[[int], tirx.Expr]) -> None:
        last = self._plan.spec.keys - 1
        for line, start in enumerate(starts):
            for pair in range(self._pairs):
                held = self._held[line][pair]
                if self._load is not None:
                    T.evaluate(T.ptx[self._load](*all_of(held), self._buffer.ptr_to([start + key(pair)])))
                    continue
                for index in range(2):
                    at = tirx.min(key(pair) + index, last) * self._bias.key_stride
                    T.buffer_store(held, self._buffer[start + at], [index])

    @property
    def unit(self) -> float | None:
        """Factor from scores to powers of 2 once a mask is added; None where nothing is added: plain products."""
        if self._bias.kind == "keep":
            return None
        # Numbers of float16 may be multiplied by log2(e) beforehand; of a wider range, low finite ones become -inf.
        return 1.0 if self._dtype == "float16" else LOG2_E

    def find_added(self) -> tirx.Expr | None:
        """Emit the search for anything but zeros in what the warp has read of a mask to be added.

        Returns whether there is any, in a register; None where that is not looked for.
        """
        if self.unit is None or (self._load is None and self._of_lanes is None):
            return None
        if self._of_lanes is not None:
            words = self._of_lanes.words
        elif self._scan is not None:
            words = all_of(self._scanned)
        else:
            held = [word for line in self._held for pair in line for word in all_of(pair)]
            words = [tirx.reinterpret("uint32", word) for word in held]
        return any_lane(reduce(tirx.bitwise_or, words), self._dtype)

    def apply(self, scores: tirx.Var, block: tirx.Expr, rows: Rows) -> None:
        """Emit the adding to scaled products, or the masking of plain ones."""
        if self._scan is not None:
            self._read_block(block, rows)
        spec = self._plan.spec
        for line in range(self._lines):
            for pair in range(self._pairs):
                held = self._held[line][pair] if self._of_lanes is None else self._of_lanes.pair(pair)
                for index in range(2):
                    element = self._element(held, index)
                    for row in range(2) if self._lines == 1 else (line,):
                        at = pair * 4 + row * 2 + index
                        if self.unit is None:
                            seen = element != tirx.const(0, str(element.ty.dtype))
                            score = tirx.Select(seen, scores[at], MINUS_INFINITY)
                        else:
                            factor = LOG2_E / self.unit
                            score = scores[at] * tirx.FloatImm("float32", spec.scale * factor) + element * factor
                        T.buffer_store(scores, score, [at])

    def _element(self, held: tirx.Var, index: int) -> tirx.Expr:
        """Return one of a pair of elements; of a floating mask as float32."""
        if self._load is None and self._of_lanes is None:
            return tirx.Cast("float32", held[index]) if self._dtype in _FLOATS else held[index]
        if self._dtype in MMA_KINDS:
            return device_call(
                _UNPACK.replace("KIND", MMA_KINDS[self._dtype]), held[0], tirx.IntImm("int32", 16 * index)
            )
        if self._dtype in ("int8", "uint8"):
            return tirx.bitwise_and(held[0], tirx.const(0xFF << 8 * index, str(held.ty.dtype)))
        return tirx.reinterpret(self._dtype, held[index])
