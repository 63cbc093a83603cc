"""Pass: everything that does not depend on the inputs becomes a constant, up to a bounded size."""

from __future__ import annotations

import math

import tvm
from tvm import relax, topi

from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    binding_count,
    bindings_of,
    constants_in,
    dtype_of,
    is_constant,
    is_op,
    main_of,
    static_shape,
    with_main,
)
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_constants, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState

# Operators that TVM folds where an operand is a number.
FOLDED = ("divide", "floor_mod", "maximum", "minimum", "mod", "multiply")
# A fold may make a constant this large out of nothing (the causal mask of 2048 tokens in float32 is 16 MiB) ...
FOLD_BYTES_MAX = 16 * 2**20
# ... or this many times what it is made of (a transposed weight replaces the weight).
FOLD_GROWTH_MAX = 2


def fold_constants(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with bindings that depend on constants alone evaluated: masks, position ids, sin and cos tables.

    A binding whose result would be both larger than `FOLD_BYTES_MAX` and larger than `FOLD_GROWTH_MAX` times its
    constants stays in the graph, with a note; one of `LoweringState.unfolded` stays, too. `FoldConstant` has no limit
    of its own, so the constants of such a binding are hidden from it as parameters of `main` while it runs. So are the
    numbers that TVM computes with as if they were real.
    """
    if not _may_fold(mod):
        return mod
    mod = _with_casts_as_kernels(mod, state)
    large = _large_results(mod, state)
    main = main_of(mod)
    of_numbers = {
        binding.var
        for binding in bindings_of(main)
        if is_op(binding.value, *FOLDED) and any(map(is_special_number, binding.value.args))
    }
    if not large and not of_numbers:
        return _fold(mod, state)
    hidden: dict[relax.Var, tvm.ir.Expr] = {}

    def hide(constant: tvm.ir.Expr, reader: relax.Var | None) -> tvm.ir.Expr:
        if reader not in large and not (reader in of_numbers and is_special_number(constant)):
            return constant
        param = relax.Var(f"hidden_constant_{len(hidden)}", constant.ty)
        hidden[param] = constant
        return param

    body = replace_constants(main, hide)
    opaque = relax.Function([*main.params, *hidden], body.body, body.ret_ty, body.is_pure, body.attrs)
    folded = _fold(with_main(mod, opaque), state)
    params = main_of(folded).params[len(main.params) :]
    shown = main_of(folded).bind_params(dict(zip(params, hidden.values(), strict=True)))
    return with_main(folded, shown)


def _may_fold(mod: tvm.ir.IRModule) -> bool:
    """Return whether a binding may depend on constants alone. TVM's pass legalises every operator to find out."""
    if sum(isinstance(function, relax.Function) for _, function in mod.functions_items()) > 1:
        return True
    constants: set[relax.Var] = set()
    for binding in bindings_of(main_of(mod)):
        value = binding.value
        # Bindings inside a branch, or a function of its own, are left out.
        if isinstance(value, relax.If | relax.Function):
            return True
        if all(var in constants for var in relax.analysis.free_vars(value)):
            if not is_constant(value):
                return True
            constants.add(binding.var)
    return False


def _with_casts_as_kernels(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with casts of one known number to an integer as kernels.

    TVM folds such a cast by Python's integers, which are not infinite and do not wrap.
    """
    known: set[relax.Var] = set()
    casts: set[relax.Var] = set()
    for binding in bindings_of(main_of(mod)):
        value = binding.value
        if not all(var in known for var in relax.analysis.free_vars(value)):
            continue
        known.add(binding.var)
        if is_op(value, "astype") and not value.ty.ndim and "int" in dtype_of(value):
            casts.add(binding.var)

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        if binding.var not in casts:
            return None
        return new.kernel(topi.cast, new.of(binding.value.args[0]), dtype_of(binding.value), name="cast")

    return rewrite(mod, state, rule) if casts else mod


def _fold(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    before = binding_count(mod)
    result: tvm.ir.IRModule = relax.transform.FoldConstant()(mod)
    # Parts of a split constant are constants, which TVM does not follow further.
    values = {binding.var: binding.value for binding in bindings_of(main_of(result))}
    taken = {var: value for var, value in values.items() if isinstance(value, relax.TupleGetItem)}
    wholes = {var: values.get(value.tuple_value) for var, value in taken.items()}
    fields = {var: whole.fields[taken[var].index] for var, whole in wholes.items() if isinstance(whole, relax.Tuple)}
    parts = {var: part for var, part in fields.items() if is_constant(part)}
    if parts:
        result = relax.transform.FoldConstant()(rewrite(result, state, lambda _, binding: parts.get(binding.var)))
    state.constants_folded += before - binding_count(result)
    return result


def _large_results(mod: tvm.ir.IRModule, state: LoweringState) -> set[relax.Var]:
    """Return the variables that depend on constants alone but are too large to become one, and all they are made of.

    Their operands have to stay as well: folded, it would leave them with constant operands of their own.
    """
    known: dict[relax.Var, int] = {}
    made_from: dict[relax.Var, list[relax.Var]] = {}
    large: set[relax.Var] = set()
    for binding in bindings_of(main_of(mod)):
        used = relax.analysis.free_vars(binding.value)
        if not all(var in known for var in used) or isinstance(binding.value, relax.Function):
            continue
        made_from[binding.var] = used
        made_of = sum(map(_bytes, constants_in(binding.value))) + sum(known[var] for var in used)
        size = _bytes(binding.var)
        if binding.var.name in state.unfolded:
            large.add(binding.var)
        elif size > FOLD_BYTES_MAX and size > FOLD_GROWTH_MAX * made_of:
            large.add(binding.var)
            state.note(
                f"{binding.var.name} is left in the graph: as a constant it would take {size} bytes, made of {made_of}"
            )
        else:
            known[binding.var] = size
    waiting = list(large)
    while waiting:
        waiting = [var for kept in waiting for var in made_from[kept] if var not in large]
        large.update(waiting)
    return large


def _bytes(expr: tvm.ir.Expr) -> int:
    """Return the size of a tensor of static shape, 0 for anything else."""
    shape, dtype = static_shape(expr), dtype_of(expr)
    return 0 if shape is None or not dtype else math.prod(shape) * max(1, int(tvm.DataType(dtype).bits) // 8)


def is_special_number(expr: tvm.ir.Expr) -> bool:
    """Return whether TVM must not see a constant as a number: 0, an infinity or NaN.

    It makes 0 of `x * 0`, `x` of `min(x, NaN)`, and an error of `x / 0`. As tensors of one element they are what they
    are.
    """
    if not is_constant(expr) or expr.ty.ndim or not dtype_of(expr).startswith(("float", "bfloat")):
        return False
    value = float(array_of(expr))
    return value == 0 or not math.isfinite(value)
