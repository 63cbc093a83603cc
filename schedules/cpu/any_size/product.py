"""The parts of the kernel of a matrix product: its roles, its largest tile, and how its loops are cut.

The loops are cut so that what is read again comes from the first two caches. Weights are packed in panels, and both
operands are longer than a cache. Of vectors as long as a line, the left operand waits in the second cache while a job's
panels pass; a block of one panel waits in the first cache while row tiles pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.any_size.emit import wide
from relaxtune.schedules.cpu.contraction import TiledContraction
from relaxtune.schedules.cpu.packing import LINE_BYTES
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.blocks import same_sizes, shape_of
from relaxtune.schedules.tir.contraction import are_axes
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock

# Of an element, or of the bytes along k that a lane multiplies in one step.
ELEMENT_BYTES = 4
# Rows that begin multiples of this apart share a set of the first cache, which holds as many lines as fit into it.
SET_STRIDE_BYTES = 4096

# Vectors narrower than a line: a block of a panel takes this part of the second cache at most, and tiles of so many
# rows read it, one after another, while the next one is fetched. Measured with panels of 3,072 and 4,096 rows, and
# vectors of 32 bytes.
_L2_SHARE, _GROUP_ROWS = 4, 224
# The first tiles fetch the next block together, each a share; more of them would take loads from the multiply-adds.
_FETCHING = 4
# Vectors of a line: a block takes this part of the first cache, beside which a tile of the left operand has room, and
# a part of a group's rows takes the share of the second cache above. Groups of 112 to 168 rows, and blocks of a third
# of the first cache to all of it, are within 2 %. All tiles of a group fetch the next block: where four of eight do, 64
# to 384 rows take 1.03 of the time, and where two do, 1.10, since lines on their way from memory are then too many.
_L1_SHARE = 2
# Panels of a job take this part of the second cache at most: a group's rows, and C, are there too. Where they may fill
# it, BERT-base takes 1.01 of the time with 256 tokens, and 1.003 with 384.
_PANELS_SHARE = 5, 8
_GROUP_ROWS_LINE = 140


@dataclass(frozen=True)
class Cut:
    """Sizes of the loops: a job computes `panels` panels of columns, one group of `tiles` row tiles after another.

    k has `parts`; all panels of a job read one part of the group's rows before the next one, and keep their sums. A
    part has `blocks` of `length` steps; all tiles of a group read one block of a panel before the next one. The first
    `fetching` tiles fetch that one. Many rows are shared among the `cores`, and jobs are of a core's rows.
    """

    panels: int = 1
    tiles: int = 1
    parts: int = 1
    blocks: int = 1
    length: int = 0
    fetching: int = _FETCHING
    cores: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether k is one block."""
        return self.parts * self.blocks == 1

    @property
    def all_fetch(self) -> bool:
        """Whether each tile of a group fetches a share of the next block."""
        return 1 < self.tiles <= self.fetching


def find_cut(con: TiledContraction, limits: CpuLimits, rows: int) -> Cut:
    """Return the cut for tiles of so many rows; where nothing is packed, or no cache is known, each tile is a group."""
    length = con.steps
    if con.panel is None or length is None or limits.l2_bytes is None or limits.l1_bytes is None:
        return Cut()
    step_bytes = con.panel * ELEMENT_BYTES
    if limits.vector_bytes < LINE_BYTES:
        blocks = _ceil(length * step_bytes, limits.l2_bytes // _L2_SHARE)
        return Cut(1, 1 if blocks == 1 else _GROUP_ROWS // rows, 1, blocks, _ceil(length, blocks))
    tiles = _GROUP_ROWS_LINE // rows
    parts = _ceil(length * tiles * rows * ELEMENT_BYTES, limits.l2_bytes // _L2_SHARE)
    blocks = _ceil(_ceil(length * step_bytes, limits.l1_bytes // _L1_SHARE), parts)
    columns = con.block.extents[con.column]
    panels = 1 if columns is None else _panels_of_job(columns // con.panel, length // parts * step_bytes, limits)
    return Cut(panels, tiles, parts, blocks, _ceil(length, parts * blocks), tiles, limits.cores)


def _panels_of_job(panels: int, panel_bytes: int, limits: CpuLimits) -> int:
    """Return the panels of one job: a core's share, or an equal part of it that has room in the second cache."""
    assert limits.l2_bytes is not None
    share, (part, of) = _ceil(panels, limits.cores), _PANELS_SHARE
    return _ceil(share, _ceil(share, max(1, limits.l2_bytes * part // of // panel_bytes)))


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


@dataclass(frozen=True)
class Product:
    """A product to make: its function, roles and largest tile; `epilogue` is None where C is the sum itself.

    `tiles_l2_bytes` is the second cache of a core with a tile unit, 0 where there is none or its cache is not known.
    """

    func: PrimFunc
    con: TiledContraction
    epilogue: ScheduledBlock | None
    vectors: int
    lanes: int
    rows: int
    cut: Cut = field(default_factory=Cut)
    tiles_l2_bytes: int = 0

    @property
    def block(self) -> ScheduledBlock:
        """The reduction block."""
        return self.con.block

    @property
    def sums_dtype(self) -> str:
        """The dtype of the sums."""
        return "float32" if self.con.group == 1 else "int32"

    @property
    def is_symbolic(self) -> bool:
        """Whether its rows, columns or k are known when the kernel is called."""
        axes = (*self.con.rows, self.con.column, *self.con.reduce)
        return any(self.block.extents[axis] is None for axis in axes)

    @property
    def row_count(self) -> tirx.Expr:
        """Rows of all axes of rows."""
        return wide(math.prod(self.block.sizes[axis] for axis in self.con.rows))

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.vectors * self.lanes

    @property
    def columns(self) -> Size:
        """Columns of C, which may be fewer than those of whole panels."""
        last = self.epilogue or self.block
        place = self.block.spatial.index(self.block.axes[self.con.column])
        return last.sizes[place]

    @property
    def rows_follow_one_another(self) -> bool:
        """Whether all rows of the left operand lie at one distance, each from the one before, across all their axes."""
        con, block = self.con, self.block
        rows = [block.axes[axis] for axis in con.rows]
        axes = [*rows, block.axes[con.reduce[0]]]
        shape = shape_of(con.left.source)
        if not rows or shape is None or not are_axes(con.left.indices[-len(axes) :], axes):
            return False
        return same_sizes(shape[-len(axes) + 1 : -1], [block.sizes[axis] for axis in con.rows[1:]])
