"""Pass: on a GPU, a one-dimensional convolution is a matmul over its windows, and what follows it has channels last."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, either_way, is_constant, is_op, transposed_axes
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.sizes import sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState

_SWAP = [0, 2, 1]
# Of one tensor, element by element; the others that are moved have a constant beside it.
_UNARY = ("astype", "nn.gelu", "nn.gelu_tanh", "nn.relu", "nn.silu", "tanh", "sigmoid")
_BINARY = ("add", "multiply")


def windows_to_matmul(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with convolutions such as those of Whisper's encoder as matmuls.

    ::

        x (B, C, T) -> conv1d of K in steps of s -> + bias (F, 1) -> gelu -> transpose (B, T', F)
        x -> transpose (B, T, C) -> pad -> windows (B, T', K*C) -> matmul -> + bias (F) -> gelu

    The matmul has templates, the convolution has a generic schedule. One that is grouped or dilated, or whose weight or
    length is not known, is left alone. A CPU has a schedule of its own for it.
    """
    if not state.launches_cost:
        return mod
    graph = Graph(mod)
    # Variable of the old function -> the same values in the new one, channels last.
    turned: dict[relax.Var, relax.Var] = {}
    count = 0

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        nonlocal count
        value, var = binding.value, binding.var
        if _is_convolution(value):
            count += 1
            data = turned.get(value.args[0])
            turned[var] = _as_matmul(new, binding, data)
        elif is_op(value, "permute_dims") and value.args[0] in turned and transposed_axes(value) == _SWAP:
            return turned[value.args[0]]
        else:
            moved = _moved(value, turned)
            if moved is None:
                return None
            turned[var] = new.extra(f"{var.name}__rows", moved, [var])
        return relax.op.permute_dims(turned[var], _SWAP)

    if not any(_is_convolution(binding.value) for binding in graph.bindings):
        return mod
    made = rewrite(mod, state, rule)
    state.note(f"{count} convolutions over windows became matmuls")
    return made


def _as_matmul(new: Rewriter, binding: relax.VarBinding, data: relax.Var | None) -> relax.Var:
    """Return the convolution's values (B, T', F); `data` is what it reads, channels last, where that is there."""
    conv = binding.value

    def step(what: str, value: tvm.ir.Expr) -> relax.Var:
        return new.extra(f"{binding.var.name}__{what}", value, [binding.var])

    weight = array_of(conv.args[1])
    features, channels, width = weight.shape
    before, after = (int(one) for one in conv.attrs.padding)
    stride = int(conv.attrs.strides[0])
    if data is None:
        data = step("turned", relax.op.permute_dims(new.of(conv.args[0]), _SWAP))
    if before or after:
        data = step("padded", relax.op.nn.pad(data, [0, 0, before, after, 0, 0]))
    steps = int(conv.ty.shape.values[2])
    ends = [start + stride * (steps - 1) + 1 for start in range(width)]
    slices = [relax.op.strided_slice(data, [1], [start], [end], [stride]) for start, end in enumerate(ends)]
    named = [step(f"window{number}", one) for number, one in enumerate(slices)]
    windows = step("windows", relax.op.concat(named, axis=2)) if width > 1 else named[0]
    flat = np.ascontiguousarray(weight.transpose(2, 1, 0).reshape(width * channels, features))
    return step("rows", relax.op.matmul(windows, relax.const(flat, str(flat.dtype))))


def _moved(value: tvm.ir.Expr, turned: dict[relax.Var, relax.Var]) -> tvm.ir.Expr | None:
    """Return an elementwise function of turned values, on them; None for anything else."""
    if is_op(value, *_UNARY) and value.args[0] in turned:
        return relax.Call(value.op, [turned[value.args[0]], *value.args[1:]], value.attrs)
    if not is_op(value, *_BINARY):
        return None
    for inner, constant in either_way(value):
        if inner in turned and is_constant(constant):
            added = array_of(constant)
            # One value a channel, or one for all.
            if added.ndim <= 3 and (added.size == 1 or (added.ndim > 1 and added.size == added.shape[-2])):
                flat = relax.const(added.reshape(-1), str(added.dtype))
                return relax.Call(value.op, [turned[inner], flat], value.attrs)
    return None


def _is_convolution(value: tvm.ir.Expr) -> bool:
    if not is_op(value, "nn.conv1d") or not is_constant(value.args[1]):
        return False
    attrs, sizes, out = value.attrs, sizes_of(value.args[0]), sizes_of(value)
    return (
        sizes is not None
        and out is not None
        and isinstance(sizes[2], int)
        and isinstance(out[2], int)
        and int(attrs.groups) == 1
        and all(int(step) == 1 for step in attrs.dilation)
        and (str(attrs.data_layout), str(attrs.kernel_layout)) == ("NCW", "OIW")
    )
