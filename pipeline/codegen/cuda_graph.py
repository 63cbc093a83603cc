"""Make a whole `main` capturable as one CUDA graph.

`RewriteCUDAGraph` lifts only calls whose arguments lie at fixed addresses, in memory of the function's own. Kernels
that read an input therefore stay outside and split the graph, and so do kernels that write an output.
Here the inputs are declared to be at fixed addresses too, and the outputs are returned as views of the graph's memory:

::

    main(x, weights...)                main(x, weights...)
        y = kernel_1(x)         ->         y = kernel_1(x)            inside the graph: all kernels
        z = kernel_2(y)                    z = kernel_2(y)
        return z                           return view(z)

This takes two passes: `capture_whole_function` before memory is planned, and after it `fix_output_memory`, since the
planner leaves outputs to be allocated anew by each run.

Hence the caller must pass the same input and weight tensors in every run (`pipeline.artifact.module.Module` owns
them), and the outputs live in the graph's memory and are overwritten by the next run. No kernel is spent on copying
inputs, which matters where an input is a large key-value cache.

With symbolic inputs the graphs inside `main` are those of parts whose sizes are known; they are most of a decode step
with growing caches, each call of which has new sizes (16 layers on an H200: 0.8 ms of host time, 1.4 without them). The
runtime captures whole calls of sizes that come again, and no graph can be launched while another one is captured. So
`with_whole_calls` adds an entry for that, in which these parts are called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.utils import copy_with_new_vars

from relaxtune.pipeline.codegen.cuda_libraries import WHOLE_CALL
from relaxtune.pipeline.codegen.planned_memory import entries, largest_shape, maxima_of
from relaxtune.schedules.marks import DEPENDENT_LAUNCH, LAUNCH_ATTR
from relaxtune.schedules.tir.blocks import static_shape

# Read by RewriteCUDAGraph: parameters from this position on are at fixed addresses.
NUM_INPUT = "num_input"
_CAPTURE = "vm.builtin.cuda_graph.run_or_capture"


def computes_sizes(mod: tvm.ir.IRModule) -> bool:
    """Return whether `main` reads a size from the device, which nothing that is captured can wait for.

    `RewriteCUDAGraph` lifts the tensor and its reading, and leaves behind what the size defines.
    """
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    return any(isinstance(one, relax.Call) and one.op == tvm.ir.Op.get("relax.tensor_to_shape") for one in values)


def capture_whole_function(mod: tvm.ir.IRModule, inputs: int) -> tvm.ir.IRModule:
    """Return the module with `main`, and its variants, rewritten so that every kernel can be captured.

    Memory is not planned yet; the first `inputs` parameters are inputs, the others weights. With a symbolic input the
    inputs stay the caller's: a graph is captured for one set of shapes, at run time
    (`pipeline.artifact.gpu.size_graphs`). Where `with_maxima` told the largest sizes, memory is the module's all the
    same.
    """
    builder = relax.BlockBuilder(mod)
    for var, main in entries(mod):
        fixed = all(static_shape(param) is not None for param in main.params[:inputs])
        views, value = _view_outputs(main.body, maxima_of(main))
        blocks = [*main.body.blocks, *([relax.BindingBlock(views)] if views else [])]
        function = relax.Function(main.params, relax.SeqExpr(blocks, value), main.ret_ty, main.is_pure, main.attrs)
        builder.update_func(var, function.with_attr(NUM_INPUT, 0 if fixed else inputs))
    return relax.transform.Normalize()(builder.get())


def fix_output_memory(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return the planned module with every tensor that `main` would allocate in each run in memory of its own instead.

    Runs between StaticPlanBlockMemory and RewriteCUDAGraph, which moves such memory into the graph's.
    """
    builder = relax.BlockBuilder(mod)
    for var, function in entries(mod):
        builder.update_func(var, _FixedMemory(mod, maxima_of(function)).visit_expr(function))
    return builder.get()


