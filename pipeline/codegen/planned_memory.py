"""The memory of a module: the largest sizes that it is planned for, and the bytes that the plan takes."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import relax, tirx

from relaxtune.schedules.sizes import largest_size

# Read by TVM's memory planner: variable -> its largest value.
_MAXIMA = "tir_var_upper_bound"
_ALLOC_STORAGE = "relax.vm.alloc_storage"
_SIZES = "shape_func"


def planned_bytes(mod: tvm.ir.IRModule) -> int | None:
    """Return the bytes of all storage that a planned module asks for: intermediates and outputs, weights not counted.

    None when a size depends on the inputs' shapes, and has no maximum. To be asked before shapes are lowered.
    """
    sizes: list[int | None] = []
    for _, function in entries(mod):
        maxima = maxima_of(function)

        def visit(expr: tvm.ir.Expr, maxima: Mapping[str, int] = maxima) -> None:
            if isinstance(expr, tvm.ir.Call) and str(getattr(expr.op, "name", "")) == _ALLOC_STORAGE:
                extents = list(expr.args[0].values) if isinstance(expr.args[0], relax.ShapeExpr) else []
                sizes.extend([largest_size(extent, maxima) for extent in extents] or [None])

        relax.analysis.post_order_visit(function, visit)
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def with_maxima(mod: tvm.ir.IRModule, maxima: Mapping[str, int]) -> tvm.ir.IRModule:
    """Return the module with memory to be planned for the largest sizes of its symbolic axes, by their names."""
    if not maxima:
        return mod
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for var, function in entries(mod):
        result[var] = function.with_attr(_MAXIMA, dict(maxima))
    return result


def maxima_of(function: relax.Function) -> dict[str, int]:
    """Return the largest sizes that `with_maxima` told, by the names of axes."""
    maxima = function.attrs.get(_MAXIMA, {}) if function.attrs else {}
    return {str(name): int(size) for name, size in maxima.items()}


def largest_shape(value: relax.Expr, maxima: Mapping[str, int]) -> list[int] | None:
    """Return a tensor's shape where every symbolic size is the largest; None where one has no maximum.

    A size is taken to grow with the axes that it is made of.
    """
    shape = getattr(value.ty, "shape", None)
    if shape is None:
        return None
    largest = [number for size in shape if (number := largest_size(size, maxima)) is not None]
    return largest if len(largest) == len(shape) else None


def entries(mod: tvm.ir.IRModule) -> list[tuple[tvm.ir.GlobalVar, relax.Function]]:
    """Return `main` and its variants (`pipeline.artifact.compile`), all there is before graphs are lifted out."""
    return [(var, function) for var, function in mod.functions_items() if isinstance(function, relax.Function)]


def with_sizes_in_order(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return the module with the sizes of `VMShapeLower` stored in the order of their places, by one function each.

    TVM stores them in the order of a hash of addresses, and takes functions for one only where that order is the same.
    So the host's code of two equal compilations differed.
    """
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    kept: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    same: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    for var, function in sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint)):
        stores = list(getattr(getattr(function, "body", None), "seq", ()))
        if not var.name_hint.startswith(_SIZES) or not all(isinstance(one, tirx.BufferStore) for one in stores):
            continue
        # Each is computed of sizes that the caller stored.
        ordered = (
            function.with_body(tirx.SeqStmt(sorted(stores, key=lambda one: int(one.indices[0]))))
            if stores
            else function
        )
        first = next((other for other, known in kept.items() if tvm_ffi.structural_equal(known, ordered)), None)
        if first is None:
            kept[var] = result[var] = ordered
        else:
            same[var] = first
            del result[var]
    for var, function in entries(result) if same else ():
        result[var] = calling(function, same)
    return result


def calling(function: relax.Function, others: Mapping[tvm.ir.GlobalVar, tvm.ir.GlobalVar]) -> relax.Function:
    """Return a function that calls other functions in the place of some."""
    return tvm_ffi.structural_map(function, (tvm.ir.GlobalVar, lambda var: others.get(var, var)))
