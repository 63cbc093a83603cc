"""Pass: tell kernels which of their parameters are weights, so that they may read them ahead of time."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from pipeline.passes.ir import bindings_of, called_function, is_constant, main_of
from pipeline.passes.state import LoweringState
from schedules.templates.gemm_sm90 import CONSTANT_PARAMS_ATTR


def mark_constants(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the positions of parameters that are weights in every call of a PrimFunc as its attribute.

    Templates read it: a kernel with dependent launch loads weights before `griddepcontrol.wait`, while the kernel
    before it still runs. For CUDA only; elsewhere nothing reads it, and it would tell apart kernels that are
    the same. There they are not: equal functions of which one reads a weight where another reads an activation are two
    tasks, as their best kernels differ. (A PrimFunc that is called both ways stays unmarked.)

    Why this is safe. A weight is a constant of the module, or a parameter of `main` after its inputs: no kernel writes
    it, and it is in place before the first kernel starts. Everything else is read, and every output written, after the
    wait. The wait returns when the kernel before has ended with all it wrote; that this covers the kernels before that
    one, too, is by induction: a kernel either has no dependent launch, then it starts when all before it have ended; or
    it has, then at least one of its threads waits, and it cannot end before the wait has returned. So when a kernel has
    ended, all before it have. Whatever stands before a dependent kernel may be of any kind (a fallback's kernel, a
    library's, a copy): what does not signal early counts as signalling at its end. Hence the one rule for makers of
    kernels: a kernel launched as dependent waits in at least one thread on every path, before it reads
    anything that is not marked, and before it writes anything (the memory planner reuses memory, so a write too early
    could fall into what a kernel that still runs reads). (CUDA C++ Programming Guide 13.0, "Programmatic Dependent
    Launch and Synchronization"; PTX ISA 9.0, "griddepcontrol".)
    """
    if state.target.kind.name != "cuda":
        return mod
    main = main_of(mod)
    inputs = len(state.graph.inputs)
    weights = set(main.params[inputs:])
    marked: dict[tvm.ir.GlobalVar, set[int]] = {}
    for binding in bindings_of(main):
        callee = called_function(binding.value)
        if callee is None:
            continue
        args = binding.value.args[1]
        constant = {
            position
            for position, arg in enumerate(args.fields if isinstance(args, relax.Tuple) else [args])
            if is_constant(arg) or (isinstance(arg, relax.Var) and arg in weights)
        }
        marked[callee] = marked[callee] & constant if callee in marked else constant
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for callee, positions in marked.items():
        if positions and isinstance(mod[callee], tirx.PrimFunc):
            result[callee] = mod[callee].with_attr(CONSTANT_PARAMS_ATTR, sorted(positions))
    return result
