"""Register-tiled contractions on a CPU, matmuls and convolutions: the roles of their loops, and the best tile.

    C[b..., m..., n] = sum over k... of L[b, m, k] * R[b, k, n]

`b` are axes of both operands, `m` of the left alone, `n` of the right alone, `k` the reduction axes. One `m` axis and
one `n` axis are tiled; a tile of rows x vectors of C is kept in vector registers over the whole reduction:

    parallel b..., n panel              each panel of R is read by one core, again for every row tile, out of L2
      [pack R panel]                    only where R is not contiguous along n, or n has to be padded
      m..., m tile
        acc[rows, vectors] = 0          constant indices after unrolling, so LLVM keeps them in registers
        k...: acc += L[row] (broadcast) * R[vector]
        epilogue on the tile

Everything elementwise after C is inlined into one epilogue block. When that holds transcendental functions, the
accumulators are first stored to a tile on the stack, so that the epilogue can stay a loop and is not unrolled
rows x vectors times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Var
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.blocks import element_bytes, static_extent
from relaxtune.schedules.tir.contraction import are_axes, find_operands, index_vars
from relaxtune.schedules.tir.expressions import used_vars
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock

# At most this many rows: past it the unrolled body outgrows the micro-op cache and no reuse is gained.
MAX_ROWS = 14
# A row alone reuses nothing, so wider tiles only serve to hide the latency of the multiply-add.
MAX_VECTORS = 4
MAX_VECTORS_FEW_ROWS = 8
FEW_ROWS = 2
# Bytes along k that one lane multiplies in one step.
BYTES_OF_WORD = 4
# What a load costs, in multiply-adds, and what the load of a vector from the second cache does.
_LOAD, _STREAMED_VECTOR = 0.25, 1.25


@dataclass(frozen=True)
class TiledContraction:
    """A block that multiplies two tensors and sums, with the role of each loop."""

    block: ScheduledBlock  # The reduction block.
    # The operand that is broadcast along n, and the one read in vectors.
    left: TensorLoad
    right: TensorLoad
    # Positions among the block's loops: axes of both operands, of the left alone, the vector axis, the reduction.
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    column: int
    reduce: tuple[int, ...]
    row: int | None  # Which of `rows` is tiled: the longest; None when there is none (a vector times a matrix).
    contiguous: bool  # Whether `right` is contiguous along the vector axis, within a panel if it is packed.
    # Columns of one panel when `right` is a weight packed at compile time (see `packing`), else None.
    panel: int | None = None

    @property
    def group(self) -> int:
        """Neighbours along k that lie side by side in a packed weight: 4 for bytes, else 1."""
        return BYTES_OF_WORD if self.panel is not None and len(self.right.indices) == 4 else 1

    @property
    def steps(self) -> int | None:
        """Groups along the reduction, None where symbolic."""
        length = self.block.extents[self.reduce[0]]
        return None if length is None else length // self.group


@dataclass(frozen=True)
class Tile:
    """Rows and vectors of the accumulator tile; `lanes` elements a vector."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        """Elements along n."""
        return self.vectors * self.lanes


def classify(block: ScheduledBlock, left: TensorLoad, right: TensorLoad, column: int) -> TiledContraction | None:
    """Return the roles of the loops with the given loop as the vector axis.

    None when that axis is not one of the right operand alone, an axis belongs to neither operand, or the output is not
    indexed by the data-parallel iterators themselves.
    """
    iters, spatial = block.axes, [index for index, kind in enumerate(block.kinds) if kind == "S"]
    if not are_axes(block.store.indices, block.spatial):
        return None
    in_left, in_right = index_vars(left), index_vars(right)
    if iters[column] in in_left or iters[column] not in in_right:
        return None
    batch, rows = [], []
    for position in spatial:
        var = iters[position]
        if position == column:
            continue
        if var in in_right or axis_extent(block, position) == 1:
            batch.append(position)
        elif var in in_left:
            rows.append(position)
        else:
            return None
    row = max(rows, key=lambda position: (axis_extent(block, position), position), default=None)
    reduce = tuple(index for index, kind in enumerate(block.kinds) if kind == "R")
    panel = find_panel(right, iters[column])
    contiguous = panel is not None or stride_is_one(right, iters[column])
    return TiledContraction(block, left, right, tuple(batch), tuple(rows), column, reduce, row, contiguous, panel)


def find_matmul(block: ScheduledBlock) -> TiledContraction | None:
    """Return the roles of a matmul's loops, None when the block is not one.

    ::

        C[..., m, n] = sum over k of A[..., m, k] * B[..., k, n]   or  B[..., n, k]   or a packed weight, see `packing`

    Every index of both operands has to be an iterator or a constant (a convolution's are sums), except those of a
    packed weight, and the vector axis is the last one of the output, whichever operand it belongs to.
    """
    operands = find_operands(block.store) if block.is_reduction else None
    spatial = [index for index, kind in enumerate(block.kinds) if kind == "S"]
    if operands is None or not spatial:
        return None
    indices = [i for load in operands if not find_panel(load, block.axes[spatial[-1]]) for i in load.indices]
    if not all(isinstance(index, Var) or not used_vars(index) for index in indices):
        return None
    left, right = operands
    return classify(block, left, right, spatial[-1]) or classify(block, right, left, spatial[-1])


def find_convolution(block: ScheduledBlock, limits: CpuLimits) -> tuple[TiledContraction, Tile] | None:
    """Return the roles of a dense convolution's loops and its tile, None where no axis fills whole vectors.

    ::

        C[n, f, y, x] = sum over c, i, j of D[n, c, y * stride + i, x * stride + j] * W[f, c, i, j]

    Rows are output positions and columns are filters. The filters are the vector axis: W is packed so that a panel of
    filters is contiguous, D is broadcast, and no stride gets in the way. Where the filters do not fill whole vectors
    and positions are contiguous (stride 1), positions are the vector axis instead. Grouped and depthwise convolutions
    have no axis of the filters alone: positions are the vector axis where they fill whole vectors, else the generic
    rule takes the convolution. A tile that does not divide its axis would have to be padded, which TVM does only for
    indices without sums.
    """
    operands = find_operands(block.store) if block.is_reduction else None
    if operands is None:
        return None
    spatial = [index for index, kind in enumerate(block.kinds) if kind == "S"]
    for column in spatial:
        for left, right in (operands, operands[::-1]):
            con = classify(block, left, right, column)
            if con is None:
                continue
            tile = choose_tile(con, limits, exact=True)
            if not needs_padding(con, tile):
                return con, tile
    return None


def choose_tile(con: TiledContraction, limits: CpuLimits, exact: bool = False) -> Tile:
    """Return the best tile for a contraction, by `best_tile`; a packed operand's panel is the tile's width."""
    lanes = lanes_of(str(con.block.stmt.writes[0].source.dtype), limits)
    rows = 1 if con.row is None else con.block.extents[con.row]
    columns = con.block.extents[con.column]
    return best_tile(rows, columns, lanes, limits.vector_registers, exact=exact, width=con.panel)


def best_tile(
    rows: int | None,
    columns: int | None,
    lanes: int,
    registers: int,
    *,
    exact: bool = False,
    width: int | None = None,
    streamed: bool = False,
) -> Tile:
    """Return the tile that takes the fewest cycles by count of multiply-adds, loads, and wasted lanes.

    A tile of r rows and v vectors needs r * v accumulators, v vectors of the right operand and one broadcast. Per
    step of k it issues r * v multiply-adds and v + r loads; two loads go out per cycle.

    Rows and columns are the extents of the tiled axes, None where symbolic. With `exact`, tiles divide the columns (one
    that does not is the answer where none does); with `width`, they have so many columns. With `streamed`, the right
    operand comes from the second cache for every tile, at less than a vector a cycle.
    """
    vector_cycles = _STREAMED_VECTOR if streamed else _LOAD
    best, best_cost = Tile(1, 1 if width is None else max(1, width // lanes), lanes), math.inf
    for v in range(1, MAX_VECTORS_FEW_ROWS + 1):
        for r in range(1, MAX_ROWS + 1):
            few = rows is not None and rows <= FEW_ROWS
            if r * v + v + 1 > registers or (v > MAX_VECTORS and not few):
                continue
            if (rows is not None and r > rows) or (exact and (columns is None or columns % (v * lanes))):
                continue
            if width is not None and v * lanes != width:
                continue
            row_tiles = 1 / r if rows is None else math.ceil(rows / r) / rows
            column_tiles = 1 / (v * lanes) if columns is None else math.ceil(columns / (v * lanes)) / columns
            # Fewer than 8 independent accumulators do not cover the latency of a multiply-add.
            cycles = max(r * v, 8 if not few else 4, (v + r) / 2) + _LOAD * r + vector_cycles * v
            cost = cycles * row_tiles * column_tiles
            if cost < best_cost:
                best, best_cost = Tile(r, v, lanes), cost
    return best


def lanes_of(dtype: str, limits: CpuLimits) -> int:
    """Return how many elements of a type a vector register holds."""
    return max(1, limits.vector_bytes // element_bytes(dtype))


def find_panel(load: TensorLoad, column: Var) -> int | None:
    """Return the panel width of an operand read as `[column // width, k, column % width]`, None for any other.

    Bytes are read as `[column // width, k // 4, column % width, k % 4]`.
    """
    if len(load.indices) not in (3, 4):
        return None
    first, _, last, *byte = load.indices
    if byte and not (isinstance(byte[0], tirx.FloorMod) and static_extent(byte[0].b) == BYTES_OF_WORD):
        return None
    if not isinstance(first, tirx.FloorDiv) or not isinstance(last, tirx.FloorMod):
        return None
    width = static_extent(last.b)
    plain = first.a.same_as(column) and last.a.same_as(column)
    return width if plain and width is not None and static_extent(first.b) == width else None


def needs_padding(con: TiledContraction, tile: Tile) -> bool:
    """Whether the vector axis is symbolic or no multiple of the tile's columns."""
    columns = con.block.extents[con.column]
    return columns is None or columns % tile.columns != 0


def axis_extent(block: ScheduledBlock, position: int) -> float:
    """Return the extent of a block's iterator, infinity when symbolic."""
    extent = block.extents[position]
    return math.inf if extent is None else extent


def stride_is_one(load: TensorLoad, var: Var) -> bool:
    """Whether the load's last index, and no other, moves with the variable, one element a step."""
    *leading, last = list(load.indices)
    if any(var in used_vars(index) for index in leading) or var not in used_vars(last):
        return False
    terms = [last]
    while terms:
        term = terms.pop()
        if term.same_as(var):
            return True
        if isinstance(term, tirx.Add):
            terms += [term.a, term.b]
    return False
