"""Pass: the two matmuls of attention and the softmax between them are one CPU kernel."""

from __future__ import annotations

from typing import TypeAlias

import tvm
from tvm import relax, tirx
from tvm.ir.expr import TensorLoad

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import called_function
from relaxtune.pipeline.passes.kit.one_function import fused_calls, operands_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.cpu.any_size.attention import any_size_attention
from relaxtune.schedules.tir.blocks import list_blocks
from relaxtune.schedules.tir.contraction import find_operands

_Calls: TypeAlias = tuple[relax.Var, ...]


def keep_scores_in_cache(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with attention of symbolic lengths as one kernel on a CPU.

    ::

        scores  = epilogue(Q K)
        weights = softmax(scores)         ->        result = attention(Q, K, ..., V, ...)
        result  = epilogue(weights V)

    All three are kernels already, and nothing else reads the scores or the weights, which are as large as the square of
    the length. The new function has the blocks of the three; it is made where the schedule of such functions takes it.
    Where Q or V is a slice that nothing else reads, and that the kernel can read where it lies, the slice goes too.
    """
    if state.target.kind.name != "llvm":
        return mod
    graph = Graph(mod)
    maker = _Maker(graph, state.target)
    found: dict[relax.Var, tuple[_Calls, tirx.PrimFunc]] = {}
    for binding in graph.bindings:
        calls = _find(binding.var, graph)
        func = None if calls is None else maker.make(calls)
        if calls is not None and func is not None:
            calls, func = _with_moves(calls, func, graph, maker)
            found[calls[-1]] = calls, func
            state.sources[calls[-1].name] = state.nodes_of(var.name for var in calls)
    added: dict[tirx.PrimFunc, tvm.ir.GlobalVar] = {}

    def emit(new: Rewriter, binding: relax.VarBinding, made: tuple[_Calls, tirx.PrimFunc]) -> tvm.ir.Expr:
        calls, func = made
        if func not in added:
            added[func] = new.function(func, "attention")
        operands = [new.of(arg) for arg in operands_of(calls, graph)]
        return relax.call_tir(added[func], relax.Tuple(operands), binding.var.ty)

    return replace_found(mod, state, found, emit, "attentions keep their scores in the cache")


def _find(softmax: relax.Var, graph: Graph) -> _Calls | None:
    """Return the calls around one that may be a softmax: matmul, itself, matmul."""
    callee = called_function(graph.value(softmax))
    if callee is None or _products(graph.mod[callee]) or len(_tensors(graph.value(softmax))) != 1:
        return None
    scores, result = _tensors(graph.value(softmax))[0], graph.only_reader(softmax)
    if result is None or not isinstance(scores, relax.Var) or graph.only_reader(scores) != softmax:
        return None
    around = [called_function(graph.value(var)) for var in (scores, result)]
    if not all(one is not None and _products(graph.mod[one]) == 1 for one in around):
        return None
    return scores, softmax, result


def _with_moves(calls: _Calls, func: tirx.PrimFunc, graph: Graph, maker: _Maker) -> tuple[_Calls, tirx.PrimFunc]:
    """Return the calls after those that move Q and V, where the kernel can read these in their old places."""
    for reader in (calls[0], calls[-1]):
        for moved in _tensors(graph.value(reader)):
            callee = called_function(graph.value(moved))
            if moved in calls or callee is None or graph.only_reader(moved) != reader:
                continue
            if _is_move(graph.mod[callee]) and (made := maker.make((moved, *calls))) is not None:
                calls, func = (moved, *calls), made
    return calls, func


def _is_move(func: tvm.ir.BaseFunc) -> bool:
    """Return whether a function moves elements, and does nothing else."""
    if not isinstance(func, tirx.PrimFunc):
        return False
    stores = [block.stores for block in list_blocks(func)]
    return all(len(found) == 1 and isinstance(found[0].value, TensorLoad) for found in stores)


def _products(func: tvm.ir.BaseFunc) -> int:
    """Return how many matmuls a function has."""
    if not isinstance(func, tirx.PrimFunc):
        return 0
    blocks = [block for block in list_blocks(func) if block.is_reduction]
    return sum(len(block.stores) == 1 and find_operands(block.stores[0]) is not None for block in blocks)


def _tensors(call: tvm.ir.Expr | None) -> list[tvm.ir.Expr]:
    """Return what a call of a kernel is given."""
    assert isinstance(call, relax.Call)
    return list(call.args[1].fields)


class _Maker:
    """Makes one function of three, the same one for calls of equal functions and sizes."""

    def __init__(self, graph: Graph, target: tvm.target.Target) -> None:
        self._graph = graph
        self._target = target
        self._made: dict[tuple[object, ...], tirx.PrimFunc | None] = {}

    def make(self, calls: _Calls) -> tirx.PrimFunc | None:
        """Return the function of a matmul, a softmax and a matmul; None where the schedule does not take it."""
        values = [self._graph.value(var) for var in calls]
        # A call with sizes beside its tensors has them in a third argument.
        if any(not isinstance(value, relax.Call) or len(value.args) != 2 for value in values):
            return None
        inside = [number for value in values for number, arg in enumerate(_tensors(value)) if arg in calls]
        types = [str(one.ty) for one in (*operands_of(calls, self._graph), *calls)]
        key = (*map(called_function, values), *inside, *types)
        if key not in self._made:
            func, _ = fused_calls(calls, calls[-1:], self._graph, "attention")
            with self._target:
                taken = any_size_attention(func, self._target)
            self._made[key] = None if taken is None else func
        return self._made[key]
