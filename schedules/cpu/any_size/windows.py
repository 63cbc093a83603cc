"""Windows on a CPU, channels last: convolutions and poolings of any sizes, in the form that one kernel makes.

    C[n, y, x, f] = sum over i, j, c of D[n, y * stride + i * step - before, ..., c] * W[f, i, j, c]

Tensors are (batch, one to three axes of positions, channels), so that a vector holds channels whatever stride, padding
and width are. Weights of dense and grouped convolutions come in panels of filters, as those of matmuls (`packing`).
Those of depthwise convolutions are [positions of the window, channels]. A pooling has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import te, tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.base import inline_spatial
from relaxtune.schedules.cpu.contraction import MAX_ROWS, MAX_VECTORS, best_tile, find_panel, lanes_of
from relaxtune.schedules.cpu.packing import pack_weight
from relaxtune.schedules.cpu.tiling import find_epilogue
from relaxtune.schedules.sizes import Size, simplify
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.blocks import Block, element_bytes, position_of, shape_of
from relaxtune.schedules.tir.contraction import find_factors
from relaxtune.schedules.tir.expressions import find_all, list_loads
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock, block_facts, find_only_reduction, list_blocks

_ANNOTATION = "windows"
# Weights that take this part of the second cache at most are read for each line, in place of each line for each panel.
_L2_SHARE = 2


@dataclass(frozen=True)
class Geometry:
    """Along each axis of positions: a window's size, its stride, the step between its elements, and the padding."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    steps: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def outputs(self, sizes: Sequence[Size]) -> list[Size]:
        """Return how many windows there are along each axis."""
        axes = zip(sizes, self.kernel, self.strides, self.steps, self.before, self.after, strict=True)
        return [simplify((size + b + a - (k - 1) * d - 1) // s + 1) for size, k, s, d, b, a in axes]

    @property
    def is_padded(self) -> bool:
        """Whether windows reach beyond the tensor."""
        return any((*self.before, *self.after))

    @property
    def is_pointwise(self) -> bool:
        """Whether each window is one position, and each position a window."""
        return {*self.kernel, *self.strides} == {1} and not self.is_padded


def filters_width(rows: int | None, filters: int, groups: int, dtype: str, limits: CpuLimits) -> int:
    """Return the filters of a panel for so many positions in a row.

    Panels do not reach into the next group: one filter is the answer where groups share no factor with a vector.
    """
    lanes = lanes_of(dtype, limits)
    if groups == 1:
        return best_tile(rows, filters, lanes, limits.vector_registers, exact=filters % lanes == 0).columns
    in_group = filters // groups
    fitting = [count * lanes for count in range(1, MAX_VECTORS + 1) if in_group % (count * lanes) == 0]
    return max(fitting, default=math.gcd(in_group, lanes))


def pack_filters(weight: np.ndarray, width: int) -> np.ndarray:
    """Return weights [filters, channels, window...] as panels."""
    return pack_weight(np.moveaxis(weight, 1, -1).reshape(len(weight), -1).T, width)


def convolution(geometry: Geometry, filters: int, groups: int) -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    """Return the tensor expression of a convolution with packed weights."""

    def compute(x: te.Tensor, packed: te.Tensor) -> te.Tensor:
        channels, width = int(x.shape[-1]) // groups, int(packed.shape[2])
        channel = te.reduce_axis((0, channels), name="c")

        def element(at: Callable[[tirx.Expr], tirx.Expr], place: tirx.Expr, filter_: tirx.Var) -> tirx.Expr:
            first = 0 if groups == 1 else tirx.floordiv(filter_, filters // groups) * channels
            panel, column = tirx.floordiv(filter_, width), tirx.floormod(filter_, width)
            return at(first + channel) * packed(panel, place * channels + channel, column)

        return _windows(x, geometry, filters, te.sum, element, [channel])

    return compute


def depthwise_convolution(geometry: Geometry) -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    """Return the tensor expression of a convolution of each channel with its own weights [window, channels]."""

    def compute(x: te.Tensor, weight: te.Tensor) -> te.Tensor:
        return _windows(x, geometry, x.shape[-1], te.sum, lambda at, place, c: at(c) * weight(place, c))

    return compute


def largest(geometry: Geometry) -> Callable[[te.Tensor], te.Tensor]:
    """Return the tensor expression of the largest element of each window."""

    def compute(x: te.Tensor) -> te.Tensor:
        return _windows(x, geometry, x.shape[-1], te.max, lambda at, _place, c: at(c), fill=te.min_value(x.dtype).value)

    return compute


def mean(geometry: Geometry, count_padding: bool) -> Callable[[te.Tensor], te.Tensor]:
    """Return the tensor expression of the mean of each window, padding counted or not."""

    def compute(x: te.Tensor) -> te.Tensor:
        total = _windows(x, geometry, x.shape[-1], te.sum, lambda at, _place, c: at(c))

        def element(*index: tirx.Var) -> tirx.Expr:
            counts: list[Size] = []
            for axis, size in enumerate(x.shape[1:-1]):
                kernel, before = geometry.kernel[axis], geometry.before[axis]
                first = index[1 + axis] * geometry.strides[axis] - before
                least, most = (-before, size + geometry.after[axis]) if count_padding else (0, size)
                inside = tirx.min(first + kernel, most) - tirx.max(first, least)
                counts.append(inside if any((before, geometry.after[axis])) else kernel)
            return total(*index) / tirx.Cast(x.dtype, tirx.max(math.prod(counts), 1))

        return te.compute(total.shape, element, name="mean")

    return compute


def _windows(
    x: te.Tensor,
    geometry: Geometry,
    columns: int | tirx.Expr,
    combine: Callable[..., tirx.Expr],
    element: Callable[..., tirx.Expr],
    reduced: Sequence[tirx.IterVar] = (),
    fill: float = 0.0,
) -> te.Tensor:
    """Combine elements of each window; `element` gets what reads a channel, the place in the window, and the column."""
    sizes, fill = list(x.shape[1:-1]), tirx.const(fill, x.dtype)
    window = [te.reduce_axis((0, size), name=f"r{axis}") for axis, size in enumerate(geometry.kernel)]

    def value(n: tirx.Var, *index: tirx.Var) -> tirx.Expr:
        *at, column = index
        axes = zip(at, geometry.strides, window, geometry.steps, geometry.before, strict=True)
        places = [i * s + r * d - b for i, s, r, d, b in axes]
        inside = [tirx.all(i >= 0, i < size) for i, size in zip(places, sizes, strict=True)]

        def padded(channel: tirx.Expr) -> tirx.Expr:
            read = x(n, *places, channel)
            return tirx.if_then_else(tirx.all(*inside), read, fill) if geometry.is_padded else read

        place: tirx.Expr | int = 0
        for axis, size in zip(window, geometry.kernel, strict=True):
            place = place * size + axis
        return combine(element(padded, place, column), axis=[*window, *reduced])

    facts = [*geometry.kernel, *geometry.strides, *geometry.steps, *geometry.before, *geometry.after]
    shape = [x.shape[0], *geometry.outputs(sizes), columns]
    return te.compute(shape, value, name="windows", attrs={_ANNOTATION: facts})


def is_convolution(block: Block) -> bool:
    """Whether a block sums products over windows."""
    return _ANNOTATION in block.stmt.annotations and find_factors(block.store) is not None


@dataclass(frozen=True)
class Windows:
    """A function to make: its reduction block and the epilogue, the largest tile, and the loads that the block sums.

    `fill` is what is read outside the tensor. `weight` is None for a pooling; `panel` is the filters of one panel, None
    where each channel has its own windows. `channels` are those that a window sums. With `panels_inside`, a core
    computes all panels of a line before the next line.
    """

    func: PrimFunc
    block: ScheduledBlock
    epilogue: ScheduledBlock | None
    geometry: Geometry
    data: TensorLoad
    fill: tirx.Expr
    weight: TensorLoad | None
    panel: int | None
    columns: int
    channels: int
    rows: int
    vectors: int
    lanes: int
    cores: int
    panels_inside: bool

    @property
    def panels(self) -> int:
        """Tiles along the columns."""
        return -(-self.columns // self.width)

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.vectors * self.lanes

    @property
    def sizes(self) -> list[Size]:
        """Sizes of the source's axes of positions."""
        shape = shape_of(self.data.source)
        assert shape is not None
        return [simplify(size) for size in shape[1:-1]]


def find_windows(func: PrimFunc, limits: CpuLimits) -> Windows | None:
    """Return the windows that a function combines; None where its kernel would not make it."""
    sch = Schedule(func)
    block = find_only_reduction(sch)
    if block is None or _ANNOTATION not in block.stmt.annotations:
        return None
    inline_spatial(sch)
    epilogue = find_epilogue(sch, block.rv)
    if len(list_blocks(sch)) != (1 if epilogue is None else 2):
        return None
    block = block_facts(sch, block.rv)
    last = None if epilogue is None else block_facts(sch, epilogue)
    data, *weights = [load for load in list_loads(block.store.value) if not load.source.same_as(block.store.buffer)]
    padded = find_all(block.store.value, tvm.ir.Call)
    fill = padded[0].args[2] if padded else tirx.const(0.0, str(block.store.buffer.dtype))
    columns = block.extents[len(block.spatial) - 1]
    if columns is None or any(position_of(func, one) is None for one in (data.source, (last or block).store.buffer)):
        return None
    facts = [int(number) for number in block.stmt.annotations[_ANNOTATION]]
    axes = len(facts) // 5
    geometry = Geometry(*(tuple(facts[axes * part : axes * (part + 1)]) for part in range(5)))
    weight = next(iter(weights), None)
    panel = None if weight is None else find_panel(weight, block.spatial[-1])
    dtype = str(block.store.buffer.dtype)
    lanes = lanes_of(dtype, limits)
    while lanes > columns if panel is None else panel % lanes:
        lanes //= 2
    vectors = min(MAX_VECTORS, columns // lanes) if panel is None else panel // lanes
    length = math.prod(block.reduced_sizes)
    channels = length // math.prod(geometry.kernel)
    rows = min(MAX_ROWS, max(1, (limits.vector_registers - 1 - vectors) // vectors))
    return Windows(
        *(sch.mod["main"], block, last, geometry, data, fill, weight, panel),
        *(columns, channels, rows, vectors, lanes, limits.cores),
        panels_inside=panel is None or length * columns * element_bytes(dtype) <= (limits.l2_bytes or 0) // _L2_SHARE,
    )
