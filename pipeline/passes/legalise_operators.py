"""Operators that lose a NaN in TVM's kernels, with kernels that keep it, as ONNX Runtime does.

TVM's `max(x, 0)` compares on a CPU and is `fmaxf` on a GPU: both make a number of a NaN. Its arithmetic on numbers that
are known is that of real numbers.
"""

from __future__ import annotations

import math
import operator as operators
from collections.abc import Callable, Set
from functools import cache, partial

import numpy as np
import tvm
from tvm import relax, te, tirx, topi
from tvm.relax.transform.legalize_ops.common import _try_convert_to_scalar_const
from tvm_ffi import StructuralKey

from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.passes.kit.ir import array_of, bindings_of, dtype_of, is_constant, is_op, static_shape
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.legalise_reductions import Legaliser, reduction_legalisers
from relaxtune.pipeline.passes.symbolic.symbolic_moves import legalise_concatenation, legalise_reshape, legalise_slice
from relaxtune.pipeline.passes.weights.fold_constants import FOLDED, is_special_number

# TVM generates no code for them in float16, on a CPU or on a GPU.
_NOT_IN_HALF = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh")
# Lowered by the values of constants.
_READ_CONSTANTS = ("relax.divide", "relax.floor_mod", "relax.mod")


def _relu(x: te.Tensor) -> te.Tensor:
    return _each(lambda value: tirx.Select(value < 0, tirx.const(0, x.dtype), value), x)


def _clip(x: te.Tensor, low: tvm.ir.Expr, high: tvm.ir.Expr) -> te.Tensor:
    low, high = tirx.const(float(low.value), x.dtype), tirx.const(float(high.value), x.dtype)
    return _each(lambda value: tirx.Select(value < low, low, tirx.Select(value > high, high, value)), x)


def _extreme(
    a: te.Tensor, b: te.Tensor | tvm.ir.Expr, wins: Callable[[tvm.ir.Expr, tvm.ir.Expr], tvm.ir.Expr]
) -> te.Tensor:
    """Return the one of two that wins; a NaN wins always, and a number given as such is none."""
    if not isinstance(b, te.Tensor):
        return _each(lambda value: tirx.Select(wins(b, value), b, value), a)
    shape = topi.utils.get_const_tuple(topi.add(a, b).shape)

    def pick(*axes: tirx.Var) -> tvm.ir.Expr:
        x, y = _at(a, axes), _at(b, axes)
        return tirx.Select(tirx.Or(wins(x, y), _is_nan(x)), x, y)

    return te.compute(shape, pick, name="extreme", tag=topi.tag.BROADCAST)


def _each(function: Callable[[tvm.ir.Expr], tvm.ir.Expr], x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda *axes: function(x(*axes)), name="compute", tag=topi.tag.ELEMWISE)


def _at(tensor: te.Tensor, axes: tuple[tirx.Var, ...]) -> tvm.ir.Expr:
    """Return the element of a tensor that is broadcast, counted from the last axis."""
    own = axes[len(axes) - len(tensor.shape) :]
    one = [isinstance(size, int | tirx.IntImm) and int(size) == 1 for size in tensor.shape]
    return tensor(*(0 if is_one else axis for axis, is_one in zip(own, one, strict=True)))


def _is_nan(value: tvm.ir.Expr) -> tvm.ir.Expr:
    narrow = str(value.ty.dtype) in ("float16", "bfloat16")
    return tirx.isnan(value.astype("float32") if narrow else value)


