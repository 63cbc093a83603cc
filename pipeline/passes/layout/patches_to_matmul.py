"""Pass: a convolution over patches that do not overlap is a matmul over the flattened patches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, either_way, is_constant, is_op
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState


@dataclass(frozen=True)
class _Patches:
    """`data` (B, C, H, W) in patches of (P, Q), each a row of B x (H/P * W/Q) x F; `steps` are what it replaces."""

    data: tvm.ir.Expr
    weight: np.ndarray
    bias: np.ndarray | None
    steps: tuple[relax.Var, ...]


def patches_to_matmul(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the patch embeddings of vision transformers as matmuls.

    ::

        x (B, C, H, W) -> conv2d by (P, Q) in steps of (P, Q) [+ bias] -> reshape (B, F, h*w) -> transpose (B, h*w, F)
        x -> reshape (B, C, h, P, w, Q) -> transpose (B, h, w, C, P, Q) -> reshape (B, h*w, C*P*Q) -> matmul [+ bias]

    The matmul has templates, half precision and packed weights, the convolution has a generic schedule. One that pads,
    overlaps, is grouped, or is read in another layout is left alone.
    """
    graph = Graph(mod)
    found: dict[relax.Var, _Patches] = {}
    for binding in graph.bindings:
        patches = _match(binding.var, graph)
        if patches is not None and all(len(graph.readers(step)) == 1 for step in patches.steps):
            found[binding.var] = patches
            state.sources[binding.var.name] = state.nodes_of(var.name for var in (*patches.steps, binding.var))
    return replace_found(mod, state, found, _as_matmul, "convolutions over patches became matmuls")


def _as_matmul(new: Rewriter, binding: relax.VarBinding, patches: _Patches) -> tvm.ir.Expr:
    def step(what: str, value: tvm.ir.Expr) -> relax.Var:
        return new.extra(f"{binding.var.name}__{what}", value, [binding.var])

    features, channels, high, wide = patches.weight.shape
    batch, _, height, width = patches.data.ty.shape.values
    rows, columns = int(height) // high, int(width) // wide
    data = new.of(patches.data)
    data = step("apart", relax.op.reshape(data, (batch, channels, rows, high, columns, wide)))
    data = step("rows", relax.op.permute_dims(data, [0, 2, 4, 1, 3, 5]))
    data = step("flat", relax.op.reshape(data, (batch, rows * columns, channels * high * wide)))
    weight = np.ascontiguousarray(patches.weight.reshape(features, -1).T)
    result = relax.op.matmul(data, relax.const(weight, str(weight.dtype)))
    if patches.bias is None:
        return result
    return relax.op.add(step("matmul", result), relax.const(patches.bias, str(patches.bias.dtype)))


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
        for inner, bias in either_way(value):
            if is_constant(bias) and isinstance(inner, relax.Var):
                break
        else:
            return None
        steps.append(inner)
        value = graph.value(inner)
    if not is_op(value, "nn.conv2d") or not is_constant(value.args[1]):
        return None
    shape, out = sizes_of(value.args[0]), sizes_of(flat)
    weight = array_of(value.args[1])
    sizes = [size for size in (shape or ())[2:] if isinstance(size, int)]
    if shape is None or out is None or len(sizes) != 2 or not _in_patches(value, sizes, weight.shape):
        return None
    features = weight.shape[0]
    if out != (shape[0], features, (sizes[0] // weight.shape[2]) * (sizes[1] // weight.shape[3])):
        return None
    if bias is None:
        return _Patches(value.args[0], weight, None, tuple(steps))
    added = array_of(bias)
    if added.shape[-3:] != (features, 1, 1) or added.size != features:
        return None
    return _Patches(value.args[0], weight, added.reshape(features), tuple(steps))


def _in_patches(conv: relax.Call, image: list[int], weight: tuple[int, ...]) -> bool:
    attrs = conv.attrs
    patch = list(weight[2:])
    return (
        [int(step) for step in attrs.strides] == patch
        and not any(int(pad) for pad in attrs.padding)
        and all(int(step) == 1 for step in attrs.dilation)
        and int(attrs.groups) == 1
        and str(attrs.data_layout) == "NCHW"
        and str(attrs.kernel_layout) == "OIHW"
        and image[0] % patch[0] == 0
        and image[1] % patch[1] == 0
    )
