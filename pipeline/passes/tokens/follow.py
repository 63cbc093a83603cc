"""Follow the tokens of a graph from its mask on: which values can be computed of tokens alone, and which mix them.

What reads rows and places apart (elementwise operations, matmuls by weights, norms of the last axis) is *packed*: it is
computed of tokens alone. Anything else is computed of the padded form, in which places of padding hold other values
than the graph's. That is right where what it does is known, and either keeps rows and places apart, or reads padding
where the graph has a known number: scores that a mask has made low, weights and pooled values that it has made 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import ELEMENTWISE, array_of, dtype_of, is_constant, is_op, number_of
from relaxtune.pipeline.passes.kit.sizes import Shape, sizes_of
from relaxtune.pipeline.passes.tokens.axes import (
    Axes,
    Axis,
    Factor,
    Kind,
    MixesTokensError,
    Pad,
    broadcast,
    degraded,
    is_clean,
    is_low,
    kinds,
    leading,
    plain_axes,
    regrouped,
)
from relaxtune.pipeline.passes.tokens.gathered_masks import gathered_axes

_ELEMENTWISE = (
    *ELEMENTWISE,
    *("where", "equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "logical_not", "logical_and"),
    *("logical_or", "isnan", "isinf", "sin", "cos", "floor", "ceil", "round", "sign", "mod", "floor_mod"),
)
_MOVES = ("reshape", "permute_dims", "expand_dims", "squeeze", "broadcast_to", "strided_slice", "split", "concat")
_REDUCTIONS = ("sum", "mean", "max", "min", "prod", "variance", "std", "argmax", "argmin")
_NORMS = ("nn.layer_norm", "nn.rms_norm")
_FLOATS = ("float32", "float16", "bfloat16", "float64")
# Places of a row that a graph may read one by one: [CLS], say.
_KEPT_MAX = 4


@dataclass
class Followed:
    """What is known of a graph.

    Attributes
    ----------
    fields
        Variable -> its axes, as it lies in the padded form; of a tuple, those of each field. Of others nothing is known
        that matters: they are the graph's everywhere.
    packed
        Variable -> how many of its leading axes the tokens take the place of.
    kept
        Places of a row that are computed even where the mask hides them; from the end where negative.
    """

    fields: dict[relax.Var, tuple[Axes | None, ...]] = field(default_factory=dict)
    packed: dict[relax.Var, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)

    def of(self, expr: tvm.ir.Expr) -> Axes | None:
        """Return the axes of a tensor, None where nothing is known."""
        found = self.fields.get(expr) if isinstance(expr, relax.Var) else None
        return found[0] if found is not None and isinstance(expr.ty, relax.TensorType) else None


def follow_tokens(graph: Graph, mask: relax.Var) -> Followed:
    """Return what is known of a graph whose input `mask` [rows, places] is 0 at padding and 1 at tokens.

    Raises
    ------
    MixesTokensError
        A binding mixes tokens and padding; the message names it.
    """
    return _Follower(graph, mask).run()


class _Follower:
    def __init__(self, graph: Graph, mask: relax.Var) -> None:
        self._graph = graph
        self._found = Followed()
        rows, places = sizes_of(mask) or (0, 0)
        self._sizes = (rows, places)
        self._found.fields[mask] = (((Factor(Kind.BATCH, rows),), (Factor(Kind.PLACE, places, 0.0),)),)
        self._rules: dict[str, Callable[[relax.Call], Axes | None]] = {
            **dict.fromkeys(_ELEMENTWISE, self._elementwise),
            **dict.fromkeys(_REDUCTIONS, self._reduction),
            **dict.fromkeys(_NORMS, self._norm),
            "matmul": self._matmul, "nn.softmax": self._softmax, "reshape": self._reshape,
            "permute_dims": self._permute, "expand_dims": self._expand, "squeeze": self._squeeze,
            "broadcast_to": self._broadcast, "strided_slice": self._slice, "take": self._take,
            "gather_nd": self._gather, "concat": self._concat,
        }  # fmt: skip

    def run(self) -> Followed:
        for binding in self._graph.bindings:
            self._follow(binding.var, binding.value)
        for binding in reversed(self._graph.bindings):
            var = binding.var
            moves = is_op(binding.value, *_MOVES) or isinstance(binding.value, relax.TupleGetItem)
            if var in self._found.packed and moves and not self._is_read_packed(var):
                del self._found.packed[var]
        return self._found

    def _is_read_packed(self, var: relax.Var) -> bool:
        """Return whether a move of tokens is for what is computed of tokens; heads are moved in the padded form."""
        return any(reader in self._found.packed and reader != var for reader in self._graph.readers(var))

    def _follow(self, var: relax.Var, value: tvm.ir.Expr) -> None:
        found = self._found
        if isinstance(value, relax.Tuple):
            return  # of results, or of what is concatenated
        if isinstance(value, relax.Var | relax.TupleGetItem):
            source = value if isinstance(value, relax.Var) else value.tuple_value
            fields = found.fields.get(source, ())
            fields = fields if isinstance(value, relax.Var) else fields[int(value.index) : int(value.index) + 1]
            if any(axes is not None for axes in fields):
                found.fields[var] = fields
                if source in found.packed:
                    found.packed[var] = found.packed[source]
            return
        read = [one for one in relax.analysis.free_vars(value) if one in found.fields]
        if not read:
            self._seed(var, value)
            return
        try:
            fields = self._fields(value, read)
        except MixesTokensError as e:
            raise MixesTokensError(f"at {var.name}: {e}") from None
        if any(axes is not None for axes in fields):
            found.fields[var] = fields
            cut = self._cut(var, value)
            if cut is not None:
                found.packed[var] = cut

    def _fields(self, value: tvm.ir.Expr, read: Sequence[relax.Var]) -> tuple[Axes | None, ...]:
        """Return the axes of what an operation gives."""
        if is_op(value, "split"):
            return self._split(value)
        name = str(value.op.name).removeprefix("relax.") if _is_operator(value) else ""
        if name in self._rules:
            return (self._rules[name](value),)
        if not all(axes is None or is_clean(axes) for one in read for axes in self._found.fields[one]):
            raise MixesTokensError("what it does with tokens is not known")
        return ()

    def _seed(self, var: relax.Var, value: tvm.ir.Expr) -> None:
        """Pack what tokens begin with: rows of a table for each place, or features of each place times weights."""
        if is_op(value, "take") and value.attrs.axis is not None and int(value.attrs.axis) == 0:
            ids = value.args[1]
        elif is_op(value, "matmul") and len(sizes_of(value.args[1]) or ()) == 2:
            ids = value.args[0]
        else:
            return
        shape, of_ids = sizes_of(var), sizes_of(ids)
        if dtype_of(var) not in _FLOATS or shape is None or (of_ids or ())[:2] != self._sizes or len(shape) < 3:
            return
        first = (Factor(Kind.BATCH, shape[0]),), (Factor(Kind.PLACE, shape[1], Pad.ANY),)
        self._found.fields[var] = ((*first, *plain_axes(shape[2:])),)
        self._found.packed[var] = 2

    # What a binding of tokens can be computed of.

    def _cut(self, var: relax.Var, value: relax.Call) -> int | None:
        """Return how many leading axes tokens can take the place of, None where the padded form is to be computed."""
        found = self._found
        name = str(value.op.name).removeprefix("relax.")
        data = value.args[0]
        if name == "concat":
            parts = list(data.fields) if isinstance(data, relax.Tuple) else []
            cuts = {found.packed.get(part) for part in parts}
            cut = cuts.pop() if len(cuts) == 1 else None
            return cut if cut is not None and _positive(value.attrs.axis, len(sizes_of(var) or ())) >= cut else None
        if name == "split":
            cut = found.packed.get(data)
            return cut if cut is not None and _positive(value.attrs.axis, len(sizes_of(data) or ())) >= cut else None
        axes = found.of(var)
        cut = leading(axes) if axes is not None else None
        if cut is None or axes is None:
            return None
        if name in _MOVES:
            own = found.packed.get(data)
            return cut if own is not None and self._moves_behind(value, own, cut) else None
        if name == "take":
            return cut if value.args[1] in found.packed else None
        tokens = [one for one in value.args if self._is_of_tokens(one, cut, len(axes))]
        if not tokens:
            return None
        if name in _ELEMENTWISE:
            return cut
        if name == "matmul":
            return cut if data in tokens and len(sizes_of(value.args[1]) or ()) == 2 else None
        return cut if data in tokens and min(_axes_read(value)) >= cut else None

    def _is_of_tokens(self, expr: tvm.ir.Expr, cut: int, rank: int) -> bool:
        axes = self._found.of(expr)
        return (axes is not None and not is_clean(axes) and leading(axes) == cut and len(axes) == rank) or (
            axes is not None and expr in self._found.packed
        )  # fmt: skip

    def _moves_behind(self, value: relax.Call, own: int, cut: int) -> bool:
        """Return whether a move leaves the leading axes as they are."""
        rank = len(sizes_of(value.args[0]) or ())
        if is_op(value, "reshape"):
            return True
        if own != cut:
            return False
        if is_op(value, "permute_dims"):
            return _permutation(value, rank)[:cut] == list(range(cut))
        if is_op(value, "expand_dims"):
            return all(_positive(axis, rank + len(value.attrs.axis)) >= cut for axis in value.attrs.axis)
        if is_op(value, "squeeze"):
            return value.attrs.axis is not None and all(_positive(axis, rank) >= cut for axis in value.attrs.axis)
        if is_op(value, "strided_slice"):
            return all(_positive(axis, rank) >= cut for axis in _numbers(value.args[1]) or [0])
        return False

    # The rules: what an operation makes of the axes of its operands.

    def _operand(self, expr: tvm.ir.Expr, beside: tvm.ir.Expr) -> Axes | float | None:
        if is_constant(expr):
            return number_of(expr, beside)
        if isinstance(expr, tirx.FloatImm | tirx.IntImm):
            return float(expr.value)
        return self._found.of(expr)

    def _elementwise(self, value: relax.Call) -> Axes:
        name = str(value.op.name).removeprefix("relax.")
        return broadcast(name, _shape(value), [self._operand(one, value) for one in value.args])

    def _reduction(self, value: relax.Call) -> Axes | None:
        axes = self._data(value)
        read = _axes_read(value)
        for axis in read:
            for factor in axes[axis]:
                clean = factor.is_clean or (is_op(value, "max") and is_low(factor.pad))
                if factor.kind is Kind.PLACE and not clean:
                    raise MixesTokensError(
                        f"it takes the {value.op.name.removeprefix('relax.')} over the sequence, padding included"
                    )
                if factor.kind is Kind.BATCH and not is_clean(axes):
                    raise MixesTokensError("it mixes the rows of the batch")
        kept = [() if at in read else axis for at, axis in enumerate(degraded(axes))]
        if not bool(value.attrs.keepdims):
            kept = [axis for at, axis in enumerate(kept) if at not in read]
        return None if is_clean(tuple(kept)) else tuple(kept)

    def _norm(self, value: relax.Call) -> Axes:
        axes = self._data(value)
        for axis in _axes_read(value):
            self._needs_clean(axes[axis], "it normalises over the sequence")
        return degraded(axes)

    def _softmax(self, value: relax.Call) -> Axes:
        axes = self._data(value)
        (over,) = _axes_read(value)
        result = list(degraded(axes))
        if len(axes[over]) == 1 and axes[over][0].kind is Kind.PLACE and is_low(axes[over][0].pad):
            result[over] = (Factor(Kind.PLACE, axes[over][0].size, 0.0),)
        else:
            self._needs_clean(axes[over], "its softmax reads padding that no mask hides")
        return tuple(result)

    def _matmul(self, value: relax.Call) -> Axes:
        left, right = value.args
        shape = _shape(value)
        if any(len(sizes_of(one) or ()) < 2 for one in (left, right)):
            raise MixesTokensError("it multiplies a vector by tokens")
        a, b = (self._found.of(one) or plain_axes(sizes_of(one) or ()) for one in (left, right))
        self._contract(a[-1], b[-2])
        outer = broadcast("matmul", shape[:-2], [a[:-2], b[:-2]])
        result = (*outer, a[-2], b[-1])
        if sum(kinds(axis).count(Kind.BATCH) for axis in result) > 1:
            raise MixesTokensError("it combines each row of the batch with each other row")
        return degraded(result)

    def _contract(self, a: Axis, b: Axis) -> None:
        """Check that a sum over two axes is the graph's."""
        for axis, other in ((a, b), (b, a)):
            for at, factor in enumerate(axis):
                beside = other[at].pad if len(other) == len(axis) and other[at].kind is factor.kind else Pad.EXACT
                if not factor.is_clean and beside != 0.0:
                    raise MixesTokensError("it sums over the sequence, padding included")

    def _reshape(self, value: relax.Call) -> Axes | None:
        return self._moved(value, regrouped(self._data(value), _shape(value)))

    def _permute(self, value: relax.Call) -> Axes:
        axes = self._data(value)
        return tuple(axes[axis] for axis in _permutation(value, len(axes)))

    def _expand(self, value: relax.Call) -> Axes:
        axes = list(self._data(value))
        rank = len(axes) + len(value.attrs.axis)
        for axis in sorted(_positive(axis, rank) for axis in value.attrs.axis):
            axes.insert(axis, ())
        return tuple(axes)

    def _squeeze(self, value: relax.Call) -> Axes | None:
        return self._moved(value, regrouped(self._data(value), _shape(value)))

    def _broadcast(self, value: relax.Call) -> Axes:
        return broadcast("broadcast_to", _shape(value), [self._data(value)])

    def _slice(self, value: relax.Call) -> Axes | None:
        axes, before, after = list(self._data(value)), _shape(value.args[0]), _shape(value)
        bounds = [_numbers(one) for one in value.args[1:5]]
        sliced = bounds[0]
        if sliced is None:
            return self._moved(value, None)
        starts, ends = bounds[1], bounds[2]
        for at, given in enumerate(sliced):
            axis = _positive(given, len(before))
            if before[axis] == after[axis]:
                continue
            if set(kinds(axes[axis])) - {Kind.OTHER} and not all(one.is_clean for one in axes[axis]):
                one_by_one = len(bounds) < 4 or set(bounds[3] or ()) == {1}
                wanted = list(range(starts[at], ends[at])) if starts and ends and one_by_one else None
                self._keep(axes[axis], wanted)
            elif Kind.BATCH in kinds(axes[axis]):
                return self._moved(value, None)
            axes[axis] = plain_axes((after[axis],))[0]
        return None if is_clean(tuple(axes)) else tuple(axes)

    def _take(self, value: relax.Call) -> Axes | None:
        data, index = value.args
        axis = None if value.attrs.axis is None else int(value.attrs.axis)
        axes, ids = self._found.of(data), self._found.of(index)
        if axes is None and ids is not None and axis == 0:
            return (*degraded(ids), *plain_axes(_shape(data)[1:]))
        if axes is None or ids is not None or axis is None:
            raise MixesTokensError("it looks tokens up by tokens")
        gathered = self._gather(value) if axis == 0 else None
        if gathered is not None:
            return gathered
        if is_clean(axes):
            return None
        axis = _positive(axis, len(axes))
        if Kind.BATCH in kinds(axes[axis]) or not all(one.is_clean for one in axes[axis]):
            self._keep(axes[axis], [int(one) for one in array_of(index).reshape(-1)] if is_constant(index) else None)
        inner = plain_axes(sizes_of(index) or ())
        result = (*axes[:axis], *inner, *axes[axis + 1 :])
        return None if is_clean(result) else result

    def _gather(self, value: relax.Call) -> Axes | None:
        """Return the axes of each place's own element, gathered one by one."""
        axes = self._data(value)
        first = [factor for axis in axes[: 1 if is_op(value, "take") else 2] for factor in axis]
        found = gathered_axes(value, self._graph, self._sizes)
        if found is None or [factor.kind for factor in first] != [Kind.BATCH, Kind.PLACE]:
            if is_op(value, "gather_nd") and not is_clean(axes):
                raise MixesTokensError("it gathers tokens by places that are not known")
            return None
        shape = sizes_of(value.args[1]) or ()
        given: list[Axis] = [()] * (len(shape) - (0 if is_op(value, "take") else 1))
        for axis, factor in zip(found, first, strict=True):
            if axis is not None:
                given[axis] = (factor,)
        return (*given, *axes[1 if is_op(value, "take") else 2 :])

    def _keep(self, axis: Axis, wanted: list[int] | None) -> None:
        """Compute some places of each row even where the mask hides them."""
        if kinds(axis) != (Kind.PLACE,) or wanted is None or not 0 < len(wanted) <= _KEPT_MAX:
            raise MixesTokensError("it reads a part of the sequence that only the run tells, or a long one")
        self._found.kept |= set(wanted)

    def _split(self, value: relax.Call) -> tuple[Axes | None, ...]:
        axes = self._data(value)
        axis = _positive(value.attrs.axis, len(axes))
        self._needs_clean(axes[axis], "it cuts the sequence")
        parts = []
        for part in value.ty.fields:
            sizes = sizes_of(relax.Var("part", part)) or ()
            own = tuple(plain_axes((size,))[0] if at == axis else axes[at] for at, size in enumerate(sizes))
            parts.append(None if is_clean(own) else own)
        return tuple(parts)

    def _concat(self, value: relax.Call) -> Axes | None:
        parts = list(value.args[0].fields) if isinstance(value.args[0], relax.Tuple) else [value.args[0]]
        shape, known = _shape(value), [self._found.of(part) for part in parts]
        axis = _positive(value.attrs.axis, len(shape))
        for one in known:
            if one is not None:
                self._needs_clean(one[axis], "it joins sequences")
        rest = broadcast(
            "concat",
            (*shape[:axis], 1, *shape[axis + 1 :]),
            [None if one is None else (*one[:axis], (), *one[axis + 1 :]) for one in known],
        )
        return (*rest[:axis], plain_axes((shape[axis],))[0], *rest[axis + 1 :])

    def _data(self, value: relax.Call) -> Axes:
        axes = self._found.of(value.args[0])
        if axes is None:
            raise MixesTokensError("it reads tokens in another place than its first operand")
        return axes

    def _moved(self, value: relax.Call, axes: Axes | None) -> Axes | None:
        if axes is None and not is_clean(self._data(value)):
            raise MixesTokensError(f"it cuts tokens up, from {_shape(value.args[0])} to {_shape(value)}")
        return axes

    def _needs_clean(self, axis: Axis, otherwise: str) -> None:
        if set(kinds(axis)) - {Kind.OTHER} and not all(one.is_clean for one in axis):
            raise MixesTokensError(otherwise)


