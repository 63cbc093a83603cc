"""Pass: the keys and values of a decode step join their caches in one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.attention.layout import readings_of
from relaxtune.pipeline.passes.kit.ir import (
    bindings_of,
    called_function,
    dtype_of,
    emit_extra,
    emit_named,
    is_op,
    main_of,
    rewrite_main,
    static_shape,
    users_of,
    values_of,
)
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.functions.attention import spec_of

Values = Mapping[relax.Var, tvm.ir.Expr]

# TVM's OpPatternKind.kOpaque: fused with nothing.
_OPAQUE = 8


@dataclass(frozen=True)
class Grown:
    """`concat(past, new)` along an axis, as the tensors `results` of some dtypes; `new` is a view of `base`."""

    results: tuple[relax.Var, ...]
    shape: tuple[int, ...]
    axis: int
    past: relax.Var
    base: relax.Var
    offset: int
    strides: tuple[int, ...]


def append_caches(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the two concatenations of an attention's keys and values as one kernel.

    ::

        key = concat(past_key, view(k)); value = concat(past_value, view(v))
                                            ->   key, value[, rounded key, rounded value] = append(...)

    A cache that is a result in float32 is read rounded by attention; the rounded copy is written beside it instead
    of being made from it. On CUDA.
    """
    if not state.launches_cost:
        return mod
    main = main_of(mod)
    values, users = values_of(main), users_of(main)
    order = {binding.var: index for index, binding in enumerate(bindings_of(main))}
    groups: list[tuple[Grown, Grown]] = []
    for binding in bindings_of(main):
        pair = caches_of(binding.value, mod, values)
        if pair is not None and _can_wait(pair, order, users):
            groups.append(pair)
    if not groups:
        return mod
    state.note(f"{len(groups)} pairs of caches grow in one kernel each")
    return rewrite_main(mod, _Replace(mod, groups, order, state))


def caches_of(call: tvm.ir.Expr, mod: tvm.ir.IRModule, values: Values) -> tuple[Grown, Grown] | None:
    """Return the caches of an attention that both grow in this graph, to one shape."""
    callee = called_function(call)
    spec = spec_of(mod[callee]) if callee is not None and isinstance(mod[callee], tirx.PrimFunc) else None
    if (
        spec is None
        or not isinstance(call, relax.Call)
        or spec.key.param == spec.value.param
        or spec.growth is not None
    ):
        return None
    operands = call.args[1].fields
    key, value = (_grown(operands[layout.param], values) for layout in (spec.key, spec.value))
    if key is None or value is None or (key.shape, key.axis) != (value.shape, value.axis):
        return None
    return (key, value) if key.results[0] != value.results[0] else None


def _grown(operand: tvm.ir.Expr, values: Values) -> Grown | None:
    results = [operand] if isinstance(operand, relax.Var) else []
    value = values.get(operand) if results else None
    if is_op(value, "astype") and isinstance(value.args[0], relax.Var):
        results.insert(0, value.args[0])
        value = values.get(results[0])
    if not is_op(value, "concat") or not isinstance(value.args[0], relax.Tuple):
        return None
    fields, shape = list(value.args[0].fields), static_shape(results[0])
    if len(fields) != 2 or shape is None or not isinstance(fields[0], relax.Var) or static_shape(fields[0]) is None:
        return None
    for reading in readings_of(fields[1], values, scaled=False):
        axes = reading.view.axes
        same = dtype_of(reading.base) == dtype_of(results[0])
        if isinstance(reading.base, relax.Var) and same and all(len(axis) < 2 for axis in axes):
            strides = tuple(axis[0][1] if axis else 0 for axis in axes)
            axis = int(value.attrs.axis) % len(shape)
            return Grown(tuple(results), shape, axis, fields[0], reading.base, reading.view.offset, strides)
    return None


def _can_wait(
    pair: tuple[Grown, Grown], order: Mapping[relax.Var, int], users: Mapping[relax.Var, list[relax.Var]]
) -> bool:
    """Return whether nothing else reads any of the results before the last of them is made."""
    results = [var for grown in pair for var in grown.results]
    last = max(order[var] for var in results)
    return all(reader in results or order[reader] > last for var in results for reader in users.get(var, []))


@mutator
class _Replace(PyExprMutator):  # type: ignore[misc]
    def __init__(
        self,
        mod: tvm.ir.IRModule,
        groups: Sequence[tuple[Grown, Grown]],
        order: Mapping[relax.Var, int],
        state: LoweringState,
    ) -> None:
        super().__init__(mod)
        self._state = state
        self._group_of: dict[relax.Var, tuple[Grown, Grown]] = {}
        self._last: set[relax.Var] = set()
        for pair in groups:
            results = [var for grown in pair for var in grown.results]
            self._group_of |= dict.fromkeys(results, pair)
            self._last.add(max(results, key=lambda var: order[var]))

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._group_of:
            super().visit_var_binding_(binding)
        elif binding.var in self._last:
            self._emit(self._group_of[binding.var])

    def _emit(self, pair: tuple[Grown, Grown]) -> None:
        results = [var for grown in pair for var in grown.results]
        name = f"{results[0].name}__appended"
        self._state.sources[name] = self._state.nodes_of(var.name for var in results)
        args = [self.visit_expr(arg) for grown in pair for arg in (grown.past, grown.base)]
        call = self.builder_.call_te(
            _append(pair), *args, primfunc_name_hint="append", primfunc_attrs={"op_pattern": _OPAQUE}
        )
        made = emit_extra(self, name, call)
        for index, var in enumerate(results):
            emit_named(self, var, relax.TupleGetItem(made, index))
            self._state.sources[var.name] = ()


def _append(pair: tuple[Grown, Grown]) -> Callable[..., list[te.Tensor]]:
    """Return the tensor expressions of all results: past and base of the keys, then those of the values, come in."""
    dtypes = [[dtype_of(var) for var in grown.results] for grown in pair]

    def compute(*tensors: te.Tensor) -> list[te.Tensor]:
        outputs = []
        for number, grown in enumerate(pair):
            past, base = tensors[2 * number : 2 * number + 2]
            for dtype in dtypes[number]:
                outputs.append(te.compute(grown.shape, _element(grown, past, base, dtype), name="append"))
        return outputs

    return compute


def _element(grown: Grown, past: te.Tensor, base: te.Tensor, dtype: str) -> Callable[..., tirx.Expr]:
    before = int(past.shape[grown.axis])
    added = grown.shape[grown.axis] - before

    def element(*index: tirx.Var) -> tirx.Expr:
        place = [*index]
        place[grown.axis] = tirx.IntImm("int64", 0) if added == 1 else index[grown.axis] - before
        flat = sum((at * stride for at, stride in zip(place, grown.strides, strict=True)), start=grown.offset)
        new = base[_unflattened(flat, base, grown, index)]
        return tirx.if_then_else(index[grown.axis] < before, past(*index), new).astype(dtype)

    return element


def _unflattened(
    flat: tirx.Expr | int, base: te.Tensor, grown: Grown, index: Sequence[tirx.Var]
) -> tuple[tirx.Expr, ...]:
    """Return the indices of a row-major position."""
    analyzer = tvm.sym.Analyzer()
    for var, size in zip(index, grown.shape, strict=True):
        analyzer.bind(var, tvm.ir.Range(0, size))
    shape = [int(size) for size in base.shape]
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    position = flat if isinstance(flat, tirx.Expr) else tirx.IntImm("int64", flat)
    return tuple(
        analyzer.simplify(tirx.floormod(tirx.floordiv(position, step), size))
        for step, size in zip(inner, shape, strict=True)
    )
