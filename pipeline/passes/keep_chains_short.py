"""Pass: no fused kernel is an expression that TVM cannot simplify in time."""

from __future__ import annotations

from collections import defaultdict

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir.expr import TensorLoad

from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of
from relaxtune.pipeline.passes.kit.rewrite import INJECTIVE, pattern_of, with_opaque_calls
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.blocks import list_blocks

# Visits of TVM's simplifier for one element of a kernel. Counted: 12 to 60 in BERT, ViT, Llama, Whisper and DeBERTa,
# 3,255 where Swin shifts and cuts its windows. A chain of 12 quantisers has 4**12, and that takes 40 s.
_VISITS_MAX = 4096


def keep_chains_short(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with operations marked as opaque that would end a fused chain too long to be simplified.

    A fused kernel writes what it reads in place of each read. A concatenation reads twice, a reshape uses each index
    several times, and TVM's simplifier visits what is in a minimum or a maximum twice: along a chain, these numbers
    multiply. Where the product grows too large, the chain is cut.
    """
    functions = {var: func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    reads = {var: _visits_by_parameter(func) for var, func in functions.items() if pattern_of(func) <= INJECTIVE}
    visits: dict[relax.Var, float] = {}
    cut: set[relax.Var] = set()
    for binding in bindings_of(main_of(mod)):
        called = called_function(binding.value)
        if called not in reads:
            continue
        operands = binding.value.args[1].fields
        total = sum(count * visits.get(operand, 1) for operand, count in zip(operands, reads[called], strict=False))
        if total > _VISITS_MAX:
            cut.add(binding.var)
        visits[binding.var] = 1 if binding.var in cut else total
    if not cut:
        return mod
    state.note(f"{len(cut)} operations end a chain that is too long to be simplified as one kernel")
    return with_opaque_calls(mod, state, cut)


def _visits_by_parameter(func: tirx.PrimFunc) -> list[float]:
    """Return for each parameter how often the simplifier visits an axis of the result in what is read of it."""
    visits: dict[tirx.Var, float] = defaultdict(float)

    def note(load: TensorLoad) -> None:
        used: list[tirx.Var] = []
        for index in load.indices:
            tvm_ffi.structural_walk(index, (tirx.Var, used.append))
        visits[load.source] += len(used) / max(1, len(load.indices))

    extremes: list[tirx.Expr] = []
    for block in list_blocks(func):
        for kind, visit in ((TensorLoad, note), (tirx.Min, extremes.append), (tirx.Max, extremes.append)):
            tvm_ffi.structural_walk(block.stmt.body, (kind, visit))
    return [visits[param] * 2 ** len(extremes) for param in func.params]
