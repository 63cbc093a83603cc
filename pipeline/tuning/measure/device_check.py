"""Compare a candidate's outputs where they are: on the GPU, with a reference that is kept there.

The logits of GPT-2 are 400 MB; to copy them back and to compare them on the host takes half a second a candidate, where
a kernel takes less than a millisecond and hands back 512 numbers.

The kernel says "right" or "ask the host". It accepts what `pipeline.tuning.measure.wrong_result` accepts, with bounds
narrower by `_MARGIN`, more than its float32 arithmetic and the host's can differ by. A doubtful output is copied back
and judged by the host against the reference in its file. So every verdict and every message is the host's, and a kernel
that overwrote the reference on the device cannot have the next one refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import tvm
from tvm import s_tir, te, tirx

from relaxtune.pipeline.codegen.finish import device_toolchain
from relaxtune.pipeline.errors import LoweringError
from relaxtune.schedules.targets.capabilities import native_arch

logger = logging.getLogger(__name__)

# Smaller outputs are on the host sooner than a kernel for their dtype is compiled.
SMALLEST = 1 << 16

_BLOCKS, _THREADS = 512, 256
_FLOATS = ("float16", "bfloat16", "float32")
_INTEGERS = ("int8", "uint8", "int32", "int64")
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
# Of both bounds; a float32 operation rounds by 6e-8, and there are three.
_MARGIN = 1e-6


class DeviceCheck:
    """Compares arrays of one device; the kernels are compiled when their dtype is first met.

    `device` is a CUDA device, or a CPU, where tests run the same comparison.
    """

    def __init__(self, device: tvm.runtime.Device) -> None:
        self._device = device
        self._target = tvm.target.Target("llvm")
        if int(device.dlpack_device_type()) != int(tvm.cpu().dlpack_device_type()):
            gpu = {"kind": "cuda", "arch": native_arch(str(device.compute_version))}
            self._target = tvm.target.Target(gpu, host="llvm")
        self._counts = tvm.runtime.empty((_BLOCKS,), "int32", device)

    def is_right(self, output: tvm.runtime.Tensor, expected: tvm.runtime.Tensor, rtol: float, absolute: float) -> bool:
        """Whether every element is surely within tolerance; False asks for a comparison on the host.

        `output`, `expected`: both of one shape and dtype, on the device. `rtol`, `absolute`: `|output - expected| <=
        rtol * |expected| + absolute`; NaN and infinities where they are expected. Integers must be equal.
        """
        dtype = str(output.dtype)
        kernel = compile_check(dtype, self._target) if dtype in _FLOATS + _INTEGERS else None
        if kernel is None:
            return False
        flat = [tensor._create_view((int(np.prod(tensor.shape)),)) for tensor in (output, expected)]
        kernel(*flat, rtol * (1 - _MARGIN), absolute * (1 - _MARGIN), self._counts)
        return not self._counts.numpy().any()


@cache
def compile_check(dtype: str, target: tvm.target.Target) -> Callable[..., None] | None:
    """Return the comparison of two arrays, compiled; None where the machine has no compiler for its device."""
    try:
        with device_toolchain(target), target:
            return tvm.compile(check_module(dtype, target), target)["main"]  # type: ignore[no-any-return]
    except LoweringError as e:
        logger.warning("outputs are compared on the host, which takes longer: %s", e)
        return None


def check_module(dtype: str, target: tvm.target.Target) -> tvm.ir.IRModule:
    """Return the comparison as a scheduled module.

    Its `main(output, expected, rtol, absolute, counts)` takes two arrays [n] of a dtype, two float32 numbers, and
    writes to `counts` [512] int32 how many elements of each block's share it doubts.
    """
    size, rtol, absolute = tirx.Var("n", "int64"), tirx.Var("rtol", "float32"), tirx.Var("absolute", "float32")
    output, expected = (te.placeholder((size,), dtype, name=name) for name in ("output", "expected"))
    stride = _BLOCKS * _THREADS
    row = te.reduce_axis((0, tirx.floordiv(size + stride - 1, stride)), "row")
    thread = te.reduce_axis((0, _THREADS), "thread")

    def doubtful(block: tirx.Var) -> tvm.ir.Expr:
        at = row * stride + block * _THREADS + thread
        right = _is_right(output[at], expected[at], rtol, absolute)
        one, none = tirx.const(1, "int32"), tirx.const(0, "int32")
        return te.sum(tirx.if_then_else(at < size, tirx.Select(right, none, one), none), axis=[row, thread])

    counts = te.compute((_BLOCKS,), doubtful, name="counts")
    schedule = s_tir.Schedule(te.create_prim_func([output, expected, rtol, absolute, counts]))
    if target.kind.name == "cuda":
        block, over, within = schedule.get_loops(schedule.get_sblock("counts"))
        schedule.reorder(block, within, over)
        schedule.bind(block, "blockIdx.x")
        schedule.bind(within, "threadIdx.x")
    return schedule.mod


def _is_right(got: tvm.ir.Expr, want: tvm.ir.Expr, rtol: tirx.Var, absolute: tirx.Var) -> tvm.ir.Expr:
    if str(got.dtype) not in _FLOATS:
        return got == want
    got, want = got.astype("float32"), want.astype("float32")
    size = tirx.abs(want)
    near = tirx.all(size <= _LARGEST_FLOAT32, tirx.abs(got - want) <= size * rtol + absolute)
    return tirx.any(near, got == want, tirx.all(tirx.isnan(got), tirx.isnan(want)))
