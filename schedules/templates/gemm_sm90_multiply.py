"""The multiplication of the kernel of `schedules.templates.gemm_sm90`: wgmma instructions and their descriptors."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from schedules.templates.epilogue import MatmulFunction
from schedules.templates.gemm_sm90_plan import BLOCK_K, ELEMENT_BYTES, PTX_TYPES, SWIZZLES, GemmPlan


class Multiply:
    """The wgmma instructions of one stage.

    Matrix descriptors hold addresses and byte offsets in units of 16 bytes. With rows of K swizzled 128 bytes, 8 rows
    ("stride") are 1024 bytes apart, and 16 elements of K are 32 bytes further along the row. With rows of N swizzled
    2*w bytes, 8 rows of K are 16*w bytes apart ("stride"), chunks of w columns 64 such rows ("leading"), and 16
    elements of K are 16 rows further.
    """

    def __init__(self, matmul: MatmulFunction, plan: GemmPlan) -> None:
        self._plan = plan
        self._transposed = matmul.b_transposed
        kind = PTX_TYPES[matmul.input_dtype]
        self._instruction = f"wgmma.mma_async.sync.aligned.m64n{plan.parameters.block_n}k16.f32.{kind}.{kind}"

    def describe_a(self, descriptor: tirx.Expr, address: tirx.Expr) -> None:
        """Emit the descriptor of A's tile in stage 0."""
        T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptor), address, 1, 64, 3))

    def describe_b(self, descriptor: tirx.Expr, address: tirx.Expr) -> None:
        """Emit the descriptor of B's tile in stage 0."""
        chunk = self._plan.chunk
        row_units = chunk * ELEMENT_BYTES // 16
        fields = (1, 64, 3) if self._transposed else (BLOCK_K * row_units, 8 * row_units, SWIZZLES[chunk])
        T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptor), address, *fields))

    def emit(
        self, accumulators: tirx.Var, base_a: tirx.Expr, base_b: tirx.Expr, stage: tirx.Expr, step: tirx.Expr
    ) -> None:
        """Emit one stage's products; the first step of a tile overwrites the accumulators."""
        p = self._plan.parameters
        units_a, units_b = (size * BLOCK_K * ELEMENT_BYTES // 16 for size in (p.block_m, p.block_n))
        step_b = 2 if self._transposed else 16 * self._plan.chunk * ELEMENT_BYTES // 16
        lanes = p.block_n // 2
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        for part in range(BLOCK_K // 16):
            for block in range(self._plan.m_blocks):
                offset_a = stage * units_a + block * (64 * BLOCK_K * ELEMENT_BYTES // 16) + part * 2
                offset_b = stage * units_b + part * step_b
                T.evaluate(
                    T.ptx[self._instruction](
                        *(accumulators[block * lanes + lane] for lane in range(lanes)),
                        base_a + tirx.Cast("uint64", offset_a),
                        base_b + tirx.Cast("uint64", offset_b),
                        tirx.const(True, "bool") if part else step > 0,
                        1,
                        1,
                        0,
                        int(not self._transposed),
                    )
                )
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
