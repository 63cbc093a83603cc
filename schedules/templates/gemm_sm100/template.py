"""Experimental: matrix multiplication with an elementwise epilogue by tcgen05 (sm_100a, sm_103a, sm_110a), in TIRx.

It assembles, and has never run: there was no such GPU. No task is given it: it is made for who asks for it by name,
`schedules.registry.apply_decision` with a decision of this template.

Notation
--------
::

    C[m, n] = epilogue(sum_k A[m, k] * B[n, k], m, n)

    A [M, K], B [N, K]  row major, float16 or bfloat16
    C [M, N]            row major; leading axes of A and C are flattened into M

A block of six warps makes a tile of 128 x 128, whose sums are float32 in 128 columns of tensor memory: row m in lane m.

- warp 4: one thread of it loads tiles of A and B (TMA, rows of 128 bytes, swizzled) into a ring of `stages` stages;
- warp 5: takes the columns of tensor memory; one thread of it multiplies, 16 of K at a time, and lets each stage's
  barrier `empty`, and at last `done`, know when its instructions are complete (tcgen05.commit); it gives them back;
- warps 0 to 3: wait for `done` and read 32 lanes each, all that a warp may read of tensor memory by its number modulo
  4. As `16x256b`, a load gives lanes what mma.sync would: `schedules.templates.output.output_tile` does the rest.

TMA fills what lies outside A and B with zeros, so K may be ragged, in multiples of 8.

Source: PTX ISA 9.0, "TensorCore 5th Generation Family Instructions": allocation, matrix shapes (M 128, N a multiple of
16), data movement shapes, data path layout D (M 128), memory consistency model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import constant_params
from relaxtune.schedules.targets import CudaLimits, Feature, ResolvedTarget
from relaxtune.schedules.templates.base import KernelTemplate, Parameters, cuda_limits, refuse_target
from relaxtune.schedules.templates.gemm_sm100.kernel import ROWS, TILE_BYTES, build_kernel, output_shares
from relaxtune.schedules.templates.output.output_shares import shared_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul

_DTYPES = ("float16", "bfloat16")
_OUTPUTS = (*_DTYPES, "float32")
_STAGES_MAX = 8
# Barriers, the address of tensor memory, and what aligns them.
_BESIDE_BYTES = 1024
_INDEX_MAX = 2**31 - 1
_ALIGNED = 8


@dataclass(frozen=True)
class GemmParameters(Parameters):
    """The depth of the ring of tiles, and rows of tiles that are made column by column before the next ones."""

    template: ClassVar[str] = "gemm_sm100_experimental"

    stages: int = 4
    group: int = 1


class GemmSm100(KernelTemplate[MatmulFunction, GemmParameters]):
    """The template; see `schedules.templates.base.KernelTemplate`. It is not one of `schedules.registry.TEMPLATES`."""

    parameters = GemmParameters

    def propose(
        self, func: tirx.PrimFunc, found: MatmulFunction, target: ResolvedTarget
    ) -> Sequence[GemmParameters] | Refusal:
        """Return one ring, for who asks this template itself."""
        return [GemmParameters(4, min(8, math.ceil(found.m / ROWS)))]

    def make(
        self, func: tirx.PrimFunc, found: MatmulFunction, target: ResolvedTarget, parameters: GemmParameters
    ) -> tirx.PrimFunc | Refusal:
        """Return the scheduled PrimFunc, or why it cannot be made."""
        refused = _refuse_parameters(found, parameters, cuda_limits(target))
        if refused is not None:
            return refused
        return build_kernel(func, found, parameters.stages, parameters.group, constant_params(func))

    def recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> MatmulFunction | Refusal:
        """Return the function's matmul when this template can make it."""
        return refuse_target(target, Feature.TMA, Feature.TCGEN05) or _recognise(func)


def _refuse_parameters(matmul: MatmulFunction, p: GemmParameters, limits: CudaLimits) -> Refusal | None:
    if not 2 <= p.stages <= _STAGES_MAX or p.group < 1:
        return Refusal(f"stages is {p.stages} and group {p.group}, expected 2 to {_STAGES_MAX} and 1 or more")
    total = p.stages * 2 * TILE_BYTES + shared_bytes(matmul, output_shares()) + _BESIDE_BYTES
    if total > limits.shared_bytes_optin:
        return Refusal(f"{total} bytes of shared memory, the target has {limits.shared_bytes_optin}")
    return None


def _recognise(func: tirx.PrimFunc) -> MatmulFunction | Refusal:
    matmul = recognise_matmul(func)
    if isinstance(matmul, Refusal):
        return matmul
    if matmul.input_dtype not in _DTYPES:
        return Refusal(f"the operands are {matmul.input_dtype}, expected one of {', '.join(_DTYPES)}")
    if matmul.output_dtype not in _OUTPUTS:
        return Refusal(f"the output is {matmul.output_dtype}, expected one of {', '.join(_OUTPUTS)}")
    if not matmul.b_transposed:
        return Refusal("B is [K, N], expected [N, K]")
    if matmul.norm is not None or matmul.partials is not None:
        return Refusal("it has statistics of rows, which this template does not make")
    if matmul.epilogue.accumulators > 1 or matmul.epilogue.head:
        return Refusal("columns of the product are taken together, which this template does not do")
    if matmul.k % _ALIGNED:
        return Refusal(f"K is {matmul.k}, expected a multiple of {_ALIGNED} (TMA strides are multiples of 16 bytes)")
    if max(matmul.m * matmul.n, matmul.m * matmul.k, matmul.n * matmul.k) > _INDEX_MAX:
        return Refusal("a matrix has 2**31 elements or more, the kernel counts in 32 bits")
    return matmul
