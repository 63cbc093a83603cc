"""The multiplications of the kernel of `schedules.templates.attention_sm90`: wgmma instructions and descriptors."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from schedules.templates.attention_sm90_plan import CHUNK, PTX_TYPES, ROWS, AttentionPlan

# Units of 16 bytes of one swizzled row of shared memory.
_ROW_UNITS = 8
_SWIZZLE_128 = 3


class AttentionMultiply:
    """The wgmma instructions of one block of keys.

    Matrix descriptors hold addresses and byte offsets in units of 16 bytes. Every tile is stored in chunks of 64
    columns, 128-byte rows swizzled 128 bytes. Q and K are read along their rows ("K-major"): 8 rows ("stride") are 1024
    bytes apart, 16 columns 32 bytes further along the row. V is read along its columns ("MN-major"): 8 rows are 1024
    bytes apart ("stride"), chunks of 64 columns `block_k` rows ("leading"), and 16 keys are 16 rows further.
    """

    def __init__(self, plan: AttentionPlan, dtype: str) -> None:
        self._plan = plan
        kind = PTX_TYPES[dtype]
        instruction = "wgmma.mma_async.sync.aligned.m64n{}k16.f32." + f"{kind}.{kind}"
        self._scores = instruction.format(plan.parameters.block_k)
        self._values = instruction.format(plan.spec.head_dim)
        self._query, self._key, self._value = (T.alloc_local([1], "uint64")[0] for _ in range(3))

    def describe(self, query: tirx.Expr, key: tirx.Expr, value: tirx.Expr) -> None:
        """Emit the descriptors of a warpgroup's first row of Q and of the first stages of K and V."""
        leading = self._plan.parameters.block_k * _ROW_UNITS
        for descriptor, address, distance in (
            (self._query, query, 1),
            (self._key, key, 1),
            (self._value, value, leading),
        ):
            fields = (distance, 8 * _ROW_UNITS, _SWIZZLE_128)
            T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptor), address, *fields))

    def scores(self, scores: tirx.Var, stage: tirx.Expr) -> None:
        """Emit `scores = Q K^T` for the keys of a stage, not waited for."""
        plan = self._plan
        rows, keys = plan.rows, plan.parameters.block_k
        first = stage * (plan.chunks * keys * _ROW_UNITS)
        lanes = [scores[lane] for lane in range(keys // 2)]
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        for step in range(plan.columns // 16):
            chunk, part = divmod(step, CHUNK // 16)
            query = self._query + tirx.const(chunk * rows * _ROW_UNITS + part * 2, "uint64")
            key = self._key + tirx.Cast("uint64", first + (chunk * keys * _ROW_UNITS + part * 2))
            T.evaluate(T.ptx[self._scores](*lanes, query, key, tirx.const(step > 0, "bool"), 1, 1, 0, 0))
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())

    def values(self, output: tirx.Var, weights: tirx.Var, stage: tirx.Expr) -> None:
        """Emit `output += P V` for the keys of a stage, P in registers, not waited for."""
        plan = self._plan
        keys = plan.parameters.block_k
        first = stage * (plan.chunks * keys * _ROW_UNITS)
        lanes = [output[lane] for lane in range(plan.spec.head_dim // 2)]
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        for step in range(keys // 16):
            value = self._value + tirx.Cast("uint64", first + step * 16 * _ROW_UNITS)
            words = [weights[step * 4 + word] for word in range(4)]
            T.evaluate(T.ptx[self._values](*lanes, *words, value, tirx.const(True, "bool"), 1, 1, 1))
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())

    def first_row(self, group: tirx.Expr) -> tirx.Expr:
        """Return the row of a warpgroup's first query in the tile of Q."""
        return group * ROWS
