"""Attentions that the templates make: the widths, layouts and masks that each of them takes."""

from __future__ import annotations

import math

import tvm
from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import AttentionSpec, spec_of
from relaxtune.schedules.functions.attention_checks import refuse_layouts
from relaxtune.schedules.targets import Feature, ResolvedTarget
from relaxtune.schedules.templates.attention.sizes import INDEX_MAX
from relaxtune.schedules.templates.attention.tiles import ELEMENT_BYTES
from relaxtune.schedules.templates.base import refuse_target
from relaxtune.schedules.templates.emit.tensor_cores import MMA_KINDS
from relaxtune.schedules.tir.blocks import static_shape

_COPY_BYTES = 16
_HEAD_DIM_MAX = 256
_ADDED = ("float16", "bfloat16", "float32")
_KEPT = (*_ADDED, "bool", "int8", "uint8", "int32", "int64")


def recognise_attention(func: tirx.PrimFunc, target: ResolvedTarget, *features: Feature) -> AttentionSpec | Refusal:
    """Return a function's attention, of known sizes or symbolic ones, when a kernel of some features can make it."""
    spec, refusal = spec_of(func), refuse_target(target, *features)
    if refusal is not None or spec is None:
        return refusal or Refusal("the function is not marked as an attention")
    return refuse_attention(func, spec) or spec


def refuse_attention(func: tirx.PrimFunc, spec: AttentionSpec) -> Refusal | None:
    """Return why no kernel makes a function's attention, None where one may."""
    for name, width in (("head_dim", spec.head_dim), ("value_dim", spec.value_dim)):
        if width % 8 or width > _HEAD_DIM_MAX:
            return Refusal(f"{name} is {width}, expected a multiple of 8 up to {_HEAD_DIM_MAX}")
    if spec.scale <= 0:
        return Refusal(f"scale is {spec.scale}, expected a positive one (the largest product has the largest score)")
    if any(math.prod(static_shape(param) or ()) > INDEX_MAX for param in func.params):
        return Refusal("a parameter has 2**31 elements or more, the kernel counts in 32 bits")
    # Copies are of 16 bytes, at addresses that are multiples of it.
    vector = _COPY_BYTES // ELEMENT_BYTES
    refusal = refuse_layouts(spec, func, MMA_KINDS, vector)
    if refusal is not None:
        return refusal
    if spec.bias is not None:
        dtype = str(func.params[spec.bias.param].ty.dtype)
        expected = _ADDED if spec.bias.kind == "add" else _KEPT
        if dtype not in expected:
            return Refusal(f"the {spec.bias.kind} mask is {dtype}, expected one of {', '.join(expected)}")
    if any(not isinstance(layout.offset, int) for layout in spec.layouts().values()):
        return Refusal("a tensor starts at a symbolic place in its parameter")
    if spec.growth is not None and not isinstance(spec.queries, int):
        return Refusal("caches grow by a symbolic number of positions, expected a known one")
    return None


def bias_bytes(func: tirx.PrimFunc, spec: AttentionSpec) -> int:
    """Return the bytes of an element of an attention's mask; 0 without one."""
    if spec.bias is None:
        return 0
    return int((tvm.DataType(str(func.params[spec.bias.param].ty.dtype)).bits + 7) // 8)
