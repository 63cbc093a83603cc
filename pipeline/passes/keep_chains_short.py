"""Pass: no fused kernel is an expression that TVM cannot simplify in time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of
from relaxtune.pipeline.passes.kit.rewrite import INJECTIVE, pattern_of, with_opaque_calls
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.blocks import list_blocks
from relaxtune.schedules.tir.expressions import call_name, find_all

# Visits of TVM's simplifier for one element of a kernel. Counted: 12 to 60 in BERT, ViT, Llama, Whisper and DeBERTa,
# 3,255 where Swin shifts and cuts its windows. A chain of 12 quantisers has 4**12, and that takes 40 s.
_VISITS_MAX = 4096
# Copies of a tensor's element in the elements of a kernel: of BERT, ViT, Llama, Whisper and DeBERTa, 4 at most.
_COPIES_MAX = 64
# Operations of a fused chain: 12 at most in the zoo. Python's stack ends where a kernel of some 140 is read.
_LENGTH_MAX = 48
# On a CPU, TVM's code generator writes out what a function of `vector_math` is made of, where another such function
# reads it: so often its argument is in it. It takes 10 us for each copy. One GELU of another takes 20 s.
_REPEATED = {"tirx.exp": 25, "tirx.sigmoid": 25, "tirx.cosh": 100, "tirx.tanh": 190, "tirx.sinh": 212, "tirx.erf": 718}
_REPEATED_MAX = 10_000


def keep_chains_short(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with operations marked as opaque that would end a fused chain too long to be simplified.

    A fused kernel writes what it reads in place of each read. A concatenation reads twice, a reshape uses each index
    several times, and TVM's simplifier visits what is in a minimum or a maximum twice: along a chain, these numbers
    multiply. So do reads of one value, as in `x + f(x)`. Where a product or the chain itself grows too long, it is cut.
    """
    repeated = {} if state.launches_cost else _REPEATED
    functions = {var: func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    reads = {var: _visits_by_parameter(func) for var, func in functions.items() if pattern_of(func) <= INJECTIVE}
    copies = {var: _copies_by_parameter(functions[var], repeated) for var in reads}
    visits: dict[relax.Var, float] = {}
    copied: dict[relax.Var, tuple[float, float]] = {}
    lengths: dict[relax.Var, int] = {}
    cut: set[relax.Var] = set()
    bindings = list(bindings_of(main_of(mod)))
    # Values that another kernel reads too, as norms read a residual stream: a chain that they join begins with them.
    kept = {
        var
        for binding in bindings
        if called_function(binding.value) not in reads
        for var in find_all(binding.value, relax.Var)
    }
    for binding in bindings:
        called = called_function(binding.value)
        if called not in reads:
            continue
        operands = binding.value.args[1].fields
        total = sum(count * visits.get(operand, 1) for operand, count in zip(operands, reads[called], strict=False))
        below = [copied.get(operand, (1, 1)) for operand in operands]
        plain, written = (
            sum(count[kind] * of[kind] for count, of in zip(copies[called], below, strict=False)) for kind in (0, 1)
        )
        # One operation alone may repeat its arguments as it likes.
        joins = any(operand in visits for operand in operands)
        length = 1 + max((lengths.get(operand, 0) for operand in operands), default=0)
        if total > _VISITS_MAX or length > _LENGTH_MAX or (joins and (plain > _COPIES_MAX or written > _REPEATED_MAX)):
            cut.add(binding.var)
            total, plain, written, length = 1, 1, 1, 0
        if binding.var in kept:
            total, plain, written, length = 1, 1, 1, 0
        visits[binding.var], copied[binding.var], lengths[binding.var] = total, (plain, written), length
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


def _copies_by_parameter(func: tirx.PrimFunc, repeated: Mapping[str, int]) -> list[tuple[float, float]]:
    """Return how often an element of each parameter is in one of the result: as it is read, and as code is written."""
    of: dict[tirx.Var, dict[tirx.Var, tuple[float, float]]] = {param: {param: (1, 1)} for param in func.params}
    found: dict[tirx.Var, tuple[float, float]] = {}
    for block in list_blocks(func):
        found = {}
        calls = [call for call in find_all(block.stmt.body, Call) if call_name(call) in repeated]
        inside = [(repeated[call_name(call)], find_all(call, TensorLoad)) for call in calls]
        for load in find_all(block.stmt.body, TensorLoad):
            times = math.prod(count for count, loads in inside if any(load.same_as(one) for one in loads))
            for param, (plain, written) in of.get(load.source, {}).items():
                before = found.get(param, (0, 0))
                found[param] = before[0] + plain, before[1] + written * times
        for store in block.stores:
            of[store.buffer] = found
    return [found.get(param, (0, 0)) for param in func.params]
