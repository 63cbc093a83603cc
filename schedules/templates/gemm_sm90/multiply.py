"""The multiplication of the kernel of `template.py`: wgmma instructions and their descriptors."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.hopper import instruction, matrix_descriptor
from relaxtune.schedules.templates.emit.registers import in_register
from relaxtune.schedules.templates.gemm_sm90.operands import ROW_BYTES, STEP_BYTES
from relaxtune.schedules.templates.gemm_sm90.plan import SWIZZLES, GemmPlan
from relaxtune.schedules.tir.epilogue import MatmulFunction


class Multiply:
    """The wgmma instructions of one stage.

    Matrix descriptors hold addresses and byte offsets in units of 16 bytes. With rows of K swizzled 128 bytes, 8 rows
    ("stride") are 1024 bytes apart, and an instruction's elements of K (16, or 32 of 8 bits) are 32 bytes further along
    the row. With rows of N swizzled 2*w bytes (16-bit operands), 8 rows of K are 16*w bytes apart ("stride"), chunks of
    w columns 64 such rows ("leading"), and 16 elements of K are 16 rows further; what each block of a `multicast`
    cluster loads, 64 / `multicast` rows of all columns, is laid out so by itself.
    Where no instruction has all of a tile's columns, two have half of them each.
    """

    def __init__(self, matmul: MatmulFunction, plan: GemmPlan) -> None:
        self._plan = plan
        self._transposed = matmul.b_transposed
        operands = plan.operands
        self._instruction = operands.instruction(plan.columns)
        self._modifiers = operands.modifiers(transposed=matmul.b_transposed)

    def describe(self, address_a: tirx.Expr, address_b: tirx.Expr) -> None:
        """Emit the descriptors of A's and B's tiles in stage 0."""
        self._low_a, self._with_low_a = self._described(address_a, 1, 64, 3)
        if self._transposed:
            self._low_b, self._with_low_b = self._described(address_b, 1, 64, 3)
            return
        chunk = self._plan.chunk
        row_units = chunk * self._plan.operands.bytes // 16
        fields = (self._plan.rows_b * row_units, 8 * row_units, SWIZZLES[chunk])
        self._low_b, self._with_low_b = self._described(address_b, *fields)

    @staticmethod
    def _described(
        address: tirx.Expr, leading: int, stride: int, swizzle: int
    ) -> tuple[tirx.Expr, Callable[[tirx.Expr], tirx.Expr]]:
        low, with_low = matrix_descriptor(address, leading, stride, swizzle)
        return in_register(low, "int32"), with_low

    def _units_b(self, part: int, column: int) -> int:
        """Return the offset of an instruction's rows of K, from a column on, in B's tile, in units of 16 bytes."""
        if self._transposed:
            return (part * STEP_BYTES + column * ROW_BYTES) // 16
        rows, chunk, size = self._plan.rows_b, self._plan.chunk, self._plan.operands.bytes
        k = part * STEP_BYTES // size
        return (k // rows * rows * self._plan.parameters.block_n + k % rows * chunk) * size // 16

    def emit(self, accumulators: tirx.Var, stage: tirx.Expr, adds: tirx.Expr) -> None:
        """Emit one stage's products, which are added to the accumulators or overwrite them."""
        plan, block_n = self._plan, self._plan.parameters.block_n
        units_a, units_b = (size * ROW_BYTES // 16 for size in (plan.rows_a, block_n))
        lanes = plan.columns // 2
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        for part in range(ROW_BYTES // STEP_BYTES):
            for block in range(plan.m_blocks):
                for column in range(0, block_n, plan.columns):
                    first = (block * block_n + column) // 2
                    offset_a = stage * units_a + block * (64 * ROW_BYTES // 16) + part * (STEP_BYTES // 16)
                    offset_b = stage * units_b + self._units_b(part, column)
                    T.evaluate(
                        instruction(self._instruction)(
                            *(accumulators[first + lane] for lane in range(lanes)),
                            self._with_low_a(self._low_a + offset_a),
                            self._with_low_b(self._low_b + offset_b),
                            tirx.const(True, "bool") if part else adds,
                            *self._modifiers,
                        )
                    )
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
