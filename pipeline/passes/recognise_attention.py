"""Pass: find attention and make it one kernel that reads and writes heads where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from pipeline.passes.attention_layout import Strides
from pipeline.passes.attention_masking import Masking, masking_of
from pipeline.passes.attention_match import Attention, is_weighting, match_attention
from pipeline.passes.attention_scores import NotAttentionError
from pipeline.passes.ir import (
    bindings_of,
    dtype_of,
    emit_extra,
    emit_named,
    is_op,
    main_of,
    rewrite_main,
    static_shape,
    users_of,
    values_of,
)
from pipeline.passes.state import LoweringState
from schedules.attention import AttentionSpec, HeadLayout, ScoreBias, attention_function


def recognise_attention(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with each attention as one PrimFunc, where a template can make it: on sm_90a, in half precision.

    ::

        softmax(Q K^T * scale [masked] [+ bias]) V   ->   attention(qkv, mask)

    Scales may stand before or after the product, on either side. Masks may be conditions or sums; a causal mask or a
    sliding window that is a constant of the graph becomes a number of the kernel, the rest is computed once and read.
    Heads are read where they lie: through reshapes, transposes, slices and broadcasts back to the tensor that
    a kernel writes (slices of one combined projection, a cache), grouped heads without being repeated. The
    result is written as its reader wants it, [batch, positions, heads * head_dim].

    A row that sees no key at all (padding before the first token) has no meaning, and its value may differ from the
    graph's: it is some mean of the values, and NaN only where the graph's is. All other rows are the graph's.

    A softmax between two matmuls that is not taken leaves a note that says why.
    """
    if not has_template(state.target):
        return mod
    return attention_as_kernels(mod, state)


def has_template(target: tvm.target.Target) -> bool:
    """Return whether there is a template of attention for a target."""
    return bool(target.kind.name == "cuda" and str(target.attrs.get("arch", "")) == "sm_90a")


def attention_as_kernels(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with each attention as one PrimFunc, whatever the target."""
    main = main_of(mod)
    values, users = values_of(main), users_of(main)
    found: dict[relax.Var, _Kernel] = {}
    for binding in bindings_of(main):
        var = binding.var
        if not is_op(binding.value, "nn.softmax") or not is_weighting(var, values, users):
            continue
        try:
            attention = match_attention(var, values, users)
            found[attention.result] = _Kernel(attention, masking_of(attention, values))
        except NotAttentionError as e:
            state.note(f"attention not recognised at {var.name}: {e}")
    if not found:
        return mod
    for kernel in found.values():
        result = kernel.attention.result
        state.sources[result.name] = state.nodes_of([*(var.name for var in kernel.attention.path), result.name])
    state.note(f"{len(found)} attentions recognised")
    return rewrite_main(mod, _Replace(mod, found, state))


@dataclass(frozen=True)
class _Kernel:
    attention: Attention
    masking: Masking


@mutator
class _Replace(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.ir.IRModule, found: Mapping[relax.Var, _Kernel], state: LoweringState) -> None:
        super().__init__(mod)
        self._found = found
        self._state = state
        self._rounded: dict[tvm.ir.Expr, relax.Var] = {}
        self._masks: dict[tuple[object, ...], tvm.ir.Expr] = {}
        self._functions: dict[tuple[object, ...], tvm.ir.GlobalVar] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        kernel = self._found.get(binding.var)
        if kernel is None:
            super().visit_var_binding_(binding)
            return
        attention, masking = kernel.attention, kernel.masking
        operands = _Operands()
        layouts = [
            operands.layout(self._of_dtype(heads.base, attention.dtype), heads.strides)
            for heads in (attention.query, attention.key, attention.value)
        ]
        bias = None
        if masking.strides is not None:
            bias = ScoreBias(operands.position(self._mask(masking)), masking.kind, *masking.strides)
        shape = static_shape(binding.var) or ()
        output = attention.output.strides
        spec = AttentionSpec(
            batch=attention.batch,
            heads=attention.heads,
            kv_heads=attention.key.strides.heads,
            queries=attention.queries,
            keys=attention.keys,
            head_dim=attention.head_dim,
            scale=attention.scale,
            causal=masking.causal,
            window=masking.window,
            query=layouts[0],
            key=layouts[1],
            value=layouts[2],
            output=HeadLayout(len(operands.tensors), 0, output.batch, output.position, output.head),
            bias=bias,
        )
        params = [*operands.types(), (shape, attention.dtype)]
        call = relax.call_tir(
            self._function(spec, params), relax.Tuple(operands.tensors), relax.TensorType(shape, attention.dtype)
        )
        emit_named(self, binding.var, call)

    def _function(self, spec: AttentionSpec, params: list[tuple[tuple[int, ...], str]]) -> tvm.ir.GlobalVar:
        key = (spec, tuple(params))
        if key not in self._functions:
            func = attention_function(spec, params).without_attr("global_symbol")
            self._functions[key] = self.builder_.add_func(func, "attention")
        return self._functions[key]

    def _of_dtype(self, base: tvm.ir.Expr, dtype: str) -> tvm.ir.Expr:
        """Return what heads lie in, rounded where the graph rounds parts of it."""
        if dtype_of(base) == dtype:
            return self.visit_expr(base)
        if base not in self._rounded:
            name = f"{base.name}__{dtype}"
            self._state.sources[name] = self._state.nodes_of([base.name])
            self._rounded[base] = emit_extra(self, name, relax.op.astype(self.visit_expr(base), dtype))
        return self._rounded[base]

    def _mask(self, masking: Masking) -> tvm.ir.Expr:
        if masking.source is not None:
            return self.visit_expr(masking.source)
        key = masking.key()
        if key not in self._masks:
            self._masks[key] = self._composed(masking)
        return self._masks[key]

    def _composed(self, masking: Masking) -> tvm.ir.Expr:
        """Emit the sum of a mask's addends, and of its fill where its conditions do not hold."""
        emit = self.builder_.emit
        total: tvm.ir.Expr | None = None
        for expr, factor in masking.addends:
            term = self.visit_expr(expr)
            term = term if dtype_of(term) == "float32" else emit(relax.op.astype(term, "float32"))
            term = term if factor == 1.0 else emit(relax.op.multiply(term, relax.const(factor, "float32")))
            total = term if total is None else emit(relax.op.add(total, term))
        seen: tvm.ir.Expr | None = None
        for condition in masking.conditions:
            term = self.visit_expr(condition.expr)
            term = emit(relax.op.logical_not(term)) if condition.negated else term
            seen = term if seen is None else emit(relax.op.logical_and(seen, term))
        if seen is not None:
            fill, zero = (relax.const(number, "float32") for number in (masking.fill, 0.0))
            hidden = emit(relax.op.where(seen, zero, fill))
            total = hidden if total is None else emit(relax.op.add(total, hidden))
        assert total is not None
        return total


class _Operands:
    """The tensors that a kernel reads, each once."""

    def __init__(self) -> None:
        self.tensors: list[tvm.ir.Expr] = []

    def position(self, tensor: tvm.ir.Expr) -> int:
        """Return a tensor's position, the last if it is new."""
        for position, known in enumerate(self.tensors):
            if known.same_as(tensor):
                return position
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def layout(self, tensor: tvm.ir.Expr, strides: Strides) -> HeadLayout:
        """Return where heads lie."""
        return HeadLayout(self.position(tensor), strides.offset, strides.batch, strides.position, strides.head)

    def types(self) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of each tensor."""
        return [(static_shape(tensor) or (), dtype_of(tensor)) for tensor in self.tensors]
