"""Attention by cuDNN 9: one execution plan of its fused attention, the plan a place in its heuristic's list.

Notation: see `schedules.functions.attention`. cuDNN takes float16 or bfloat16 for Q, K, V and O, which
may lie anywhere (slices of one packed product, heads before positions or after); grouped queries; heads of a multiple
of 8 up to 256; a causal mask, also with more keys than queries; a window; an added mask of float16, bfloat16 or float32
that broadcasts along any axis; a `keep` mask, which a small kernel before each call turns into an added one of 0 and
-inf.

Scores with an added mask of float32 or bfloat16 are bounded below by -1e38, since cuDNN hides what is lower: with all
keys at float32's minimum, a row is an ordinary softmax, as the function has it. A row that sees no key (all
-inf, or not kept), where the function has NaN, is zeros, or with such a mask the mean of the values.

The call is in C (`cudnn_attention.c`, linked into the module), which opens `libcudnn.so.9` (9.10.2 or later) when it
first runs: by the loader's path, or as the environment variable `RELAXTUNE_CUDNN` says. Then a plan is made, for which
cuDNN compiles a kernel (up to a second), and kept. The place of a plan in the heuristic's list holds for one version of
the library on one model of GPU, which is where a record is true.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tvm import tirx
from tvm.ir.expr import StringImm

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import AttentionSpec, ScoreBias, spec_of
from relaxtune.schedules.functions.attention_checks import refuse_layouts
from relaxtune.schedules.libraries.calls import LibraryCall, call_alone, call_on_made, no_pointer
from relaxtune.schedules.libraries.vendors import CUDNN
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import Case, KernelTemplate, Parameters, refuse_target
from relaxtune.schedules.tir.blocks import static_shape

_FUNCTION = "relaxtune_cudnn_attention"
# cudnnDataType_t.
_DTYPES = {"float16": 2, "bfloat16": 9}
_ADDED = {**_DTYPES, "float32": 0}
_KEPT = ("bool", "int8", "uint8", "int32", "int64")
_NO_MASK = -1
# Elements that its loads of 16 bytes take.
_VECTOR = 8
_HEAD_DIM_MAX = 256
# The heuristic (mode A) of cuDNN 9.19 gives 2 to 4 on an H200, and its other modes the same ones.
_PLANS = 4
_MADE_MASK = "float16"
_ANSWERS = {
    2: "cuDNN offers no such plan for this attention here; another version recorded it, or it does not find NVRTC "
    "(package nvidia-cuda-nvrtc): measure the task again",
    3: "cuDNN failed; look for an earlier error of the device",
    4: "a tensor of the attention is not at a multiple of 16 bytes in memory, which cuDNN's kernels need; copy the "
    "input that is a view of another tensor",
}


@dataclass(frozen=True)
class CudnnAttentionParameters(Parameters):
    """The plan that runs: a place in the list of cuDNN's heuristic (mode A), 0 its favourite."""

    template: ClassVar[str] = "cudnn_attention"

    plan: int = 0


