"""How much a result may differ from its reference: of a whole model, and of one kernel. One place, with the reasons.

**A model.** A test element passes when ``|got - expected| <= atol * RMS + rtol * |expected| + conditioning``, where RMS
is the root mean square of the expected output. Rounding errors follow the size of the values that were summed, not of
the sum: a logit near 0 among logits of size 30 carries the error of its neighbours.

`conditioning` is 0 unless an output fails without it. It is 4 times how far ONNX Runtime's own output moves when every
weight and input is rounded once more, or when its graph optimisations are on: a graph that cancels large values, or a
quantiser's tie, moves by much, and no implementation agrees with another there. A wrong kernel does not move it. The
mean error is held against the mean move too: a tie moves few values by a step, a wrong kernel all of them.

Where the numbers come from. Rounding to a format with unit roundoff u perturbs each intermediate tensor by about u of
its size. A dot product of K terms adds about sqrt(K) * u of the accumulator (errors of random sign). A transformer of
depth L applies some 10 L such steps, whose errors add like sqrt(10 L) as residual additions and normalisations keep the
size of the stream constant; L = 32 gives 18. A factor 4 to 8 above the expected maximum separates rounding from bugs: a
wrong mask, axis or epilogue shows as 0.1 and more.

- float32, accumulated in float32: u = 6e-8, sqrt(8192) * u = 5e-6, times 18 is 1e-4. Measured on bert-base, two
  schedules: 8e-6.
- float16 storage, float32 accumulators: u = 5e-4 dominates the accumulator; times 18 is 9e-3. The reference is
  the float32 original (or the float16 graph computed in float32), so this bounds the drift against the exact value.
- float16 storage, float16 accumulators: sqrt(4096) * 5e-4 = 3e-2 for one dot product alone.
- bfloat16 storage, float32 accumulators: u = 4e-3, times 18 is 7e-2.
- int8, int32 accumulators (of graphs that come quantised): the sums are exact, the reference's are rounded. Where a
  value lies beside a tie of a quantiser behind them, it takes the next step, and what follows differs by some steps;
  255 of them span 6 to 8 RMS, so one is 3e-2. Elements that no tie reaches are equal.
- float8, float32 accumulators: u = 6e-2 of what matmuls read, and a norm after two of them keeps errors from growing
  with the depth as sqrt(10 L). The reference rounds rows to float8 too, but halves beside a tie take the other side, so
  after some layers the roundings of both are independent: bert-base needs 0.21 between two of ONNX Runtime's own runs.
- integers and booleans: equal.

**A kernel** (a tuning candidate) is compared on arguments uniform in [-1, 1) with a reference that sums in another
order: ``|got - expected| <= rtol * |expected| + atol * max|expected| + accumulated``. Honest differences are:

- the last rounding of a value, and vectorised or GPU intrinsics: `rtol`, a few eps of the coarsest dtype stored, at
  least 32 ulp of float32 (CUDA's `__expf`, into which TVM turns every `exp`, is off by 2 + 1.17 |x| ulp);
- roundings of intermediates, which cancellation lets through, as much relative to the largest value: `atol`;
- a sum in another order: about eps * sqrt(K) relative to the largest value, in `atol` too;
- for a sum of K products, the same in absolute terms, `accumulated`. Products of such arguments have variance 1/9, so
  the partial sum of j terms has size sqrt(j)/3; rounding each to unit roundoff u adds errors of random sign, together
  u * sqrt(1/9 + 2/9 + ... + K/9) = u * K / (3 sqrt 2). The factor 16 is five standard deviations (the largest of a
  million elements), two results, and a margin of 2. Without this term an epilogue that squashes (tanh, sigmoid) would
  make the largest output, and so the bound, much smaller than the accumulators whose error passes through its steep
  part.

Numbers that are rounded to integers of 8 bits may lie beside a tie, and take the next step: where they are off by
`rtol` of at most 255 steps, 32 ulp, that is one of a thousand elements (`steps`). None is off by more than a step.

At K = 3072 in float32 `accumulated` is 7e-4, where one lost term of the sum is 0.25 in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import tvm
from tvm import tirx

from relaxtune.pipeline.arrays import numpy_dtype
from relaxtune.schedules.tir.blocks import Block, list_blocks
from relaxtune.schedules.tir.contraction import find_contraction
from relaxtune.schedules.tir.expressions import find_all, list_loads


@dataclass(frozen=True)
class Tolerance:
    """Relative and absolute tolerance; `atol` is in units of the output's root mean square where that is above 1."""

    rtol: float
    atol: float


