"""Pass: tensors without elements, and what is computed of them, are numbers that are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.ir import called_function, dtype_of, is_op, shape_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.blocks import list_blocks

# The result of an operator over no elements at all; ONNX leaves a mean of none undefined, and ONNX Runtime makes it 0.
_OF_NONE: dict[str, Callable[[str], float]] = {
    **dict.fromkeys(("einsum", "matmul", "mean", "sum", "nn.conv1d", "nn.conv2d", "nn.conv3d"), lambda _dtype: 0),
    "max": lambda dtype: -math.inf if "float" in dtype else int(tirx.min_value(dtype)),
    "min": lambda dtype: math.inf if "float" in dtype else int(tirx.max_value(dtype)),
    "prod": lambda _dtype: 1,
}


def number_of_none(operator: str, dtype: str) -> float:
    """Return what an operator (`max`) makes of no elements of a dtype."""
    return _OF_NONE[operator](dtype)


def fill_empty(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with tensors of no elements, and sums, maxima and products of no elements, as constants.

    A kernel sets its result in the first step of its reduction. A reduction of no step leaves what was in memory, and
    TVM divides by the number of elements. A tensor joined to an empty one stays as it is: rotary embeddings
    of whole heads join the rest of them, which is none.
    """

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        value = binding.value
        if not isinstance(value, relax.Call) or is_op(value, "zeros"):
            return None
        if _is_empty(value):
            return relax.op.zeros(value.ty.shape, dtype_of(value))
        if is_op(value, "concat"):
            parts = list(_operands(value))
            kept = [new.of(part) for part in parts if not _is_empty(part)]
            if len(kept) == len(parts):
                return None
            return kept[0] if len(kept) == 1 else relax.op.concat(kept, value.attrs.axis)
        if is_op(value, *_OF_NONE) and shape_of(value) is not None and any(map(_is_empty, _operands(value))):
            number = number_of_none(value.op.name.removeprefix("relax."), dtype_of(value))
            # TVM fails to lower a `full` of infinities.
            return relax.op.broadcast_to(relax.const(number, dtype_of(value)), value.ty.shape)
        called = called_function(value)
        start = None if called is None else _start_of_no_step(mod[called])
        return None if start is None else relax.op.broadcast_to(relax.const(start, dtype_of(value)), value.ty.shape)

    return rewrite(mod, state, rule)


def _start_of_no_step(func: tirx.PrimFunc) -> float | None:
    """Return the number that a kernel of one reduction of no step should give; None for any other kernel."""
    blocks = list_blocks(func)
    init = blocks[0].init if len(blocks) == 1 and blocks[0].is_reduction else None
    if init is None or not isinstance(init.value, tirx.IntImm | tirx.FloatImm):
        return None
    steps = [size for size, kind in zip(blocks[0].extents, blocks[0].kinds, strict=True) if kind == "R"]
    return float(init.value.value) if 0 in steps else None


def _operands(call: relax.Call) -> Iterable[tvm.ir.Expr]:
    return (one for arg in call.args for one in (arg.fields if isinstance(arg, relax.Tuple) else (arg,)))


def _is_empty(expr: tvm.ir.Expr) -> bool:
    """Return whether a tensor is known to have no elements."""
    return any(isinstance(size, tirx.IntImm) and int(size) == 0 for size in shape_of(expr) or ())