@dataclass(frozen=True)
class _Mask:
    """A mask as cuDNN reads it: sizes along batch, head, query and key (1 broadcasts), strides in elements."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class CudnnAttention(KernelTemplate[AttentionSpec, CudnnAttentionParameters]):
    """The library as a maker of kernels; see `schedules.templates.base.KernelTemplate`."""

    parameters = CudnnAttentionParameters

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> AttentionSpec | Refusal:
        return refuse_target(target) or _recognise(func)

    def _propose(self, case: Case[AttentionSpec]) -> Sequence[CudnnAttentionParameters]:
        return [CudnnAttentionParameters(plan) for plan in range(_PLANS)]

    def _make(self, case: Case[AttentionSpec], p: CudnnAttentionParameters) -> tirx.PrimFunc:
        return _call(case.func, case.found, p.plan)


def _recognise(func: tirx.PrimFunc) -> AttentionSpec | Refusal:
    spec = spec_of(func)
    if spec is None:
        return Refusal("the function is not marked as an attention")
    if not spec.is_static:
        return Refusal("its sizes are symbolic")
    if spec.spans is not None:
        return Refusal("its keys are in spans")
    if spec.guarded:
        return Refusal("rows that see no key are 0")
    if spec.growth is not None:
        return Refusal("cuDNN does not write caches of K and V")
    if spec.value_dim != spec.head_dim:
        return Refusal(f"value_dim is {spec.value_dim}, expected head_dim, {spec.head_dim}")
    if spec.head_dim % _VECTOR or spec.head_dim > _HEAD_DIM_MAX:
        return Refusal(f"head_dim is {spec.head_dim}, expected a multiple of {_VECTOR} up to {_HEAD_DIM_MAX}")
    if (spec.causal or spec.window) and spec.queries > spec.keys:
        return Refusal(f"{spec.queries} queries look back on {spec.keys} keys: some see none")
    return refuse_layouts(spec, func, _DTYPES, _VECTOR) or _refuse_mask(func, spec.bias) or spec


def _refuse_mask(func: tirx.PrimFunc, bias: ScoreBias | None) -> Refusal | None:
    if bias is None:
        return None
    if bias.offset or bias.limit or bias.period:
        return Refusal("the mask does not lie in its parameter from the first element on, once")
    dtype = str(func.params[bias.param].ty.dtype)
    expected = tuple(_ADDED) if bias.kind == "add" else (*_ADDED, *_KEPT)
    if dtype not in expected:
        return Refusal(f"the {bias.kind} mask is {dtype}, expected {' or '.join(expected)}")
    if bias.key_stride not in (0, 1):
        return Refusal(f"the mask's key stride is {bias.key_stride}, expected 0 or 1")
    return None


def _call(func: tirx.PrimFunc, spec: AttentionSpec, plan: int) -> tirx.PrimFunc:
    bias = spec.bias
    if bias is None:
        return call_alone(func, _library_call(func, spec, None, no_pointer(), plan))
    given = func.params[bias.param]
    extents = (spec.batch, spec.heads, spec.queries, spec.keys)
    given_strides = (bias.batch_stride, bias.head_stride, bias.query_stride, bias.key_stride)
    sizes = tuple(extent if stride else 1 for extent, stride in zip(extents, given_strides, strict=True))
    packed = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    # cuDNN wants a stride for an axis of one element too; a packed tensor's will do.
    strides = tuple(given_strides[axis] if size > 1 else packed[axis] for axis, size in enumerate(sizes))
    if bias.kind == "add":
        mask = _Mask(str(given.ty.dtype), sizes, strides)
        return call_alone(func, _library_call(func, spec, mask, given.data, plan))
    made = tirx.decl_buffer((math.prod(sizes),), _MADE_MASK, "added_mask")
    shape = static_shape(given) or ()

    def element(position: tirx.Var) -> tirx.Expr:
        places = [position // step % size for step, size in zip(packed, sizes, strict=True)]
        flat = sum((place * stride for place, stride in zip(places, strides, strict=True)), tirx.const(0, "int32"))
        inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        kept = given[tuple(flat // step % size for step, size in zip(inner, shape, strict=True))]
        seen = kept if kept.ty.dtype == "bool" else kept != tirx.const(0, str(kept.ty.dtype))
        return tirx.Select(seen, tirx.const(0.0, _MADE_MASK), tirx.const(-math.inf, _MADE_MASK))

    added = _Mask(_MADE_MASK, sizes, packed)
    return call_on_made(func, made, element, _library_call(func, spec, added, made.data, plan))


def _library_call(
    func: tirx.PrimFunc, spec: AttentionSpec, mask: _Mask | None, mask_data: tirx.Expr, plan: int
) -> LibraryCall:
    layouts = spec.layouts()
    text = " ".join(str(number) for number in _numbers(func, spec, mask, plan))
    query, key, value, output = (func.params[layout.param].data for layout in layouts.values())
    return LibraryCall(CUDNN, _FUNCTION, [StringImm(text), query, key, value, mask_data, output], _ANSWERS)


def _numbers(func: tirx.PrimFunc, spec: AttentionSpec, mask: _Mask | None, plan: int) -> list[int]:
    """Return the fields of `Attention` in `cudnn_attention.c`, in their order."""
    layouts = spec.layouts().values()
    (scale_bits,) = struct.unpack("<I", struct.pack("<f", spec.scale))
    # A last query sees all keys before it whether that is asked for or not; its plans without a mask are the faster.
    causal = spec.causal and spec.queries > 1
    numbers = [
        *(spec.batch, spec.heads, spec.kv_heads, spec.queries, spec.keys, spec.head_dim),
        _DTYPES[str(func.params[spec.query.param].ty.dtype)],
        _NO_MASK if mask is None else _ADDED[mask.dtype],
        *(int(causal), spec.window, plan, scale_bits),
    ]
    for layout in layouts:
        numbers += [layout.batch_stride, layout.head_stride, layout.position_stride]
    numbers += [*(mask.strides if mask else (0,) * 4), *(mask.sizes if mask else (1,) * 4)]
    return numbers + [layout.offset for layout in layouts]