@dataclass(frozen=True)
class KernelTolerance:
    """Accepted difference: `rtol` of each value, `atol` of the output's largest magnitude, plus `accumulated`.

    An output's last axis may hold several `quantities` of different size, each then held against its own largest.
    Of integers of 8 bits, the part `steps` of the elements may be one off.
    """

    rtol: float
    atol: float
    accumulated: float = 0.0
    quantities: int = 1
    steps: float = 0.0


EXACT = Tolerance(0.0, 0.0)
EXACT_KERNEL = KernelTolerance(0.0, 0.0)


@dataclass(frozen=True)
class ToleranceRow:
    """One row of the table: the tolerance of models that store in `storage` and sum at most `reduction_max` products.

    `reduction_max` None is any length; rows of one pair of dtypes stand in the order of their lengths.
    """

    storage: str
    accumulator: str
    reduction_max: int | None
    tolerance: Tolerance
    reason: str


# The table of whole models; `docs/validation.md` shows it.
TOLERANCE_TABLE = (
    ToleranceRow("float64", "float64", None, Tolerance(1e-9, 1e-9), "18 sqrt(131072) u = 7e-13, and libm's functions"),
    ToleranceRow("float32", "float32", 8192, Tolerance(1e-4, 1e-4), "u = 6e-8, 18 sqrt(8192) u = 1e-4"),
    ToleranceRow("float32", "float32", None, Tolerance(4e-4, 4e-4), "18 sqrt(131072) u = 4e-4"),
    ToleranceRow("float16", "float32", None, Tolerance(2e-2, 2e-2), "u = 4.9e-4 of the storage, 2 x 18 u = 2e-2"),
    ToleranceRow("float16", "float16", 4096, Tolerance(1e-1, 1e-1), "3 x sqrt(4096) u = 0.1 in a dot product"),
    ToleranceRow("bfloat16", "float32", None, Tolerance(1e-1, 1e-1), "u = 3.9e-3 of the storage, 18 u = 7e-2"),
    ToleranceRow("int8", "int32", None, Tolerance(1e-1, 1e-1), "a step is 3e-2 RMS; a tie may differ by a step"),
    ToleranceRow("float8_e4m3fn", "float32", None, Tolerance(4e-1, 4e-1), "u = 6e-2 of what is multiplied, 6 u"),
)  # fmt: skip

# A tensor this many roundings from the inputs, or nearer, is given the tolerance of that depth.
_SHALLOW = 10

# Of a kernel: eps of the coarsest dtype for the roundings of a value, and of eps * sqrt(K) for a sum's.
_ROUNDINGS = 4.0
_SUM_FACTOR = 2.0
_INTRINSICS_RTOL = 32 * 2.0**-23
_STEPS = 255 * _INTRINSICS_RTOL
# Times unit roundoff times K, see above.
_ACCUMULATION = 16.0 / (3.0 * math.sqrt(2.0))

# Compute precision of the pipeline -> what it stores and accumulates in.
# The reference of quantised weights has the same ones (`pipeline.precision.onnx_weights`); tf32 has float16's mantissa.
_PRECISIONS = {
    "fp32": ("float32", "float32"),
    "tf32": ("float16", "float32"),
    "fp16": ("float16", "float32"),
    "bf16": ("bfloat16", "float32"),
    "w8a16": ("float16", "float32"),
    "w4a16": ("float16", "float32"),
    "fp8": ("float8_e4m3fn", "float32"),
    "int8": ("int8", "int32"),
}


def model_tolerance(compute_dtype: str, precision: str | None = None, reduction: int = 0) -> Tolerance:
    """Return the default tolerance of a model's outputs.

    The graph as given computes in `compute_dtype` (its widest common float: "float32", "float16", ...), unless a
    `precision` overrides it; its longest sum adds up `reduction` products.
    """
    if precision is not None:
        dtypes = _PRECISIONS[precision]
    else:
        dtypes = (compute_dtype, "float64" if compute_dtype == "float64" else "float32")
    rows = [row for row in TOLERANCE_TABLE if (row.storage, row.accumulator) == dtypes]
    for row in rows:
        if row.reduction_max is None or reduction <= row.reduction_max:
            return row.tolerance
    return rows[-1].tolerance if rows else EXACT