@mutator
class _FixedMemory(PyExprMutator):  # type: ignore[misc]  # TVM's classes carry no types
    """Turn run-time allocations of static size, or of one that has a maximum, into storage plus a tensor in it."""

    def __init__(self, mod: tvm.ir.IRModule, maxima: Mapping[str, int]) -> None:
        super().__init__(mod)
        self._maxima = maxima

    def visit_call_(self, op: tvm.ir.Call) -> tvm.ir.Expr:
        call = super().visit_call_(op)
        if call.op != tvm.ir.Op.get("relax.builtin.alloc_tensor"):
            return call
        largest, dtype = largest_shape(call, self._maxima), call.ty.dtype
        if largest is None:
            return call
        size = math.prod(largest) * ((tvm.DataType(str(dtype)).bits + 7) // 8)
        storage = self.builder_.emit(relax.op.memory.alloc_storage(relax.ShapeExpr([size]), 0, "global", str(dtype)))
        return relax.op.memory.alloc_tensor(storage, 0, call.ty.shape, str(dtype))


def with_whole_calls(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return the module, after RewriteCUDAGraph, with an entry that can be captured beside each that has graphs inside.

    An entry of static inputs has none: it is one graph, which TVM captures.
    """
    builder = relax.BlockBuilder(mod)
    for var, function in entries(mod):
        if function.attrs and int(function.attrs.get(NUM_INPUT, 0)):
            whole = _CalledRegions(mod).visit_expr(function)
            if not whole.same_as(function):
                name = f"{var.name_hint}{WHOLE_CALL}"
                builder.add_func(copy_with_new_vars(whole).with_attr("global_symbol", name), name)
    return builder.get()


@mutator
class _CalledRegions(PyExprMutator):  # type: ignore[misc]  # TVM's classes carry no types
    """Turn captures of a lifted function into calls of it."""

    def visit_call_(self, op: tvm.ir.Call) -> tvm.ir.Expr:
        call = super().visit_call_(op)
        if call.op != tvm.ir.Op.get("relax.call_builtin_with_ctx") or str(call.args[0].global_symbol) != _CAPTURE:
            return call
        region, arguments, *_ = call.args[1].fields
        return relax.Call(region, list(arguments.fields))


def _view_outputs(body: relax.SeqExpr, maxima: Mapping[str, int]) -> tuple[list[relax.VarBinding], relax.Expr]:
    """Return bindings that view each output once more, and the function's result over those views.

    RewriteCUDAGraph leaves the memory of a tensor that is returned itself to the caller, a fresh one for each run. A
    view hides that it is returned; and a view made by the VM's own function (unlike `relax.reshape`, which would be
    captured too) is a reader outside the graph, without which nothing would come out of it.
    """
    result = body.body
    bound = {binding.var: binding.value for block in body.blocks for binding in block.bindings}
    whole = bound.get(result, result)
    fields = list(whole.fields) if isinstance(whole, relax.Tuple) else [result]
    bindings, outputs = [], []
    for index, field in enumerate(fields):
        if not largest_shape(field, maxima):
            outputs.append(field)
            continue
        view = relax.Var(f"output_{index}", field.ty)
        call = relax.op.call_pure_packed("vm.builtin.reshape", field, field.ty.shape, ty_args=[field.ty])
        bindings.append(relax.VarBinding(view, call))
        outputs.append(view)
    if not isinstance(whole, relax.Tuple):
        return bindings, outputs[0]
    tuple_var = relax.Var("outputs", whole.ty)
    bindings.append(relax.VarBinding(tuple_var, relax.Tuple(outputs)))
    return bindings, tuple_var


# Kernels with dependent launch (PTX's griddepcontrol) start while the one before them ends. Before they wait for it,
# they read what no kernel of the graph writes, and attention writes results that no other kernel uses
# (`pipeline.passes.weights.mark_constants`). This holds inside a launch of a CUDA graph; in launches one by one, the
# kernels of a run could overlap with those of the run before, and share the allocator's memory.


def without_dependent_launch(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return the module with kernels that start when the one before has ended; what they compute stays."""
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for variable, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc) and function.attrs and LAUNCH_ATTR in function.attrs:
            kept = [str(tag) for tag in function.attrs[LAUNCH_ATTR] if str(tag) != DEPENDENT_LAUNCH]
            bare = function.without_attr(LAUNCH_ATTR)
            result[variable] = bare.with_attr(LAUNCH_ATTR, kept) if kept else bare
    return result