def _legaliser(operator: str, function: Callable[..., te.Tensor]) -> Legaliser:
    """Return how an operator of floating point numbers is lowered; integers have no NaN, and TVM lowers them."""
    stock = _stock(operator)

    def legalise(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        if not str(call.ty.dtype.dtype).startswith(("float", "bfloat")):
            return stock(builder, call)
        first, *rest = map(_try_convert_to_scalar_const, call.args)
        if rest and tvm.ir.is_prim_expr(first):
            first, rest = rest[0], [first]
        return builder.call_te(function, first, *rest, primfunc_name_hint=operator.rpartition(".")[2])

    return legalise


def _kept_apart(legalise: Legaliser) -> Legaliser:
    """Return how an operator is lowered so that special numbers beside a tensor stay tensors."""

    def lowered(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        if any(map(is_special_number, call.args)):
            arguments = [builder.emit(one) if is_special_number(one) else one for one in call.args]
            call = builder.normalize(relax.Call(call.op, arguments, call.attrs))
        return legalise(builder, call)

    return lowered


def _widened(operator: str, function: Callable[[te.Tensor], te.Tensor]) -> Legaliser:
    """Return how a function that no target has for half precision is lowered: in float32, its result rounded."""

    def legalise(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        if dtype_of(call) not in ("float16", "bfloat16"):
            return _stock(operator)(builder, call)

        def rounded(x: te.Tensor) -> te.Tensor:
            return topi.cast(function(topi.cast(x, "float32")), x.dtype)

        return builder.call_te(rounded, call.args[0], primfunc_name_hint=operator.rpartition(".")[2])

    return legalise


def _leaky_relu(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
    """Return a leaky ReLU; one that leaks nothing is a ReLU, as TVM makes 0 of `NaN * 0`."""
    if call.attrs.alpha == 0:
        return builder.call_te(_relu, call.args[0], primfunc_name_hint="relu")
    return _stock("relax.nn.leakyrelu")(builder, call)


def _of_itself(operator: str, function: Callable[[tvm.ir.Expr], tvm.ir.Expr]) -> Legaliser:
    """Return how an operator of two tensors is lowered, which may be one: TVM forgets that a NaN is not itself."""

    def legalise(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        first, second = call.args
        if isinstance(first, relax.Var) and first == second and dtype_of(first).startswith(("float", "bfloat")):
            return builder.call_te(lambda x: _each(function, x), first, primfunc_name_hint=operator)
        return _stock(f"relax.{operator}")(builder, call)

    return legalise


def _stock(operator: str) -> Legaliser:
    legalise: Legaliser = tvm.ir.Op.get(operator).get_attr("FLegalize")
    return legalise


def _divided(function: Callable[..., te.Tensor], floats: Legaliser, *, remainder: bool = False) -> Legaliser:
    """Return how a division is lowered: of integers by 0 it is 0, and the least by -1 wraps; a CPU traps at either."""

    def legalise(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        divisor, dtype = call.args[1], dtype_of(call)
        known = is_constant(divisor) and not np.isin(array_of(divisor), (0, -1)).any()
        if "int" not in dtype or known:
            return floats(builder, call)
        zero, one, minus_one = (tirx.const(number, dtype) for number in (0, 1, -1 if dtype.startswith("int") else 0))

        def divide(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            def is_trap(value: tvm.ir.Expr) -> tvm.ir.Expr:
                return tirx.Or(value == zero, value == minus_one)

            traps = _each(is_trap, b)
            result = function(a, _each(lambda value: tirx.Select(is_trap(value), one, value), b))
            shape = topi.utils.get_const_tuple(result.shape)

            def element(*axes: tirx.Var) -> tvm.ir.Expr:
                wrapped = zero if remainder else tirx.Select(_at(b, axes) == zero, zero, zero - _at(a, axes))
                return tirx.Select(_at(traps, axes), wrapped, result(*axes))

            return te.compute(shape, element, name="quotient", tag=topi.tag.BROADCAST)

        operands = [builder.emit(one) if is_constant(one) else one for one in call.args]
        return builder.call_te(divide, *operands, primfunc_name_hint="mod" if remainder else "divide")

    return legalise


def _once(legalise: Legaliser, made: dict[tuple[object, ...], tvm.ir.Call]) -> Legaliser:
    """Return how an operator is lowered: calls of the same sizes call the function that the first of them was given.

    TVM makes a function for each call, a third of a lowering, and then finds that it has it already.
    """

    def lowered(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        key = _same_work(call)
        if key is None:
            return legalise(builder, call)
        if key in made:
            first = made[key]
            return relax.Call(first.op, [first.args[0], relax.Tuple(call.args)], first.attrs, first.ty_args)
        result = legalise(builder, call)
        if is_op(result, "call_tir") and len(result.args) == 2:
            given = result.args[1].fields
            if len(given) == len(call.args) and all(map(tvm.ir.Expr.same_as, given, call.args)):
                made[key] = result
        return result

    return lowered


def _same_work(call: tvm.ir.Call) -> tuple[object, ...] | None:
    """Return what a call's function follows from; None where that may be more than the types of tensors."""
    arguments = list(call.args)
    if call.op.name in _READ_CONSTANTS and any(map(is_constant, arguments)):
        return None
    kinds = []
    for argument in arguments:
        sizes = static_shape(argument) if isinstance(argument, relax.Var) or is_constant(argument) else None
        # A constant of one element becomes a part of the function.
        if sizes is None or (is_constant(argument) and math.prod(sizes) == 1):
            return None
        first = next(place for place, one in enumerate(arguments) if one.same_as(argument))
        kinds.append((StructuralKey(argument.ty), first))
    return (call.op.name, StructuralKey(call.attrs), StructuralKey(call.ty), *kinds)


def _of_its_type(legalise: Legaliser) -> Legaliser:
    """Return how an operator is lowered to what its type says; TVM's batch norm of float16 is a kernel of float32."""

    def lowered(builder: relax.BlockBuilder, call: tvm.ir.Call) -> tvm.ir.Expr:
        made = builder.normalize(legalise(builder, call))
        if isinstance(call.ty, relax.TupleType) and isinstance(made.ty, relax.TupleType):
            pairs = list(zip(made.ty.fields, call.ty.fields, strict=True))
            if all(_same_dtype(one, other) for one, other in pairs):
                return made
            parts = builder.emit(made)
            fields = [builder.normalize(relax.TupleGetItem(parts, place)) for place in range(len(pairs))]
            casts = zip(fields, pairs, strict=True)
            return relax.Tuple([field if _same_dtype(*pair) else _as(builder, field, pair[1]) for field, pair in casts])
        return made if _same_dtype(made.ty, call.ty) else _as(builder, builder.emit(made), call.ty)

    return lowered


def _same_dtype(one: tvm.ir.Type, other: tvm.ir.Type) -> bool:
    tensors = isinstance(one, relax.TensorType) and isinstance(other, relax.TensorType)
    return not tensors or None in (one.dtype, other.dtype) or str(one.dtype) == str(other.dtype)


def _as(builder: relax.BlockBuilder, value: tvm.ir.Expr, wanted: tvm.ir.Type) -> tvm.ir.Expr:
    return builder.emit(builder.call_te(topi.cast, builder.emit(value), str(wanted.dtype), primfunc_name_hint="cast"))


def _sign(value: tvm.ir.Expr) -> tvm.ir.Expr:
    one, minus_one = (tirx.const(number, value.ty.dtype) for number in (1, -1))
    return tirx.Select(value > 0, one, tirx.Select(value < 0, minus_one, value))


def _less_itself(value: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return `x - x`: NaN where x is infinite or NaN."""
    zero, nan = (tirx.const(number, value.ty.dtype) for number in (0, float("nan")))
    wide = value.astype("float32") if str(value.ty.dtype) in ("float16", "bfloat16") else value
    return tirx.Select(tirx.Or(tirx.isnan(wide), tirx.isinf(wide)), nan, zero)


@cache
def _legalisers() -> dict[str, Legaliser]:
    """Return how each operator is lowered, under its name; what TVM does not lower has none."""
    functions: dict[str, Callable[..., te.Tensor]] = {
        "relax.clip": _clip,
        "relax.maximum": partial(_extreme, wins=operators.gt),
        "relax.minimum": partial(_extreme, wins=operators.lt),
        "relax.nn.relu": _relu,
        "relax.sign": lambda x: _each(_sign, x),
    }
    own = {operator: _legaliser(operator, function) for operator, function in functions.items()}
    own |= {name: _kept_apart(own.get(name) or _stock(name)) for name in (f"relax.{operator}" for operator in FOLDED)}
    own |= {"relax.concat": legalise_concatenation, "relax.reshape": legalise_reshape}
    own |= {"relax.strided_slice": legalise_slice}
    own |= {f"relax.{name}": _widened(f"relax.{name}", getattr(topi, name)) for name in _NOT_IN_HALF}
    own["relax.divide"] = _divided(topi.divide, own["relax.divide"])
    for name, function in (("relax.mod", topi.mod), ("relax.floor_mod", topi.floor_mod)):
        own[name] = _divided(function, own[name], remainder=True)
    own["relax.equal"] = _of_itself("equal", lambda value: tirx.Not(_is_nan(value)))
    own["relax.subtract"] = _of_itself("subtract", _less_itself)
    own["relax.nn.leakyrelu"] = _leaky_relu
    own |= reduction_legalisers()
    names = (name for name in tvm.ir.Op.list_op_names() if name.startswith("relax."))
    # `has_attr` says yes for every operator; what TVM does not lower has None.
    stock = {name: _stock(name) for name in names}
    return {name: _of_its_type(own.get(name) or lowered) for name, lowered in stock.items() if lowered is not None}


def legalise_operators(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with each operator as a call of a TIR function; maxima, minima and signs keep a NaN.

    Reshapes, concatenations and slices at symbolic places are those of `symbolic_moves`.

    Raises `LoweringError`: TVM does not know the sizes of a tensor, though its rank.
    """
    made: dict[tuple[object, ...], tvm.ir.Call] = {}
    legalisers = _legalisers()
    legalised = relax.transform.LegalizeOps({name: _once(one, made) for name, one in legalisers.items()})(mod)
    _refuse_what_is_left(legalised, legalisers.keys(), state)
    return legalised


def _refuse_what_is_left(mod: tvm.ir.IRModule, registered: Set[str], state: LoweringState) -> None:
    """Check that TVM left no operator as it was: it does so without a word, and the code generator fails on them.

    Reshapes may stay: they move nothing.
    """
    for _, function in mod.functions_items():
        if not isinstance(function, relax.Function):
            continue
        for binding in bindings_of(function):
            value = binding.value if isinstance(binding, relax.VarBinding) else None
            if not isinstance(value, tvm.ir.Call) or not isinstance(value.op, tvm.ir.Op):
                continue
            if value.op.name not in registered or value.op.name == "relax.reshape":
                continue
            nodes = ", ".join(state.nodes_of([binding.var.name])) or f"the tensor {binding.var.name}"
            raise LoweringError(
                f"model {state.graph.name!r}: the sizes of what {value.op.name.removeprefix('relax.')} reads are not "
                f"known ({nodes}): expected sizes that follow from the axes of the inputs. Give symbolic axes that the "
                "graph computes with a number each (--shape, --dim); `relaxtune inspect` lists them"
            )
