"""Pass: rotary embeddings in the epilogue of the projection that makes queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.passes.attention.kernel import template_refusal
from relaxtune.pipeline.passes.attention.recognise_rotary import ROTARY_ATTR, rounded_dtype
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import (
    HALVES,
    array_of,
    called_function,
    dtype_of,
    is_constant,
    is_op,
    shape_of,
    static_shape,
)
from relaxtune.pipeline.passes.kit.rewrite import DONE, OPAQUE, Done, Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.passes.weights.turn_weights import is_turned, stored_shape, stored_weight
from relaxtune.schedules.sizes import largest_size
from relaxtune.schedules.tir.rotated_matmul import HEAD_UNIT, interleaved_heads, rotated_matmul

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
    table: tuple[tirx.Expr, ...]
    columns: int
    head: int


def rotate_in_matmul(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with rotations done by the matmuls whose results they read, where a template makes those (sm_90a).

    ::

        x = half(data @ W);  y = rotary(x, cos, sin);  v = x[..., columns:]
        ->   y = half(rotary(data @ interleaved(W), cos, sin));  v = y[..., columns:]

    The weight alternates 8 columns of each half of a head, so that one thread has both columns of a pair; the
    result is in the graph's order and rounded once. Where x is read otherwise, of many rows (where a kernel
    of its own costs no more) or of a symbolic number without a maximum, or where weights are to be quantised,
    rotations stay kernels.
    """
    policy = state.options.policy
    if not state.launches_cost or (policy is not None and policy.quantises):
        return mod
    graph = Graph(mod)
    found: dict[relax.Var, _Projection] = {}
    for binding in graph.bindings:
        callee = called_function(binding.value)
        attrs = mod[callee].attrs if callee is not None else None
        if attrs and ROTARY_ATTR in attrs:
            start, columns, head = (int(number) for number in attrs[ROTARY_ATTR])
            one = _projection(binding, graph, columns, head, state.options) if start == 0 else None
            if one is not None and template_refusal(_function(one, state), state.target) is None:
                found[one.product] = one
    if not found:
        return mod
    state.note(f"{len(found)} rotations in the epilogues of the matmuls before them")
    gone = {var: one for one in found.values() for var in (one.rounded, one.rotated)}
    made: dict[relax.Var, relax.Var] = {}
    tables: dict[tuple[tvm.ir.Expr, tuple[tirx.Expr, ...]], tvm.ir.Expr] = {}

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | Done | None:
        value, one = binding.value, found.get(binding.var)
        if is_op(value, "strided_slice") and value.args[0] in gone:
            return relax.Call(value.op, [made[gone[value.args[0]].product], *value.args[1:]], value.attrs)
        if one is None:
            return DONE if binding.var in gone else None
        for table in (one.cos, one.sin):
            if (table, one.table) not in tables:
                tables[table, one.table] = new.emit(relax.op.reshape(new.of(table), one.table))
        call = new.kernel(
            _compute(one, state),
            new.of(one.data),
            stored_weight(interleaved_heads(array_of(one.weight), one.head), dtype_of(one.rounded), one.data, state),
            tables[one.cos, one.table],
            tables[one.sin, one.table],
            name="matmul_rotated",
            op_pattern=OPAQUE,
        )
        made[one.product] = new.extra(f"{one.product.name}__rotated", call, (one.product, one.rounded, one.rotated))
        state.sources[one.product.name] = ()
        return relax.op.astype(made[one.product], "float32")

    return rewrite(mod, state, rule)


def _projection(
    binding: relax.VarBinding, graph: Graph, columns: int, head: int, options: LoweringOptions
) -> _Projection | None:
    rounded, cos, sin = binding.value.args[1].fields
    cast = graph.value(rounded)
    product = cast.args[0] if is_op(cast, "astype") and dtype_of(rounded) in HALVES else None
    matmul = graph.value(product)
    if not is_op(matmul, "matmul") or dtype_of(product) != "float32":
        return None
    data, weight = matmul.args
    shape, width = shape_of(data), (static_shape(weight) or (0,))[-1]
    if not isinstance(data, relax.Var) or not is_constant(weight) or shape is None or len(shape) != 3:
        return None
    if {dtype_of(data), dtype_of(weight)} != {dtype_of(rounded)} or len(static_shape(weight) or ()) != 2:
        return None
    rows = largest_size(shape[0] * shape[1], options.maxima)
    rows_max = options.rows_max.get("rotate_in_matmul", _ROWS_MAX)
    if head % HEAD_UNIT or width % head or columns % head or rows is None or rows > rows_max:
        return None
    readers = [
        user for user in (*graph.readers(product), *graph.readers(rounded)) if user not in (rounded, binding.var)
    ]
    for value in map(graph.value, readers):
        # Slices of the last axis of three, from a column on or later.
        if not is_op(value, "strided_slice"):
            return None
        axes, starts = ([int(field) for field in arg.fields] for arg in value.args[1:3])
        if axes not in ([2], [-1]) or starts[0] < columns:
            return None
    # Readers of the sums before rounding must round them, too.
    if any(rounded_dtype(user, graph) != dtype_of(rounded) for user in readers):
        return None
    if not all(is_op(graph.value(user), "strided_slice") for user in graph.readers(binding.var)):
        return None
    tables = [_known_before(table, graph, product) for table in (cos, sin)]
    if tables[0] is None or tables[1] is None:
        return None
    table = shape_of(cos) or ()
    return _Projection(product, rounded, binding.var, data, weight, tables[0], tables[1], tuple(table), columns, head)


def _known_before(table: tvm.ir.Expr, graph: Graph, product: relax.Var) -> tvm.ir.Expr | None:
    """Return what a table is a reshape of, if that is known before the product is computed."""
    if isinstance(table, relax.Var):
        table = graph.behind(table, "reshape")[-1]
        value = graph.value(table)
        table = value.args[0] if is_op(value, "reshape") else table
    late = isinstance(table, relax.Var) and graph.order.get(table, -1) > graph.order[product]
    return None if late else table


def _function(one: _Projection, state: LoweringState) -> tirx.PrimFunc:
    """Return the PrimFunc of a projection, for templates to look at."""
    dtype = dtype_of(one.rounded)
    x = te.placeholder(shape_of(one.data) or (), dtype, name="x")
    w = te.placeholder(stored_shape(one.data, one.weight, state), dtype, name="w")
    cos, sin = (te.placeholder(one.table, dtype_of(table), name="table") for table in (one.cos, one.sin))
    return te.create_prim_func([x, w, cos, sin, _compute(one, state)(x, w, cos, sin)])


def _compute(one: _Projection, state: LoweringState) -> Callable[..., te.Tensor]:
    turned = is_turned(one.data, state)
    return rotated_matmul(one.columns, one.head, dtype_of(one.rounded), turned=turned)