def _is_operator(value: tvm.ir.Expr) -> bool:
    return isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)


def _shape(expr: tvm.ir.Expr) -> Shape:
    shape = sizes_of(expr)
    if shape is None:
        raise MixesTokensError("a shape of it is not known")
    return shape


def _axes_read(value: relax.Call) -> list[int]:
    """Return the axes that a reduction, norm or softmax runs over."""
    rank = len(_shape(value.args[0]))
    given = value.attrs.axes if is_op(value, *_NORMS) else value.attrs.axis
    if given is None:
        return list(range(rank))
    many: Sequence[int] = [given] if isinstance(given, int | tirx.IntImm) else given
    return [_positive(axis, rank) for axis in many]


def _positive(axis: int | tirx.IntImm | None, rank: int) -> int:
    return int(axis or 0) % max(rank, 1)


def _permutation(value: relax.Call, rank: int) -> list[int]:
    axes = value.attrs.axes
    return list(range(rank))[::-1] if axes is None else [_positive(axis, rank) for axis in axes]


def _numbers(expr: tvm.ir.Expr) -> list[int] | None:
    """Return a tuple of numbers, None where one is not known."""
    fields = list(expr.fields) if isinstance(expr, relax.Tuple) else [expr]
    known = [int(one) for one in fields if isinstance(one, tirx.IntImm)]
    return known if len(known) == len(fields) else None
