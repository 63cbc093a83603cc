"""Pass: the rotary embeddings of queries and keys as one kernel, in the order of the combined projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.passes.attention.head_layout import Roundings, readings_of
from relaxtune.pipeline.passes.attention.strided_view import StridedView, is_view
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import HALVES, dtype_of, either_way, is_op, numbers_beside
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, listed_sizes, plain, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.blocks import static_extent

# A PrimFunc's attribute: first column that is rotated, how many are, and columns of a head.
ROTARY_ATTR = "relaxtune.rotary"


@dataclass(frozen=True)
class _Rotation:
    """`x * cos + rotate_half(x) * sin` over [batch, heads, positions, size], x from columns `start` on of `base`."""

    result: relax.Var
    base: relax.Var
    start: int
    shape: tuple[Size, int, Size, int]
    dtype: str
    cos: tvm.ir.Expr
    sin: tvm.ir.Expr
    path: tuple[relax.Var, ...]

    @property
    def columns(self) -> int:  # Of the base, that are rotated.
        return self.shape[1] * self.shape[3]


def recognise_rotary(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the rotations of heads that lie side by side in one projection as one kernel.

    ::

        q = x[..., :H*D] as heads;  q' = q * cos + concat(-q[D/2:], q[:D/2]) * sin
        k = x[..., H*D:] as heads;  k' = k * cos + concat(-k[D/2:], k[:D/2]) * sin   ->   y = rotary(x, cos, sin)

    On CUDA, in half precision: x is read rounded, as it is stored, and y is rounded once; sums are in float32. q' and
    k' are slices of y, [batch, positions, columns], from which attention reads its heads. Before, each was a kernel of
    its own that also transposed. One rotation alone, or one of another form, is left as it is.
    """
    if not state.launches_cost:
        return mod
    graph = Graph(mod)
    found: dict[tuple[object, ...], list[_Rotation]] = {}
    for binding in graph.bindings:
        rotation = _rotation(binding.var, graph)
        if rotation is not None:
            key = (rotation.base, rotation.cos, rotation.sin, rotation.dtype, rotation.shape[3])
            found.setdefault(key, []).append(rotation)
    groups = []
    for rotations in found.values():
        rotations.sort(key=lambda rotation: rotation.start)
        starts = [rotation.start for rotation in rotations[1:]]
        if starts and starts == [rotation.start + rotation.columns for rotation in rotations[:-1]]:
            groups.append(rotations)
    if not groups:
        return mod
    state.note(f"{len(groups)} pairs of rotations as one kernel each")
    group_of = {rotation.result: (rotation, group) for group in groups for rotation in group}
    roundings = Roundings()
    # Cos or sin -> the same as [1 or batch, positions, size].
    tables: dict[tvm.ir.Expr, tvm.ir.Expr] = {}
    rotated: dict[relax.Var, relax.Var] = {}

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        if binding.var not in group_of:
            roundings.note(binding)
            return None
        rotation, group = group_of[binding.var]
        first = group[0]
        if first.result not in rotated:
            rotated[first.result] = _rotated(new, group, roundings, tables)
        batch, heads, positions, size = binding.var.ty.shape.values
        start, whole = rotation.start - first.start, rotated[first.result]
        part = relax.op.strided_slice(whole, [2], [start], [start + rotation.columns], assume_inbound=True)
        split = relax.op.reshape(new.emit(part), (batch, positions, heads, size))
        moved = relax.op.permute_dims(new.emit(split), [0, 2, 1, 3])
        state.sources[binding.var.name] = ()
        same = rotation.dtype == dtype_of(binding.var)
        return moved if same else relax.op.astype(new.emit(moved), dtype_of(binding.var))

    return rewrite(mod, state, rule)


def _rotation(var: relax.Var, graph: Graph) -> _Rotation | None:
    value, shape = graph.value(var), sizes_of(var)
    if not is_op(value, "add") or shape is None or len(shape) != 4 or _half(shape) is None:
        return None
    for straight, turned in either_way(value):
        for data, cos in _products(straight, graph):
            for half, sin in _products(turned, graph):
                steps = _turned_steps(half, data, graph)
                if steps is not None and _is_table(cos, shape) and _is_table(sin, shape):
                    return _placed(var, data, shape, cos, sin, (straight, turned, half, *steps), graph)
    return None


def _half(shape: Shape) -> int | None:
    """Return half the size of the last axis, None where it is odd or symbolic."""
    size = shape[-1]
    return size // 2 if isinstance(size, int) and size % 2 == 0 else None


def _products(expr: tvm.ir.Expr, graph: Graph) -> list[tuple[relax.Var, tvm.ir.Expr]]:
    """Return the ways to read a product as (variable, other factor)."""
    value = graph.value(expr)
    return [pair for pair in either_way(value) if isinstance(pair[0], relax.Var)] if is_op(value, "multiply") else []


def _turned_steps(expr: relax.Var, data: relax.Var, graph: Graph) -> tuple[relax.Var, ...] | None:
    """Return the steps of `concat(-data[D/2:], data[:D/2])`, None when `expr` is something else."""
    value, shape = graph.value(expr), sizes_of(data)
    if not is_op(value, "concat") or not isinstance(value.args[0], relax.Tuple) or shape is None:
        return None
    parts, half = list(value.args[0].fields), _half(shape)
    negative = graph.value(parts[0])
    if len(parts) != 2 or int(value.attrs.axis) not in (-1, len(shape) - 1) or not is_op(negative, "negative"):
        return None
    high, low = negative.args[0], parts[1]
    if _start_of_half(high, data, graph) == half and _start_of_half(low, data, graph) == 0:
        return parts[0], high, low
    return None


