"""The multiplications of the kernel of `template.py`: wgmma instructions and descriptors."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.attention_sm90.plan import CHUNK, AttentionPlan
from relaxtune.schedules.templates.emit.hopper import instruction, matrix_descriptor
from relaxtune.schedules.templates.emit.tensor_cores import MMA_KINDS

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
        kind = MMA_KINDS[dtype]
        instruction = "wgmma.mma_async.sync.aligned.m64n{}k16.f32." + f"{kind}.{kind}"
        self._scores = instruction.format(plan.parameters.block_k)
        self._values = instruction.format(plan.spec.value_dim)

    def describe(self, query: tirx.Expr, key: tirx.Expr, value: tirx.Expr) -> None:
        """Emit the descriptors of a warpgroup's first row of Q and of the first stages of K and V."""
        leading = self._plan.parameters.block_k * _ROW_UNITS
        self._query, self._key = (_Descriptor(address, 1) for address in (query, key))
        self._value = _Descriptor(value, leading)

    def scores(self, scores: tirx.Var, query_stage: tirx.Expr, stage: tirx.Expr) -> None:
        """Emit `scores = Q K^T` for the keys of a stage, not waited for."""
        plan = self._plan
        rows, keys = plan.rows, plan.parameters.block_k
        first = stage * (plan.chunks * keys * _ROW_UNITS)
        first_query = query_stage * (plan.query_chunks * rows * _ROW_UNITS)
        lanes = [scores[lane] for lane in range(keys // 2)]
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        for step in range(plan.columns // 16):
            chunk, part = divmod(step, CHUNK // 16)
            query = self._query.at(first_query + (chunk * rows * _ROW_UNITS + part * 2))
            key = self._key.at(first + (chunk * keys * _ROW_UNITS + part * 2))
            T.evaluate(instruction(self._scores)(*lanes, query, key, tirx.const(step > 0, "bool"), 1, 1, 0, 0))
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())

    def values(self, output: tirx.Var, weights: tirx.Var, stage: tirx.Expr) -> None:
        """Emit `output += P V` for the keys of a stage, P in registers, not waited for."""
        plan = self._plan
        keys = plan.parameters.block_k
        first = stage * (plan.value_chunks * keys * _ROW_UNITS)
        lanes = [output[lane] for lane in range(plan.spec.value_dim // 2)]
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        for step in range(keys // 16):
            value = self._value.at(first + step * 16 * _ROW_UNITS)
            words = [weights[step * 4 + word] for word in range(4)]
            T.evaluate(instruction(self._values)(*lanes, *words, value, tirx.const(True, "bool"), 1, 1, 1))
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())


class _Descriptor:
    """A matrix descriptor whose low half is held in a register."""

    def __init__(self, address: tirx.Expr, leading: int) -> None:
        low, self._with_low = matrix_descriptor(address, leading, 8 * _ROW_UNITS, _SWIZZLE_128)
        self._low = T.alloc_local([1], "int32")
        T.buffer_store(self._low, low, [0])

    def at(self, offset: tirx.Expr) -> tirx.Expr:
        """Return the descriptor of what lies further by some units of 16 bytes."""
        return self._with_low(self._low[0] + offset)
