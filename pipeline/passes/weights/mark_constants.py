"""Pass: tell kernels which of their parameters are weights or inputs, so that they may read them ahead of time."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import called_function, is_constant, static_shape, with_functions
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.functions.attention import spec_of
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR, INPUT_PARAMS_ATTR, OWN_OUTPUTS_ATTR


def mark_constants(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the positions of parameters that are weights in every call of a PrimFunc as its attribute.

    Where all inputs have static shapes, attention gets two more: those that are inputs of the graph in every call
    (caches), and its outputs that are results of the graph and that nothing else reads (caches that have grown). No
    other template reads inputs or writes results ahead of time.

    A kernel with dependent launch loads weights before `griddepcontrol.wait`, while the kernel before it still runs. On
    CUDA only: elsewhere nothing reads the mark. Where one function reads a weight and an equal one an activation, they
    are two tasks, since their best kernels differ. (A PrimFunc that is called both ways stays unmarked.)

    Why this is safe. No kernel writes a weight, and it is in place before the first kernel starts. Everything else is
    read, and every output written, after the wait, which returns when the kernel before has ended with all it wrote.
    This covers the kernels before that one, too: a kernel without dependent launch starts when all before it have
    ended, and one with it cannot end before its own wait has returned. A kernel of any other kind (a fallback's, a
    library's, a copy) signals at its end. Hence the one rule for makers of kernels: one launched as dependent waits
    in at least one thread on every path, before it reads anything that is not marked, and before it writes anything but
    a marked result: memory is reused, and a kernel that still runs may read there. (CUDA C++ Programming Guide 13.0,
    "Programmatic Dependent Launch and Synchronization"; PTX ISA 9.0, "griddepcontrol".)

    Of inputs it is safe as long as nothing that writes them overlaps with the kernels, and of results as long as
    nothing else uses their memory. A module whose inputs are static runs as one CUDA graph: its first kernel starts
    when all before the launch of the graph has ended, and each result has memory of its own
    (`pipeline.codegen.cuda_graph`). Compiled without a graph, kernels start one after another
    (`pipeline.codegen.cuda_graph`).
    """
    if state.target.kind.name != "cuda":
        return mod
    graph = Graph(mod)
    main = graph.main
    count = state.input_count
    weights, inputs = set(main.params[count:]), set(main.params[:count])
    if not all(static_shape(param) is not None for param in inputs):
        inputs = set()
    results = _results(graph) if inputs else {}
    attributes = (CONSTANT_PARAMS_ATTR, INPUT_PARAMS_ATTR, OWN_OUTPUTS_ATTR)
    marked: dict[str, dict[tvm.ir.GlobalVar, set[int]]] = {attribute: {} for attribute in attributes}
    for binding in graph.bindings:
        callee = called_function(binding.value)
        if callee is None:
            continue
        args = binding.value.args[1]
        places = list(enumerate(args.fields if isinstance(args, relax.Tuple) else [args]))
        constant = {place for place, arg in places if is_constant(arg) or arg in weights}
        given = {place for place, arg in places if arg in inputs}
        own = {len(places) + output for output in results.get(binding.var, ())}
        for attribute, found in zip(attributes, (constant, given, own), strict=True):
            known = marked[attribute]
            known[callee] = known[callee] & found if callee in known else found
    changed: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    for attribute, functions in marked.items():
        for callee, positions in functions.items():
            func = changed.get(callee, mod[callee])
            # An attribute that no template reads would only tell tasks apart.
            read = attribute == CONSTANT_PARAMS_ATTR or spec_of(func) is not None
            if positions and isinstance(func, tirx.PrimFunc) and read:
                changed[callee] = func.with_attr(attribute, sorted(positions))
    return with_functions(mod, changed)


def _results(graph: Graph) -> dict[relax.Var, set[int]]:
    """Return the outputs of each call that are results of `main` and that nothing else reads."""
    result = graph.main.body.body
    whole = graph.values.get(result, result)
    found: dict[relax.Var, set[int]] = {}
    for field in whole.fields if isinstance(whole, relax.Tuple) else []:
        value = graph.value(field)
        if isinstance(value, relax.TupleGetItem) and all(user in (result, field) for user in graph.readers(field)):
            found.setdefault(value.tuple_value, set()).add(int(value.index))
    return found
