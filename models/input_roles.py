"""How an input is used in the graph: which tables it indexes, whether it acts as a mask."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import inliner, numpy_helper

from relaxtune.models.onnx_model import attribute_of, without_weights
from relaxtune.models.spec import IndexLimit

# Operators whose output holds the values of the named inputs, moved but not changed.
_MOVES: dict[str, frozenset[int]] = {
    **dict.fromkeys(
        (
            "Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Slice", "Transpose", "Expand", "Flatten", "Tile",
            "Split", "Clip", "Pad", "Gather",
        ),
        frozenset({0}),
    ),
    "Where": frozenset({1, 2}),
    "Concat": frozenset(range(64)),
    "Max": frozenset(range(64)),
    "Min": frozenset(range(64)),
}  # fmt: skip
# Operators among them, and `Add` and `Sub`, whose output holds all of the values.
_MOVES_ALL = _MOVES.keys() - {"Clip", "Gather", "Max", "Min", "Slice", "Split", "Where"}
# Operators that keep the axes of a table on its way from the weight to the Gather.
_SAME_AXES = frozenset({"Identity", "Cast", "DequantizeLinear"})
# Fused operators: which input is the table of which index input.
_TABLES: dict[str, dict[int, int]] = {
    "EmbedLayerNormalization": {0: 2, 1: 4, 8: 3},
    "GroupQueryAttention": {9: 7},
    "RotaryEmbedding": {1: 2, 3: 1},
}
# Operators that count negative indices from the end of the table.
_WRAPPING = frozenset({"Gather", "GatherBlockQuantized", "GatherElements", "GatherND"})
# No branch.
_MAIN = ("", "")
_INTEGERS = frozenset({onnx.TensorProto.INT32, onnx.TensorProto.INT64})
# Longer than any vocabulary.
_COUNT_MAX = 2**21


@dataclass(frozen=True)
class IndexRange:
    """The values `low <= x < high` an index input may take, and the node that says so."""

    low: int
    high: int
    reason: str


class GraphUses:
    """The consumers of every tensor of a model, with local functions inlined and weights reduced to their dims."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._dims = {t.name: tuple(t.dims) for t in model.graph.initializer}
        self._small = {t.name: t for t in model.graph.initializer if _is_small(t)}
        self._counts: dict[str, int] = {t.name: max(t.dims) for t in model.graph.initializer if _counts_up(t)}
        if model.functions:
            model = inliner.inline_local_functions(without_weights(model))
        graph = model.graph
        for value in (*graph.value_info, *graph.input):
            self._dims.setdefault(value.name, tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim))
        self._consumers: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
        self._producers: dict[str, onnx.NodeProto] = {}
        self._branches: dict[int, tuple[str, str]] = {}
        for node, branch in _with_branches(graph):
            self._branches[id(node)] = branch
            for index, name in enumerate(node.input):
                self._consumers[name].append((node, index))
            for name in node.output:
                self._producers[name] = node
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                tensor = node.attribute[0].t
                self._dims[node.output[0]] = tuple(tensor.dims)
                if _is_small(tensor):
                    self._small[node.output[0]] = tensor
                if _counts_up(tensor):
                    self._counts[node.output[0]] = max(tensor.dims)

    def index_range(self, name: str) -> IndexRange | None:
        """Return the narrowest range of an index input over every table it reaches, or None when it reaches none."""
        best: IndexRange | None = None
        for node, index, offset in self._reached(name):
            size = self._table_size(node, index)
            if size is None:
                continue
            found = IndexRange(max(0, -offset), size - offset, f"indexes a table of {size} in {_label(node)}")
            if found.high > found.low and (best is None or found.high < best.high):
                best = found
        return best

    def index_limit(self, name: str) -> IndexLimit | None:
        """Return the values that every run looks up in a table, whole or shifted; None where no run surely does.

        A look-up in a branch counts where the other branch has one, too; the wider of both is what is allowed.
        """
        found: dict[tuple[str, str], IndexLimit] = {}
        for node, index, offset in self._reached(name, whole=True):
            size = None if node.op_type in {"Equal", "OneHot"} else self._table_size(node, index)
            if size is None or (node.op_type == "GatherND" and self._dims.get(node.input[1], ())[-1:] != (1,)):
                continue
            table = node.input[_TABLES.get(node.op_type, {}).get(index, 0)]
            least = -offset - (size if node.op_type in _WRAPPING else 0)
            one = IndexLimit(name, least, size - 1 - offset, size, f"table {table!r} ({_label(node)})")
            branch = self._branches[id(node)]
            found[branch] = min(found.get(branch, one), one, key=lambda limit: limit.rows)
        sure = [found[_MAIN]] if _MAIN in found else []
        for choice, which in found:
            other = found.get((choice, "else_branch" if which == "then_branch" else "then_branch"))
            if other is not None:
                sure.append(max(found[choice, which], other, key=lambda limit: limit.rows))
        return min(sure, key=lambda limit: limit.rows, default=None)

    def mask_use(self, name: str) -> str | None:
        """Return why the input looks like a mask, or None."""
        for node, index, _ in self._reached(name):
            to_bool = node.op_type == "Cast" and attribute_of(node, "to", 0) == onnx.TensorProto.BOOL
            subtracted = node.op_type == "Sub" and index == 1 and self._constant(node.input[0]) == 1
            chosen = node.op_type == "Where" and index == 0
            compared = node.op_type == "Equal" and self._constant(node.input[1 - index]) in {0, 1}
            if to_bool or subtracted or chosen or compared or node.op_type in {"Not", "And"}:
                return f"used as a mask by {_label(node)}"
        return None

    def chosen_by(self, name: str) -> int | None:
        """Return the number that the first comparison of the input is with; None without one."""
        equal = (node.input[1 - index] for node, index, _ in self._reached(name) if node.op_type == "Equal")
        return next((number for one in equal if (number := self._constant(one)) is not None), None)

    def is_added(self, name: str) -> bool:
        """Return whether the input is added to something as it is, as a mask of scores is."""
        return any(node.op_type == "Add" for node, _, _ in self._reached(name))

    def _reached(self, name: str, *, whole: bool = False) -> Iterator[tuple[onnx.NodeProto, int, int]]:
        """Yield (node, input index, offset) for every consumer of the input's values plus a constant offset.

        With `whole`, only for consumers of all of the values.
        """
        stack, seen = [(name, 0)], {(name, 0)}
        while stack:
            tensor, offset = stack.pop()
            for node, index in self._consumers.get(tensor, ()):
                yield node, index, offset
                moved = offset
                if node.op_type in {"Add", "Sub"} and not (node.op_type == "Sub" and index == 1):
                    constant = self._constant(node.input[1 - index])
                    if constant is None:
                        continue
                    moved = offset + (constant if node.op_type == "Add" else -constant)
                elif index not in _MOVES.get(node.op_type, frozenset()) or (whole and node.op_type not in _MOVES_ALL):
                    continue
                for output in node.output:
                    if (output, moved) not in seen:
                        seen.add((output, moved))
                        stack.append((output, moved))

    def _table_size(self, node: onnx.NodeProto, index: int) -> int | None:
        if node.op_type in {"Gather", "GatherElements", "GatherBlockQuantized"} and index == 1:
            axis = attribute_of(node, "gather_axis" if node.op_type == "GatherBlockQuantized" else "axis", 0)
            return self._axis_size(node.input[0], axis)
        if node.op_type == "GatherND" and index == 1:
            return self._axis_size(node.input[0], 0)
        if index in _TABLES.get(node.op_type, {}):
            return self._axis_size(node.input[_TABLES[node.op_type][index]], 0)
        if node.op_type == "OneHot" and index == 0:
            return self._constant(node.input[1])
        # One-hot by comparison with 0, 1, 2, ..., as jax writes it.
        return self._counts.get(node.input[1 - index]) if node.op_type == "Equal" else None

    def _axis_size(self, table: str, axis: int) -> int | None:
        dims = self._dims.get(table)
        producer = self._producers.get(table)
        while dims is None and producer is not None and producer.op_type in _SAME_AXES:
            table = producer.input[0]
            dims, producer = self._dims.get(table), self._producers.get(table)
        if not dims or not -len(dims) <= axis < len(dims):
            return None
        return dims[axis] or None

    def _constant(self, name: str) -> int | None:
        """Return the value of a one-element integral constant, or None."""
        producer = self._producers.get(name)
        while name not in self._small and producer is not None and producer.op_type in _SAME_AXES:
            name = producer.input[0]
            producer = self._producers.get(name)
        tensor = self._small.get(name)
        if tensor is None:
            return None
        value = float(numpy_helper.to_array(tensor).reshape(-1)[0])
        return int(value) if value.is_integer() else None


