"""Pass: find attention and make it one kernel that reads and writes heads where they lie."""

from __future__ import annotations

import logging

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.attention.find_attention import is_weighting, match_attention
from relaxtune.pipeline.passes.attention.head_layout import Roundings
from relaxtune.pipeline.passes.attention.kernel import AttentionFunctions, AttentionKernel, kernel_of
from relaxtune.pipeline.passes.attention.kernel_mask import Masking, masking_of
from relaxtune.pipeline.passes.attention.of_tokens import of_tokens
from relaxtune.pipeline.passes.attention.scores import NotAttentionError
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import dtype_of, is_op
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.targets import Feature, target_features

logger = logging.getLogger(__name__)


def recognise_attention(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with each attention as one PrimFunc, where a template makes it: of halves, on GPUs from Ampere on.

    ::

        softmax(Q K^T * scale [masked] [+ bias]) V   ->   attention(qkv, mask)

    Scales may stand before or after the product, on either side. Masks may be conditions or sums; a causal mask or a
    sliding window that is a constant of the graph becomes a number of the kernel, the rest is computed once and read:
    a bias of distances out of its table, masks of windows as they are for one image.
    Heads are read where they lie: through reshapes, transposes, slices and broadcasts back to the tensor that
    a kernel writes (slices of one combined projection, a cache), grouped heads without being repeated. The
    result is written as its reader wants it, [batch, positions, heads * head_dim].

    Where padding is left out (`tokens.unpad`) and the mask hides padding alone, attention is of the packed tokens: each
    sees those of its own row.

    A row that sees no key at all (padding before the first token) is zeros where the graph guards it against NaN, and
    NaN where it does not. Where the graph has low numbers for keys that are not seen, such a row has no meaning, and
    may be another mean of the values than the graph's. All other rows are the graph's.

    A softmax between two matmuls that is not taken leaves a note that says why.
    """
    if not has_template(state.target):
        return mod
    graph = Graph(mod)
    functions = AttentionFunctions(state.target)
    found: dict[relax.Var, AttentionKernel] = {}
    for binding in graph.bindings:
        var = binding.var
        if not is_op(binding.value, "nn.softmax") or not is_weighting(var, graph):
            continue
        try:
            attention = match_attention(var, graph)
            kernel = kernel_of(attention, masking_of(attention, graph), graph.symbols)
            functions.get(kernel)
            kernel = of_tokens(kernel, graph, functions) or kernel
        except NotAttentionError as e:
            state.note(f"attention not recognised at {var.name}: {e}")
            logger.info("%s: attention not recognised at %s: %s", state.graph.name, var.name, e)
            continue
        attention = kernel.attention
        found[attention.result] = kernel
        path = (*attention.path, attention.result)
        state.sources[attention.result.name] = state.nodes_of(step.name for step in path)
    if not found:
        return mod
    state.note(f"{len(found)} attentions recognised")
    roundings = Roundings()
    masks: dict[tuple[object, ...], tvm.ir.Expr] = {}
    added: dict[tirx.PrimFunc, tvm.ir.GlobalVar] = {}

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        kernel = found.get(binding.var)
        if kernel is None:
            roundings.note(binding)
            return None
        operands = [roundings.get(new, base, kernel.attention.dtype) for base in kernel.bases]
        if kernel.spec.bias is not None:
            source, key = kernel.masking.source, kernel.masking.key()
            if source is None and key not in masks:
                masks[key] = _composed(new, kernel.masking)
            operands.append(masks[key] if source is None else _bound(new, source))
        if kernel.spans is not None:
            operands.append(new.of(kernel.spans))
        func = functions.get(kernel)
        if func not in added:
            added[func] = new.function(func.without_attr("global_symbol"), "attention")
        operands += [param for param in kernel.params if isinstance(param, tirx.Var)]
        return relax.call_tir(added[func], relax.Tuple(operands), relax.TensorType(*kernel.params[-1]))

    return rewrite(mod, state, rule)


def has_template(target: tvm.target.Target) -> bool:
    """Return whether there is a template of attention for a target."""
    return target_features(target) >= {Feature.MMA, Feature.CP_ASYNC, Feature.LDMATRIX}


def _bound(new: Rewriter, expr: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return an expression of the old function as an operand of the new one."""
    made = new.of(expr)
    return new.emit(made) if isinstance(made, relax.Call) else made


def _composed(new: Rewriter, masking: Masking) -> tvm.ir.Expr:
    """Emit the sum of a mask's addends, and of its fill where its conditions do not hold."""
    emit = new.emit
    total: tvm.ir.Expr | None = None
    for expr, factor in masking.addends:
        term = _bound(new, expr)
        term = term if dtype_of(term) == "float32" else emit(relax.op.astype(term, "float32"))
        term = term if factor == 1.0 else emit(relax.op.multiply(term, relax.const(factor, "float32")))
        total = term if total is None else emit(relax.op.add(total, term))
    seen: tvm.ir.Expr | None = None
    for condition in masking.conditions:
        term = _bound(new, condition.expr)
        term = emit(relax.op.logical_not(term)) if condition.negated else term
        seen = term if seen is None else emit(relax.op.logical_and(seen, term))
    if seen is not None:
        fill, zero = (relax.const(number, "float32") for number in (masking.fill, 0.0))
        hidden = emit(relax.op.where(seen, zero, fill))
        total = hidden if total is None else emit(relax.op.add(total, hidden))
    assert total is not None
    return total
