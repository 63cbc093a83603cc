"""The kernel of a matched attention: its specification, and the tensors of the graph that it reads."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.attention.find_attention import Attention
from relaxtune.pipeline.passes.attention.kernel_mask import Masking
from relaxtune.pipeline.passes.attention.scores import NotAttentionError
from relaxtune.pipeline.passes.kit.ir import dtype_of, shape_of
from relaxtune.pipeline.passes.kit.sizes import Size, Symbols, plain
from relaxtune.schedules.functions.attention import AttentionSpec, HeadLayout, Param, ScoreBias, scalars_of
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.registry import list_refusals
from relaxtune.schedules.targets import ResolvedTarget, target_limits


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel for a matched attention."""

    attention: Attention
    masking: Masking
    # As `schedules.functions.plain_attention.attention_function` takes them.
    spec: AttentionSpec
    params: tuple[Param, ...]
    # The tensors that hold heads, in the order of the parameters; the tensor of the mask, if any, follows.
    bases: tuple[tvm.ir.Expr, ...]
    spans: relax.Var | None = None  # The tensor of the spans of keys that queries see; the last one.


def kernel_of(
    attention: Attention, masking: Masking, symbols: Symbols, spans: relax.Var | None = None
) -> AttentionKernel:
    """Return the kernel of an attention and its mask.

    Raises `NotAttentionError`: two axes of the graph have the name of one of its sizes.
    """
    bases: list[tvm.ir.Expr] = []

    def position(base: tvm.ir.Expr) -> int:
        if base not in bases:
            bases.append(base)
        return bases.index(base)

    def size(given: Size) -> int | tirx.Expr:
        if not symbols.knows(given):
            raise NotAttentionError(f"more than one axis, or none, is called by a name of its size {given}")
        return symbols.expression(plain(given))

    def layout(param: int, of: HeadLayout) -> HeadLayout:
        return HeadLayout(param, *map(size, (of.offset, of.batch_stride, of.position_stride, of.head_stride)))

    query, key, value = (
        layout(position(heads.base), heads.layout) for heads in (attention.query, attention.key, attention.value)
    )
    params: list[Param] = [(param_shape(base), attention.dtype) for base in bases]
    bias = None
    if (lies := masking.layout) is not None:
        strides = (size(lies.batch_stride), size(lies.head_stride), size(lies.query_stride), size(lies.key_stride))
        bias = ScoreBias(len(params), lies.kind, *strides, size(lies.offset), lies.limit, lies.period)
        dtype = "float32" if masking.source is None else dtype_of(masking.source)
        params.append((tuple(map(size, masking.shape)), dtype))
    if spans is not None:
        params.append((param_shape(spans), "int32"))
    result = param_shape(attention.result)
    scalars = scalars_of(params, result)
    spec = AttentionSpec(
        batch=size(attention.batch),
        heads=attention.heads,
        kv_heads=attention.key.count,
        queries=size(attention.queries),
        keys=size(attention.keys),
        head_dim=attention.head_dim,
        value_dim=attention.value_dim,
        scale=attention.scale,
        causal=masking.causal,
        window=masking.window,
        query=query,
        key=key,
        value=value,
        output=layout(len(params) + len(scalars), attention.output.layout),
        bias=bias,
        spans=None if spans is None else len(params) - 1,
        guarded=attention.guarded and masking != Masking(),
    )
    params += [*scalars, (result, attention.dtype)]
    return AttentionKernel(attention, masking, spec, tuple(params), tuple(bases), spans)


def param_shape(expr: tvm.ir.Expr) -> tuple[int | tirx.Expr, ...]:
    """Return a tensor's shape as that of a parameter."""
    return tuple(int(axis) if isinstance(axis, tirx.IntImm) else axis for axis in shape_of(expr) or ())


class AttentionFunctions:
    """The PrimFuncs of attentions, each made once."""

    def __init__(self, target: tvm.target.Target) -> None:
        self._target = target
        self._made: dict[tuple[str, str], tirx.PrimFunc] = {}

    def get(self, kernel: AttentionKernel) -> tirx.PrimFunc:
        """Return the PrimFunc of a kernel.

        Raises `NotAttentionError`: no template makes it.
        """
        key = (kernel.spec.to_json(), str(kernel.params))
        if key not in self._made:
            func = attention_function(kernel.spec, kernel.params)
            reason = template_refusal(func, self._target)
            if reason is not None:
                raise NotAttentionError(reason)
            self._made[key] = func
        return self._made[key]


def template_refusal(func: tirx.PrimFunc, target: tvm.target.Target) -> str | None:
    """Return why no template makes an attention for a target, None when one does."""
    kind, arch = str(target.kind.name), str(target.attrs.get("arch", ""))
    refused = list_refusals(func, ResolvedTarget(target, "lowering", kind, arch, target_limits(target)))
    return f"no template makes it ({'; '.join(refused)})" if refused else None
