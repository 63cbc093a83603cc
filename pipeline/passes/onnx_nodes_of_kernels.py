"""Passes: keep the way back to ONNX through fusion, which replaces the bindings it groups by new ones.

`FuseOps` outlines groups of bindings into functions and merges equal functions, so the names inside a merged function
are those of its first use only. The group behind every call is found by replay: each operation in the outlined
body, with the call's own arguments put in, is looked up among the operations `main` had before fusion.

Fusion also moves operations: a group stands where its last member stood. Of several equal operations (two `arange` over
one symbolic size, say) the order does not tell which is which, the names do: a binding that was not grouped keeps its
own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import Key, bindings_of, called_function, key_of, main_of, with_main
from relaxtune.pipeline.passes.kit.rewrite import rename_bindings
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.module import KernelCall


@dataclass
class UnfusedBindings:
    """The bindings of `main` before fusion: operation key -> names, in order (equal operations queue up)."""

    names: dict[Key, deque[str]] = field(default_factory=lambda: defaultdict(deque))
    readers: dict[str, list[str]] = field(default_factory=dict)
    inputs: dict[str, list[str]] = field(default_factory=dict)


def record_unfused(mod: tvm.ir.IRModule) -> UnfusedBindings:
    """Return the operations of `main` before `FuseOps`."""
    record = UnfusedBindings()
    env: dict[relax.Var, Key] = {}
    for binding in bindings_of(main_of(mod)):
        name = binding.var.name
        key = key_of(binding.value, env)
        record.names[key].append(name)
        env[binding.var] = f"var:{name}"
        record.inputs[name] = [used.name for used in relax.analysis.free_vars(binding.value)]
        for used in record.inputs[name]:
            record.readers.setdefault(used, []).append(name)
    return record


def name_fused(mod: tvm.ir.IRModule, unfused: UnfusedBindings, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod`, the result of `FuseOps`, with unique names in `main`, and record each one's ONNX nodes."""
    main = main_of(mod)
    # The names of the bindings that fusion left alone are not for an equal operation in a group.
    ungrouped = {binding.var.name for binding in bindings_of(main)} & unfused.inputs.keys()
    for queue in unfused.names.values():
        kept = [name for name in queue if name not in ungrouped]
        if len(queue) > 1 and kept:
            queue.clear()
            queue.extend(kept)
    env: dict[relax.Var, Key] = {}
    groups: dict[relax.Var, list[str]] = {}
    for binding in bindings_of(main):
        groups[binding.var] = _replay(mod, binding, env, unfused)
    names: dict[relax.Var, str] = {}
    taken = {param.name for param in main.params} | set(state.sources)
    sources: dict[str, tuple[str, ...]] = {}
    for var, members in groups.items():
        base = members[-1] if members else var.name
        name, index = base, 0
        while name in sources or (name in taken and name != base):
            index += 1
            name = f"{base}__{index}"
        names[var] = name
        sources[name] = state.nodes_of(members) or _inherited(members, unfused, state)
    state.sources.update(sources)
    return with_main(mod, rename_bindings(main, names))


def _replay(
    mod: tvm.ir.IRModule, binding: relax.Binding, env: dict[relax.Var, Key], unfused: UnfusedBindings
) -> list[str]:
    """Return the names, before fusion, of the bindings that `binding` now stands for, and teach `env` its result."""
    value = binding.value
    own_name = binding.var.name
    callee = mod[value.op] if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar) else None
    if not isinstance(callee, relax.Function):
        key = key_of(value, env)
        if isinstance(value, relax.TupleGetItem) and isinstance(source := env.get(value.tuple_value), tuple):
            env[binding.var] = source[1 + int(value.index)]
            return []
        name = own_name if own_name in unfused.inputs else _take(unfused, key, own_name)
        env[binding.var] = f"var:{name or own_name}"
        return [name] if name else []
    inner: dict[relax.Var, Key] = {p: key_of(a, env) for p, a in zip(callee.params, value.args, strict=True)}
    members = []
    for step in bindings_of(callee):
        if isinstance(step.value, relax.Var | relax.Tuple):
            inner[step.var] = key_of(step.value, inner)
            continue
        name = _take(unfused, key_of(step.value, inner), step.var.name)
        inner[step.var] = f"var:{name}" if name else f"var:{step.var.name}"
        members += [name] if name else []
    env[binding.var] = key_of(callee.body.body, inner)
    return members


def _take(unfused: UnfusedBindings, key: Key, hint: str) -> str | None:
    """Return the name of a binding with this operation: `hint` where it is one and is not taken yet, else the next.

    The last one stays, for operations FuseOps repeats.
    """
    queue = unfused.names.get(key)
    if not queue:
        return None
    if len(queue) == 1:
        return queue[0]
    if hint not in queue:
        return queue.popleft()
    queue.remove(hint)
    return hint


def _inherited(members: Iterable[str], unfused: UnfusedBindings, state: LoweringState) -> tuple[str, ...]:
    """Return the nodes of the nearest consumer that has some, else of the nearest producer."""
    for edges in (unfused.readers, unfused.inputs):
        seen, frontier = set(members), list(members)
        while frontier:
            frontier = list(dict.fromkeys(n for name in frontier for n in edges.get(name, ()) if n not in seen))
            seen.update(frontier)
            for name in frontier:
                if nodes := state.nodes_of([name]):
                    return nodes
    return ()


def collect_kernels(mod: tvm.ir.IRModule, state: LoweringState) -> dict[str, tuple[KernelCall, ...]]:
    """Return PrimFunc name -> its calls in `main`, in execution order."""
    calls: dict[str, list[KernelCall]] = {}
    for binding in bindings_of(main_of(mod)):
        callee = called_function(binding.value)
        if callee is not None:
            call = KernelCall(binding.var.name, state.sources.get(binding.var.name, ()))
            calls.setdefault(callee.name_hint, []).append(call)
    return {name: tuple(found) for name, found in calls.items()}
