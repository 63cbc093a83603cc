"""The multiplication of the kernel of `schedules.templates.gemm_sm90`: wgmma instructions and their descriptors."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script import builder as T

from schedules.templates.epilogue import MatmulFunction
from schedules.templates.gemm_sm90_plan import BLOCK_K, ELEMENT_BYTES, PTX_TYPES, SWIZZLES, GemmPlan
from schedules.templates.hopper import matrix_descriptor


class Multiply:
    """The wgmma instructions of one stage.

    Matrix descriptors hold addresses and byte offsets in units of 16 bytes. With rows of K swizzled 128 bytes, 8 rows
    ("stride") are 1024 bytes apart, and 16 elements of K are 32 bytes further along the row. With rows of N swizzled
    2*w bytes, 8 rows of K are 16*w bytes apart ("stride"), chunks of w columns 64 such rows ("leading"), and 16
    elements of K are 16 rows further; what each block of a `multicast` cluster loads, 64 / `multicast` rows of all
    columns, is laid out so by itself.
    """

    def __init__(self, matmul: MatmulFunction, plan: GemmPlan) -> None:
        self._plan = plan
        self._transposed = matmul.b_transposed
        kind = PTX_TYPES[matmul.input_dtype]
        self._instruction = f"wgmma.mma_async.sync.aligned.m64n{plan.parameters.block_n}k16.f32.{kind}.{kind}"

    def describe(self, address_a: tirx.Expr, address_b: tirx.Expr) -> None:
        """Emit the descriptors of A's and B's tiles in stage 0."""
        self._low_a, self._with_low_a = self._described(address_a, 1, 64, 3)
        if self._transposed:
            self._low_b, self._with_low_b = self._described(address_b, 1, 64, 3)
            return
        chunk = self._plan.chunk
        row_units = chunk * ELEMENT_BYTES // 16
        fields = (self._plan.rows_b * row_units, 8 * row_units, SWIZZLES[chunk])
        self._low_b, self._with_low_b = self._described(address_b, *fields)

    @staticmethod
    def _described(
        address: tirx.Expr, leading: int, stride: int, swizzle: int
    ) -> tuple[tirx.Expr, Callable[[tirx.Expr], tirx.Expr]]:
        low, with_low = matrix_descriptor(address, leading, stride, swizzle)
        register = T.alloc_local([1], "int32")
        T.buffer_store(register, low, [0])
        return register[0], with_low

    def _units_b(self, k: int) -> int:
        """Return the offset of row K = `k` in B's tile, in units of 16 bytes."""
        if self._transposed:
            return k * ELEMENT_BYTES // 16
        rows, chunk = self._plan.rows_b, self._plan.chunk
        return (k // rows * rows * self._plan.parameters.block_n + k % rows * chunk) * ELEMENT_BYTES // 16

    def emit(self, accumulators: tirx.Var, stage: tirx.Expr, adds: tirx.Expr) -> None:
        """Emit one stage's products, which are added to the accumulators or overwrite them."""
        p = self._plan.parameters
        units_a, units_b = (size * BLOCK_K * ELEMENT_BYTES // 16 for size in (self._plan.rows_a, p.block_n))
        lanes = p.block_n // 2
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        for part in range(BLOCK_K // 16):
            for block in range(self._plan.m_blocks):
                offset_a = stage * units_a + block * (64 * BLOCK_K * ELEMENT_BYTES // 16) + part * 2
                offset_b = stage * units_b + self._units_b(part * 16)
                T.evaluate(
                    T.ptx[self._instruction](
                        *(accumulators[block * lanes + lane] for lane in range(lanes)),
                        self._with_low_a(self._low_a + offset_a),
                        self._with_low_b(self._low_b + offset_b),
                        tirx.const(True, "bool") if part else adds,
                        1,
                        1,
                        0,
                        int(not self._transposed),
                    )
                )
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
