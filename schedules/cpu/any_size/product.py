"""What a kernel of a matrix product of symbolic size is made of: its roles, its largest tile, its cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.any_size.cut import Cut
from relaxtune.schedules.cpu.any_size.emit import wide
from relaxtune.schedules.cpu.contraction import TiledContraction
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.tir.blocks import same_sizes, shape_of
from relaxtune.schedules.tir.contraction import are_axes
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock


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