def _start_of_half(expr: tvm.ir.Expr, data: relax.Var, graph: Graph) -> Size | None:
    """Return where the half of the last axis of `data` that `expr` is starts, None where it is no such half."""
    value, shape = graph.value(expr), sizes_of(data)
    if not is_op(value, "strided_slice") or value.args[0] != data or shape is None:
        return None
    if sizes_of(expr) != (*shape[:-1], _half(shape)):
        return None
    axes, starts = (listed_sizes(arg) for arg in value.args[1:3])
    if axes not in ([-1], [len(shape) - 1]) or starts is None or not isinstance(starts[0], int):
        return None
    return plain(starts[0] + shape[-1]) if starts[0] < 0 else starts[0]


def _is_table(expr: tvm.ir.Expr, shape: Shape) -> bool:
    """Return whether a tensor is [1 or batch, 1, positions, size]."""
    own = sizes_of(expr)
    return own is not None and len(own) == 4 and own[0] in (1, shape[0]) and own[1:] == (1, *shape[2:])


def _placed(
    var: relax.Var,
    data: relax.Var,
    shape: Shape,
    cos: tvm.ir.Expr,
    sin: tvm.ir.Expr,
    steps: tuple[tvm.ir.Expr, ...],
    graph: Graph,
) -> _Rotation | None:
    batch, heads, positions, size = shape
    dtype = rounded_dtype(var, graph)
    if dtype is None or not isinstance(heads, int) or not isinstance(size, int):
        return None
    for reading in readings_of(data, graph, scaled=False):
        base = sizes_of(reading.base)
        if not isinstance(reading.base, relax.Var) or base is None or len(base) != 3 or base[:2] != (batch, positions):
            continue
        width, start = base[2], reading.view.offset
        if not isinstance(width, int) or not isinstance(start, int) or start + heads * size > width:
            continue
        expected = ((batch, positions * width), (heads, size), (positions, width), (size, 1))
        if reading.view == StridedView(
            start, tuple(() if count == 1 else ((count, stride),) for count, stride in expected)
        ):
            path = tuple(step for step in (*steps, data) if isinstance(step, relax.Var))
            return _Rotation(var, reading.base, start, (batch, heads, positions, size), dtype, cos, sin, path)
    return None


def rounded_dtype(var: relax.Var, graph: Graph) -> str | None:
    """Return the half precision that a tensor is of, or that all its readers round it to, moved or scaled."""
    if dtype_of(var) in HALVES:
        return dtype_of(var)
    found: set[str | None] = set()
    for reader in graph.readers(var):
        value = graph.value(reader)
        if reader == var:
            return None
        if is_op(value, "astype"):
            found.add(dtype_of(reader) if dtype_of(reader) in HALVES else None)
        elif is_view(value) or (is_op(value, "multiply", "divide") and numbers_beside(value)):
            found.add(rounded_dtype(reader, graph))
        else:
            return None
    return found.pop() if len(found) == 1 else None


def _rotated(
    new: Rewriter, group: Sequence[_Rotation], roundings: Roundings, tables: dict[tvm.ir.Expr, tvm.ir.Expr]
) -> relax.Var:
    """Emit the kernel of neighbouring rotations."""
    first = group[0]
    for table in (first.cos, first.sin):
        if table not in tables:
            batch, _, positions, size = table.ty.shape.values
            tables[table] = new.emit(relax.op.reshape(new.of(table), (batch, positions, size)))
    columns = sum(rotation.columns for rotation in group)
    call = new.kernel(
        rotary(first.start, columns, first.shape[3]),
        roundings.get(new, first.base, first.dtype),
        tables[first.cos],
        tables[first.sin],
        name="rotary",
        **{ROTARY_ATTR: [first.start, columns, first.shape[3]]},
    )
    steps = [step for rotation in group for step in (*rotation.path, rotation.result)]
    return new.extra(f"{first.result.name}__rotary", call, steps)


def rotary(start: int, columns: int, size: int) -> Callable[[te.Tensor, te.Tensor, te.Tensor], te.Tensor]:
    """Return the tensor expression `x * cos + rotate_half(x) * sin` over heads of `size` side by side.

    x is [batch, positions, width], of which `columns` columns from `start` on are rotated; cos and sin are
    [1 or batch, positions, size].
    """

    def compute(x: te.Tensor, cos: te.Tensor, sin: te.Tensor) -> te.Tensor:
        def element(b: tirx.Var, s: tirx.Var, c: tirx.Var) -> tirx.Expr:
            place = c % size
            row = 0 if static_extent(cos.shape[0]) == 1 else b
            turned = tirx.if_then_else(
                place < size // 2,
                -x[b, s, start + c + size // 2].astype("float32"),
                x[b, s, start + c - size // 2].astype("float32"),
            )
            plain = x[b, s, start + c].astype("float32") * cos[row, s, place].astype("float32")
            return (plain + turned * sin[row, s, place].astype("float32")).astype(x.dtype)

        return te.compute((x.shape[0], x.shape[1], columns), element, name="rotary")

    return compute
