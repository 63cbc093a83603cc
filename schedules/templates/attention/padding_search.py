"""Whether there is anything in a mask of padding: most tiles have none to add, and are made without."""

from __future__ import annotations

import math
from functools import reduce

import tvm
from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.attention.sizes import ceil_div, flat_view
from relaxtune.schedules.templates.attention.tiles import TilePlan
from relaxtune.schedules.templates.emit.device_function import device_call
from relaxtune.schedules.templates.emit.registers import in_register, load_vector

# The bits of a word that say whether there is anything in it: all but signs. Exporters make masks of (1 - mask) times a
# low number, which is -0 where nothing is masked.
_MAGNITUDES = {"float16": 0x7FFF7FFF, "bfloat16": 0x7FFF7FFF, "float32": 0x7FFFFFFF}
# Words that a lane reads of a tile's mask: at a time, and at most.
_HELD_WORDS_MAX, _SEARCHED_WORDS_MAX = 16, 256
_ANY_LANE = """
__forceinline__ __device__ int relaxtune_any_lane(unsigned x) { return __any_sync(~0u, x != 0); }
"""


def any_lane(bits: tirx.Expr, dtype: str) -> tirx.Expr:
    """Return whether a lane of the warp has anything but zeros of a dtype in some bits; emits code."""
    bits = tirx.bitwise_and(bits, tirx.const(_MAGNITUDES.get(dtype, 0xFFFFFFFF), "uint32"))
    found = device_call(_ANY_LANE, bits)
    return in_register(found) != 0


class PaddingSearch:
    """Finds out whether there is anything but zeros in the mask of padding of a tile's batch element.

    A short mask is read when a tile begins, and looked at once the tile's first scores are being multiplied. A long one
    is read for a thread block's first tile, and again where the batch element has changed.
    """

    def __init__(self, plan: TilePlan, param: tirx.Var, lane: tirx.Expr) -> None:
        spec, dtype = plan.spec, str(param.ty.dtype)
        assert spec.bias is not None
        self._keys, self._stride, self._lane = spec.keys, spec.bias.batch_stride, lane
        element_bytes = int(tvm.DataType(dtype).itemsize)
        self._vector = self.vector_of(plan, element_bytes)
        self._loads = ceil_div(spec.keys, 32 * self._vector)
        self._dtype, self._buffer = dtype, flat_view(param, dtype)
        # A single element of 2 bytes takes a word, too.
        self._narrow = self._vector * element_bytes < 4
        self._each = 1 if self._narrow else self._vector * element_bytes // 4
        self._batch_loads = _HELD_WORDS_MAX // self._each
        self._bits = T.alloc_local([1], "uint32")
        held = self._batch_loads if self._is_long else self._loads
        self._words = T.alloc_local([held * self._each], "uint32")
        if self._is_long:
            self._known = T.alloc_local([1], "int32")
            T.buffer_store(self._known, -1, [0])

    @classmethod
    def serves(cls, plan: TilePlan, param: tirx.Var) -> bool:
        """Whether a tile has such a mask, and no other block a part of its keys."""
        bias, dtype = plan.spec.bias, str(param.ty.dtype)
        if bias is None or bias.kind != "add" or not bias.of_padding or plan.parameters.split > 1:
            return False
        size = int(tvm.DataType(dtype).itemsize)
        vector = cls.vector_of(plan, size)
        if not isinstance(plan.spec.keys, int):
            return True
        return vector > 0 and math.ceil(plan.spec.keys / (32 * vector)) * vector * size <= 4 * _SEARCHED_WORDS_MAX

    @staticmethod
    def vector_of(plan: TilePlan, element_bytes: int) -> int:
        """Return the elements of the widest loads that the rows of the mask allow; 0 for none of 4 bytes or more.

        Rows of symbolic length may begin anywhere: 1.
        """
        spec = plan.spec
        assert spec.bias is not None
        if not isinstance(spec.keys, int) or not isinstance(spec.bias.batch_stride, int):
            return 1
        sizes = [size // element_bytes for size in (16, 8, 4)]
        # No wider than that all lanes have something to read.
        useful = [one for one in sizes if one * 32 <= spec.keys] or sizes[-1:]
        fitting = [one for one in useful if one and spec.keys % one == 0 and spec.bias.batch_stride % one == 0]
        return fitting[0] if fitting else 0

    @property
    def _is_long(self) -> bool:
        return not isinstance(self._loads, int) or self._loads > self._batch_loads

    def begin(self, batch: tirx.Expr) -> None:
        """Emit the reads for a tile."""
        if not self._is_long:
            self._read(batch, 0, self._loads)
            return
        with T.If(batch != self._known[0]), T.Then():
            T.buffer_store(self._known, batch, [0])
            T.buffer_store(self._bits, T.uint32(0), [0])
            if isinstance(self._loads, int):
                for first in range(0, self._loads, self._batch_loads):
                    self._read_more(batch, first, min(self._batch_loads, self._loads - first))
                return
            with T.serial(ceil_div(self._loads, self._batch_loads)) as turn:
                self._read_more(batch, turn * self._batch_loads, self._batch_loads)

    def found_nothing(self) -> tirx.Expr:
        """Return whether the tile's mask is zeros alone, the same in all lanes of a warp."""
        if not self._is_long:
            T.buffer_store(self._bits, self._read_bits(self._loads), [0])
        return tirx.Not(any_lane(self._bits[0], self._dtype))

    def _read_more(self, batch: tirx.Expr, first: tirx.Expr | int, count: int) -> None:
        self._read(batch, first, count)
        T.buffer_store(self._bits, tirx.bitwise_or(self._bits[0], self._read_bits(count)), [0])

    def _read(self, batch: tirx.Expr, first: tirx.Expr | int, count: int) -> None:
        for load in range(count):
            key = tirx.min(((first + load) * 32 + self._lane) * self._vector, self._keys - self._vector)
            at = batch * self._stride + key
            if self._narrow:
                word = tirx.Cast("uint32", tirx.reinterpret("uint16", self._buffer[at]))
                T.buffer_store(self._words, word, [load])
                continue
            load_vector("global", self._words, self._buffer.ptr_to([at]), self._each, load * self._each)

    def _read_bits(self, count: int) -> tirx.Expr:
        return reduce(tirx.bitwise_or, [self._words[word] for word in range(count * self._each)])
