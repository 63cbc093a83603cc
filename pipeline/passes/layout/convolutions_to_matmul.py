"""Pass: convolutions over patches, and on a GPU over windows of a sequence, are matmuls with channels last."""

from __future__ import annotations

from typing import TypeAlias

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
# Data (B, C, H, W), weight (F, C, P, Q) and bias (F) of a convolution over patches of (P, Q); what it replaces.
_Patches: TypeAlias = tuple[tvm.ir.Expr, np.ndarray, np.ndarray | None, tuple[relax.Var, ...]]


def convolutions_to_matmul(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with patch embeddings, and convolutions such as those of Whisper's encoder, as matmuls.

    ::

        x (B, C, H, W) -> conv2d by (P, Q) in steps of (P, Q) [+ bias] -> reshape (B, F, h*w) -> transpose (B, h*w, F)
        x -> reshape (B, C, h, P, w, Q) -> transpose (B, h, w, C, P, Q) -> reshape (B, h*w, C*P*Q) -> matmul [+ bias]

        x (B, C, T) -> conv1d of K in steps of s -> + bias (F, 1) -> gelu -> transpose (B, T', F)
        x -> transpose (B, T, C) -> pad -> windows (B, T', K*C) -> matmul -> + bias (F) -> gelu

    The matmul has templates, half precision and packed weights, the convolution has a generic schedule. Patches that
    are padded, overlap or are read in another layout are left alone, and so is a convolution that is grouped or
    dilated. Windows are for a GPU, where weight and length are known: a CPU has a schedule of its own for them.
    """
    graph = Graph(mod)
    patches: dict[relax.Var, _Patches] = {}
    for binding in graph.bindings:
        found = _match(binding.var, graph)
        if found is not None and all(len(graph.readers(step)) == 1 for step in found[3]):
            patches[binding.var] = found
            state.sources[binding.var.name] = state.nodes_of(var.name for var in (*found[3], binding.var))
    windows = {one.var for one in graph.bindings if state.launches_cost and _is_over_windows(one.value)}
    if not patches and not windows:
        return mod
    # Variable of the old function -> the same values in the new one, channels last.
    turned: dict[relax.Var, relax.Var] = {}

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        value, var = binding.value, binding.var
        if var in patches:
            return _of_patches(new, binding, patches[var])
        if var in windows:
            turned[var] = _of_windows(new, binding, turned.get(value.args[0]))
        elif is_op(value, "permute_dims") and value.args[0] in turned and transposed_axes(value) == _SWAP:
            return turned[value.args[0]]
        else:
            moved = _moved(value, turned)
            if moved is None:
                return None
            turned[var] = new.extra(f"{var.name}__rows", moved, [var])
        return relax.op.permute_dims(turned[var], _SWAP)

    state.note(f"{len(patches) + len(windows)} convolutions became matmuls")
    return rewrite(mod, state, rule)


def _of_patches(new: Rewriter, binding: relax.VarBinding, patches: _Patches) -> tvm.ir.Expr:
    def step(what: str, value: tvm.ir.Expr) -> relax.Var:
        return new.extra(f"{binding.var.name}__{what}", value, [binding.var])

    image, weight, bias, _ = patches
    features, channels, high, wide = weight.shape
    batch, _, height, width = image.ty.shape.values
    rows, columns = int(height) // high, int(width) // wide
    data = new.of(image)
    data = step("apart", relax.op.reshape(data, (batch, channels, rows, high, columns, wide)))
    data = step("rows", relax.op.permute_dims(data, [0, 2, 4, 1, 3, 5]))
    data = step("flat", relax.op.reshape(data, (batch, rows * columns, channels * high * wide)))
    weight = np.ascontiguousarray(weight.reshape(features, -1).T)
    result = relax.op.matmul(data, relax.const(weight, str(weight.dtype)))
    return result if bias is None else relax.op.add(step("matmul", result), relax.const(bias, str(bias.dtype)))


def _match(var: relax.Var, graph: Graph) -> _Patches | None:
    """Return the patches that `var` transposes."""
    turned = graph.value(var)
    if not is_op(turned, "permute_dims") or turned.attrs.axes is None:
        return None
    flat = graph.value(turned.args[0])
    if [int(axis) for axis in turned.attrs.axes] != [0, 2, 1] or not is_op(flat, "reshape"):
        return None
    steps = [turned.args[0], flat.args[0]]
    value, bias = graph.value(flat.args[0]), None
    if is_op(value, "add"):
        inner, bias = value.args if is_constant(value.args[1]) else value.args[::-1]
        steps.append(inner)
        value = graph.value(inner)
    if not is_op(value, "nn.conv2d") or not is_constant(value.args[1]):
        return None
    shape, out = sizes_of(value.args[0]), sizes_of(flat)
    weight = array_of(value.args[1])
    sizes = [size for size in (shape or ())[2:] if isinstance(size, int)]
    attrs, (features, _, *patch) = value.attrs, weight.shape
    in_patches = (
        [int(step) for step in attrs.strides] == patch
        and not any(int(pad) for pad in attrs.padding)
        and all(int(step) == 1 for step in attrs.dilation)
        and int(attrs.groups) == 1
        and (str(attrs.data_layout), str(attrs.kernel_layout)) == ("NCHW", "OIHW")
    )
    if shape is None or out is None or len(sizes) != 2 or not in_patches:
        return None
    if any(size % step for size, step in zip(sizes, patch, strict=True)):
        return None
    if out != (shape[0], features, (sizes[0] // patch[0]) * (sizes[1] // patch[1])):
        return None
    if bias is None:
        return value.args[0], weight, None, tuple(steps)
    added = array_of(bias) if is_constant(bias) else np.zeros(0)
    if added.shape[-3:] != (features, 1, 1) or added.size != features:
        return None
    return value.args[0], weight, added.reshape(features), tuple(steps)


def _of_windows(new: Rewriter, binding: relax.VarBinding, data: relax.Var | None) -> relax.Var:
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


def _is_over_windows(value: tvm.ir.Expr) -> bool:
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