def _with_branches(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, tuple[str, str]]]:
    """Yield the nodes of a graph and of the branches in it, each with its choice and branch."""
    for node in graph.node:
        yield node, _MAIN
        for attribute in (item for item in node.attribute if item.HasField("g")):
            branch = (node.output[0], attribute.name)
            # Nodes behind a second choice are not sure to run.
            yield from (
                (inner, branch if own == _MAIN else ("", "inner")) for inner, own in _with_branches(attribute.g)
            )


def _counts_up(tensor: onnx.TensorProto) -> bool:
    """Return whether a constant of integers is 0, 1, 2, ... along one axis, and more than a mask's 0 and 1."""
    if tensor.data_type not in _INTEGERS or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return False
    size = math.prod(tensor.dims)
    if not 2 < size <= _COUNT_MAX or max(tensor.dims) != size:
        return False
    return bool((numpy_helper.to_array(tensor).reshape(-1) == np.arange(size)).all())


def _is_small(tensor: onnx.TensorProto) -> bool:
    numeric = tensor.data_type not in {onnx.TensorProto.STRING, onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128}
    inline = tensor.data_location != onnx.TensorProto.EXTERNAL
    return numeric and inline and all(dim == 1 for dim in tensor.dims)


def _label(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else str(node.op_type)
