"""Pass: rotary embeddings in the epilogue of the projection that makes queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.attention.kernel import template_refusal
from relaxtune.pipeline.passes.attention.recognise_rotary import ROTARY_ATTR, rounded_dtype
from relaxtune.pipeline.passes.kit.ir import (
    HALVES,
    array_of,
    bindings_of,
    called_function,
    dtype_of,
    emit_extra,
    emit_named,
    is_constant,
    is_op,
    main_of,
    rewrite_main,
    static_shape,
    users_of,
    values_of,
)
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.rotated_matmul import HEAD_UNIT, interleaved_heads, rotated_matmul

Values = Mapping[relax.Var, tvm.ir.Expr]

# TVM's OpPatternKind.kOpaque: fused with nothing.
_OPAQUE = 8
# With more, tables that are read element by element in the epilogue cost what the kernel they save does.
_ROWS_MAX = 512


@dataclass(frozen=True)
class _Projection:
    """`rounded = dtype(data @ weight)`, of which `rotated` is the rotation of the first `columns` columns.

    `cos` and `sin` are what is known before the projection, [1 or batch, positions, head] once reshaped.
    """

    product: relax.Var
    rounded: relax.Var
    rotated: relax.Var
    data: relax.Var
    weight: tvm.ir.Expr
    cos: tvm.ir.Expr
    sin: tvm.ir.Expr
    table: tuple[int, ...]
    columns: int
    head: int


def rotate_in_matmul(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with rotations done by the matmuls whose results they read, where a template makes those (sm_90a).

    ::

        x = half(data @ W);  y = rotary(x, cos, sin);  v = x[..., columns:]
        ->   y = half(rotary(data @ interleaved(W), cos, sin));  v = y[..., columns:]

    The halves of each head stand by turns in the weight, 8 columns of each, so that one thread has both columns of a
    pair; the result is in the graph's order and rounded once. Where x is read otherwise, of many rows (where a kernel
    of its own costs no more), or where weights are to be quantised, rotations stay kernels.
    """
    policy = state.options.policy
    if not state.launches_cost or (policy is not None and policy.weight_bits is not None):
        return mod
    main = main_of(mod)
    values, users = values_of(main), users_of(main)
    order = {binding.var: number for number, binding in enumerate(bindings_of(main))}
    found: dict[relax.Var, _Projection] = {}
    for binding in bindings_of(main):
        callee = called_function(binding.value)
        attrs = mod[callee].attrs if callee is not None else None
        if attrs and ROTARY_ATTR in attrs:
            start, columns, head = (int(number) for number in attrs[ROTARY_ATTR])
            one = _projection(binding, values, users, order, columns, head) if start == 0 else None
            if one is not None and template_refusal(_function(one), state.target) is None:
                found[one.product] = one
    if not found:
        return mod
    state.note(f"{len(found)} rotations in the epilogues of the matmuls before them")
    return rewrite_main(mod, _Replace(mod, found, state))


def _projection(
    binding: relax.VarBinding,
    values: Values,
    users: Mapping[relax.Var, list[relax.Var]],
    order: Mapping[relax.Var, int],
    columns: int,
    head: int,
) -> _Projection | None:
    rounded, cos, sin = binding.value.args[1].fields
    cast = values.get(rounded)
    product = cast.args[0] if is_op(cast, "astype") and dtype_of(rounded) in HALVES else None
    matmul = values.get(product) if isinstance(product, relax.Var) else None
    if not is_op(matmul, "matmul") or dtype_of(product) != "float32":
        return None
    data, weight = matmul.args
    shape, width = static_shape(data), (static_shape(weight) or (0,))[-1]
    if not isinstance(data, relax.Var) or not is_constant(weight) or shape is None or len(shape) != 3:
        return None
    if {dtype_of(data), dtype_of(weight)} != {dtype_of(rounded)} or len(static_shape(weight) or ()) != 2:
        return None
    if head % HEAD_UNIT or width % head or columns % head or shape[0] * shape[1] > _ROWS_MAX:
        return None
    readers = [
        user for user in (*users.get(product, []), *users.get(rounded, [])) if user not in (rounded, binding.var)
    ]
    if not all(_reads_from(values.get(user), columns) for user in readers):
        return None
    # What reads the sums before they are rounded is to round them, too.
    if any(rounded_dtype(user, values, users) != dtype_of(rounded) for user in readers):
        return None
    if not all(is_op(values.get(user), "strided_slice") for user in users.get(binding.var, [])):
        return None
    tables = [_known_before(table, values, order, order[product]) for table in (cos, sin)]
    if tables[0] is None or tables[1] is None:
        return None
    table = static_shape(cos) or ()
    return _Projection(product, rounded, binding.var, data, weight, tables[0], tables[1], tuple(table), columns, head)


