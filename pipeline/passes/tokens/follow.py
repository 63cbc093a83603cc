"""Follow the tokens of a graph from its mask on: which values can be computed of tokens alone, and which mix them.

What reads rows and places apart (elementwise operations, matmuls by weights, norms of the last axis) is *packed*: it is
computed of tokens alone. Anything else is computed of the padded form, in which places of padding hold other values
than the graph's. This is right if the operation is known, and either keeps rows and places apart, or reads padding
where the graph has a known number: scores that a mask has made low, weights and pooled values that it has made 0.
"""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import dtype_of, is_op
from relaxtune.pipeline.passes.kit.sizes import sizes_of
from relaxtune.pipeline.passes.tokens.axes import Factor, Kind, MixesTokensError, Pad, is_clean, leading, plain_axes
from relaxtune.pipeline.passes.tokens.axis_rules import (
    NORMS,
    OF_ELEMENTS,
    AxisRules,
    Followed,
    axes_read,
    numbers_of,
    positive,
)

_MOVES = ("reshape", "permute_dims", "expand_dims", "squeeze", "broadcast_to", "strided_slice", "concat")
_FLOATS = ("float32", "float16", "bfloat16", "float64")


def follow_tokens(graph: Graph, mask: relax.Var) -> Followed:
    """Return what is known of a graph whose input `mask` [rows, places] is 0 at padding and 1 at tokens.

    Raises `MixesTokensError`: a binding mixes tokens and padding; the message names it.
    """
    return _Follower(graph, mask).run()


class _Follower:
    def __init__(self, graph: Graph, mask: relax.Var) -> None:
        self._graph = graph
        self._found = Followed()
        rows, places = sizes_of(mask) or (0, 0)
        self._sizes = (rows, places)
        self._found.axes[mask] = (Factor(Kind.BATCH, rows),), (Factor(Kind.PLACE, places, 0.0),)
        self._rules = AxisRules(graph, self._found, self._sizes)

    def run(self) -> Followed:
        for binding in self._graph.bindings:
            self._follow(binding.var, binding.value)
        for binding in reversed(self._graph.bindings):
            var = binding.var
            # A move of tokens is for what is computed of tokens; heads are moved in the padded form.
            read = any(reader in self._found.packed and reader != var for reader in self._graph.readers(var))
            if var in self._found.packed and is_op(binding.value, *_MOVES) and not read:
                del self._found.packed[var]
        return self._found

    def _follow(self, var: relax.Var, value: tvm.ir.Expr) -> None:
        found = self._found
        if isinstance(value, relax.Tuple):
            return  # of results, or of what is concatenated
        if isinstance(value, relax.Var):
            if value in found.axes:
                found.axes[var] = found.axes[value]
            if value in found.packed:
                found.packed[var] = found.packed[value]
            return
        read = [one for one in relax.analysis.free_vars(value) if one in found.axes]
        if not read:
            self._seed(var, value)
            return
        try:
            axes = self._rules.apply(value, read)
        except MixesTokensError as e:
            raise MixesTokensError(f"at {var.name}: {e}") from None
        if axes is not None:
            found.axes[var] = axes
            cut = self._cut(var, value)
            if cut is not None:
                found.packed[var] = cut

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
        self._found.axes[var] = (*first, *plain_axes(shape[2:]))
        self._found.packed[var] = 2

    # Operands that a binding of tokens can be computed from.

    def _cut(self, var: relax.Var, value: relax.Call) -> int | None:
        """Return how many leading axes tokens can take the place of, None where the padded form is to be computed."""
        found = self._found
        name = str(value.op.name).removeprefix("relax.")
        data = value.args[0]
        if name == "concat":
            parts = list(data.fields) if isinstance(data, relax.Tuple) else []
            cuts = {found.packed.get(part) for part in parts}
            cut = cuts.pop() if len(cuts) == 1 else None
            return cut if cut is not None and positive(value.attrs.axis, len(sizes_of(var) or ())) >= cut else None
        axes = found.of(var)
        cut = leading(axes) if axes is not None else None
        if cut is None or axes is None:
            return None
        if name in _MOVES:
            own = found.packed.get(data)
            return cut if own is not None and self._moves_behind(value, own, cut) else None
        known = [(one, of) for one in value.args if (of := found.of(one)) is not None]
        tokens = [
            one
            for one, of in known
            if one in found.packed or (not is_clean(of) and leading(of) == cut and len(of) == len(axes))
        ]
        if not tokens:
            return None
        if name in OF_ELEMENTS:
            return cut
        if name == "matmul":
            return cut if data in tokens and len(sizes_of(value.args[1]) or ()) == 2 else None
        return cut if is_op(value, *NORMS) and data in tokens and min(axes_read(value)) >= cut else None

    def _moves_behind(self, value: relax.Call, own: int, cut: int) -> bool:
        """Return whether a move leaves the leading axes as they are."""
        rank = len(sizes_of(value.args[0]) or ())
        if is_op(value, "reshape"):
            return True
        if own != cut:
            return False
        if is_op(value, "expand_dims"):
            return all(positive(axis, rank + len(value.attrs.axis)) >= cut for axis in value.attrs.axis)
        if is_op(value, "squeeze"):
            return value.attrs.axis is not None and all(positive(axis, rank) >= cut for axis in value.attrs.axis)
        if is_op(value, "strided_slice"):
            return all(positive(axis, rank) >= cut for axis in numbers_of(value.args[1]) or [0])
        return False