def storage_roundoff(compute_dtype: str, precision: str | None = None) -> float:
    """Return the unit roundoff of what a model's tensors are stored in; arguments as of `model_tolerance`."""
    storage = compute_dtype if precision is None else _PRECISIONS[precision][0]
    # Of float8 are the operands of matmuls alone; what is stored between kernels are halves.
    storage = "float16" if storage == "float8_e4m3fn" else storage
    return (_eps(storage) or _eps("float32")) / 2


def tensor_tolerance(outputs: Tolerance, depth: int, deepest: int) -> Tolerance:
    """Return the tolerance of a tensor inside a model, so that drift that has just begun is not taken for none.

    Errors grow with the square root of the roundings passed, so a tensor at `depth` of `deepest` may be off by the
    square root of that share of what the outputs may; the shallowest are given some more.
    """
    share = math.sqrt((min(depth, deepest) + _SHALLOW) / (deepest + _SHALLOW))
    return Tolerance(outputs.rtol * share, outputs.atol * share)


def kernel_tolerance(func: tirx.PrimFunc, output: int | None = None) -> KernelTolerance:
    """Return the tolerance for the outputs of an unscheduled PrimFunc; integers that no float is rounded to are equal.

    With the position of one output, that which follows from what this one is computed by.
    """
    blocks = list_blocks(func)
    if output is not None:
        blocks = _blocks_behind(blocks, func.params[output])
    coarsest = max((_eps(str(store.buffer.dtype)) for block in blocks for store in block.stores), default=0.0)
    steps = _STEPS if any(_rounds_to_bytes(store) for block in blocks for store in block.stores) else 0.0
    if coarsest == 0.0:
        return replace(EXACT_KERNEL, steps=steps)
    sums = [
        _eps(str(store.buffer.dtype)) * math.sqrt(math.prod(block.reduced_sizes))
        for block in blocks
        if block.reduced
        for store in block.stores
    ]
    products = [
        _eps(str(contraction.output.dtype)) / 2 * contraction.k
        for block in blocks
        if (contraction := find_contraction(block))
    ]
    return KernelTolerance(
        rtol=max(_ROUNDINGS * coarsest, _INTRINSICS_RTOL),
        atol=_ROUNDINGS * coarsest + _SUM_FACTOR * max(sums, default=0.0),
        accumulated=_ACCUMULATION * max(products, default=0.0),
        steps=steps,
    )


def _rounds_to_bytes(store: tirx.BufferStore) -> bool:
    """Whether what is stored are integers of 8 bits that floats are rounded to, directly or as wider integers first."""
    if str(store.buffer.dtype) not in ("int8", "uint8"):
        return False
    casts = find_all(store.value, tirx.Cast)
    return any(_eps(str(cast.ty.dtype)) == 0 < _eps(str(cast.value.ty.dtype)) for cast in casts)


def _blocks_behind(blocks: Sequence[Block], output: tvm.ir.Var) -> list[Block]:
    """Return the blocks that a buffer depends on."""
    needed, read = [], [output]
    for block in reversed(blocks):
        if any(store.buffer.same_as(buffer) for store in block.stores for buffer in read):
            needed.append(block)
            read += [load.source for store in block.stores for load in list_loads(store.value)]
    return needed


def symbolic_kernel_tolerance(dtypes: Iterable[str], longest: int) -> KernelTolerance:
    """Return the tolerance of a kernel whose sums have lengths that are known only at run time.

    `dtypes` are those of its parameters; no sum over one axis exceeds `longest`, the largest axis of its arguments.
    """
    coarsest = max(map(_eps, dtypes), default=0.0)
    if coarsest == 0.0:
        return EXACT_KERNEL
    single = float(np.finfo(np.float32).eps)
    return KernelTolerance(
        rtol=max(_ROUNDINGS * coarsest, _INTRINSICS_RTOL),
        atol=_ROUNDINGS * coarsest + _SUM_FACTOR * single * math.sqrt(longest),
        accumulated=_ACCUMULATION * single / 2 * longest,
    )


def output_scale(expected: np.ndarray) -> float:
    """Return what `atol` is in units of: the root mean square of the finite expected values; 1 where all are 0."""
    values = expected[np.isfinite(expected)].astype(np.float64) if expected.dtype.kind in "fV" else np.zeros(0)
    return (float(np.sqrt(np.mean(values**2))) if values.size else 0.0) or 1.0


def _eps(dtype: str) -> float:
    kind = numpy_dtype(dtype)
    return 0.0 if kind.kind in "iub" else float(ml_dtypes.finfo(kind).eps)