def _reads_from(value: tvm.ir.Expr | None, columns: int) -> bool:
    """Return whether a value is a slice of the last axis of three, from a column on or later."""
    if not is_op(value, "strided_slice"):
        return False
    axes, starts = ([int(field) for field in arg.fields] for arg in value.args[1:3])
    return axes in ([2], [-1]) and starts[0] >= columns


def _known_before(table: tvm.ir.Expr, values: Values, order: Mapping[relax.Var, int], place: int) -> tvm.ir.Expr | None:
    """Return what a table is a reshape of, if that is known before a place in the order of bindings."""
    while isinstance(table, relax.Var) and is_op(values.get(table), "reshape"):
        table = values[table].args[0]
    return None if isinstance(table, relax.Var) and order.get(table, -1) > place else table


def _function(one: _Projection) -> tirx.PrimFunc:
    """Return the PrimFunc of a projection, for templates to look at."""
    dtype = dtype_of(one.rounded)
    x = te.placeholder(static_shape(one.data) or (), dtype, name="x")
    w = te.placeholder(static_shape(one.weight) or (), dtype, name="w")
    cos, sin = (te.placeholder(one.table, dtype_of(table), name="table") for table in (one.cos, one.sin))
    return te.create_prim_func([x, w, cos, sin, rotated_matmul(one.columns, one.head, dtype)(x, w, cos, sin)])


@mutator
class _Replace(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.ir.IRModule, found: Mapping[relax.Var, _Projection], state: LoweringState) -> None:
        super().__init__(mod)
        self._found = found
        self._state = state
        self._gone = {var: one for one in found.values() for var in (one.rounded, one.rotated)}
        self._made: dict[relax.Var, relax.Var] = {}
        self._tables: dict[tuple[tvm.ir.Expr, tuple[int, ...]], tvm.ir.Expr] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value = binding.value
        if binding.var in self._found:
            self._emit(self._found[binding.var])
        elif is_op(value, "strided_slice") and value.args[0] in self._gone:
            whole = self._made[self._gone[value.args[0]].product]
            emit_named(self, binding.var, relax.Call(value.op, [whole, *value.args[1:]], value.attrs))
        elif binding.var not in self._gone:
            super().visit_var_binding_(binding)

    def _emit(self, one: _Projection) -> None:
        dtype, name = dtype_of(one.rounded), f"{one.product.name}__rotated"
        self._state.sources[name] = self._state.nodes_of(var.name for var in (one.product, one.rounded, one.rotated))
        call = self.builder_.call_te(
            rotated_matmul(one.columns, one.head, dtype),
            self.visit_expr(one.data),
            relax.const(interleaved_heads(array_of(one.weight), one.head), dtype),
            self._table(one.cos, one.table),
            self._table(one.sin, one.table),
            primfunc_name_hint="matmul_rotated",
            primfunc_attrs={"op_pattern": _OPAQUE},
        )
        self._made[one.product] = emit_extra(self, name, call)
        self._state.sources[one.product.name] = ()
        emit_named(self, one.product, relax.op.astype(self._made[one.product], "float32"))

    def _table(self, source: tvm.ir.Expr, shape: tuple[int, ...]) -> tvm.ir.Expr:
        if (source, shape) not in self._tables:
            self._tables[source, shape] = self.builder_.emit(relax.op.reshape(self.visit_expr(source), shape))
        return self._tables[source, shape]
