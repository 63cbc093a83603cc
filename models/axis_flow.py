"""What a graph says about the sizes of its symbolic axes: shapes and small integer tensors, followed node by node.

onnx's own shape inference loses sums (`past + sequence` becomes an unknown) and does not compare: it is used for the
operators that have no rule here. Two facts are collected on the way:

- *equal*: sizes that meet in a broadcast, a Concat beside its axis, a contraction or a Reshape;
- *at least*: an axis that is cut or indexed up to a size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import defs, helper, inliner, numpy_helper, shape_inference

from relaxtune.models.hashing import without_weights
from relaxtune.models.polynomials import Polynomial

Shape = tuple[Polynomial, ...]

# Vectors of sizes are as long as ranks; a longer tensor is data.
_MAX_LENGTH = 64
# torch writes "to the end" as the largest int32 or int64.
_TO_THE_END = 2**31 - 1
ZERO, ONE = Polynomial.number(0), Polynomial.number(1)
# Operators with these results are followed by their first input's shape; onnx knows none of them.
_SAME_SHAPE = frozenset(
    {"BiasGelu", "FastGelu", "Gelu", "QuickGelu", "RotaryEmbedding", "SimplifiedLayerNormalization",
     "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
)  # fmt: skip
_BROADCAST = frozenset(
    {"Add", "And", "BitwiseAnd", "BitwiseOr", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
     "Max", "Mean", "Min", "Mod", "Mul", "Or", "Pow", "PRelu", "Sub", "Sum", "Where", "Xor"}
)  # fmt: skip
# Operators that move integers without changing them.
_MOVES = frozenset({"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"})


@dataclass(frozen=True)
class Known:
    """What is known of a tensor.

    Attributes
    ----------
    shape
        Its sizes; None where not even the rank is known.
    data
        The elements of an integer scalar or vector.
    top
        The largest of its integers: one for all of them, or one for each place of the last axis.
    """

    shape: Shape | None = None
    data: Shape | None = None
    top: Shape | None = None


UNKNOWN = Known()


@dataclass
class AxisFlow:
    """Follows the sizes of a graph; afterwards `solved` and `at_least` hold what it found."""

    model: onnx.ModelProto
    solved: dict[str, Polynomial] = field(default_factory=dict)
    at_least: list[tuple[Polynomial, Polynomial]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Follow the graph."""
        model = _typed(self.model)
        graph = model.graph
        self._opsets = {entry.domain: int(entry.version) for entry in model.opset_import}
        self._opset_imports = list(model.opset_import)
        self._types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._types |= {name: tensor.data_type for name, tensor in self._constants.items()}
        self._known: dict[str, Known] = {}
        self._below_zero: dict[str, str] = {}
        self._fresh = 0
        self._order = {name: place for place, name in enumerate(input_symbols(self.model))}
        for tensor in graph.initializer:
            self._known[tensor.name] = _of_constant(tensor)
        for value in graph.input:
            if value.name not in self._constants:
                self._known[value.name] = Known(tuple(map(self._size, dims_of(value))))
        for node in graph.node:
            self._follow(node)

    def resolve(self, size: Polynomial) -> Polynomial:
        """Return a size in the names that are not solved."""
        while any(name in self.solved for name in size.names):
            size = size.substitute(self.solved)
        return size

    def _follow(self, node: onnx.NodeProto) -> None:
        rule = _RULES.get(node.op_type)
        inputs = [self._known.get(name, UNKNOWN) for name in node.input]
        try:
            outputs = None if rule is None else rule(self, node, inputs)
        except (IndexError, TypeError, ValueError, AttributeError):  # a rule met a form it does not know
            outputs = None
        if outputs is None:
            outputs = self._infer(node, inputs)
        if node.op_type in _MOVES and inputs and outputs:
            outputs = [Known(outputs[0].shape, outputs[0].data or _moved(node, inputs), inputs[0].top)]
        for name, known in zip(node.output, outputs, strict=False):
            if name:
                self._known[name] = known

    def _infer(self, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
        """Return the shapes that onnx infers for one node, sizes in and out as text."""
        by_text: dict[str, Polynomial] = {}
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, onnx.TensorProto] = {}
        for name, known in zip(node.input, inputs, strict=True):
            if not name:
                continue
            sizes = None if known.shape is None else [self.resolve(size) for size in known.shape]
            by_text |= {str(size): size for size in sizes or () if size.value is None}
            dims = None if sizes is None else [str(size) if size.value is None else size.value for size in sizes]
            types[name] = helper.make_tensor_type_proto(self._types.get(name, onnx.TensorProto.FLOAT), dims)
            if name in self._constants:
                data[name] = self._constants[name]
        try:
            schema = defs.get_schema(node.op_type, self._opsets.get(node.domain, 1), node.domain)
            found = shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=self._opset_imports)
        except (defs.SchemaError, shape_inference.InferenceError, RuntimeError, ValueError):
            found = {}
        return [
            Known(tuple(self._size(dim, by_text) for dim in _dims(found[name])))
            if name in found and found[name].tensor_type.HasField("shape")
            else UNKNOWN
            for name in node.output
        ]

    def _size(self, dim: int | str, by_text: Mapping[str, Polynomial] | None = None) -> Polynomial:
        if isinstance(dim, int):
            return Polynomial.number(dim)
        if by_text is None:
            return parse_size(dim)
        return by_text.get(dim) or self.new_symbol()

    def new_symbol(self) -> Polynomial:
        """Return a new symbol, for a size that is not known."""
        self._fresh += 1
        return Polynomial.symbol(f"?{self._fresh}")

    def equate(self, left: Polynomial, right: Polynomial) -> None:
        """Note that two sizes are equal: one name is solved, an unknown first, else the last of the inputs' names."""
        gap = self.resolve(left - right)
        answers = [(name, gap.solved_for(name)) for name in gap.names]
        usable = [(n, a) for n, a in answers if a is not None and a.terms and (a.is_positive or n.startswith("?"))]
        if usable:
            name, answer = max(usable, key=lambda item: (item[0].startswith("?"), self._order.get(item[0], -1)))
            self.solved[name] = answer

    def require(self, size: Polynomial, least: Polynomial) -> None:
        """Note that a size is at least another one."""
        if (size - least).names:
            self.at_least.append((size, least))

    def broadcast(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of tensors that are broadcast; sizes by name that meet are equal."""
        rank = max(map(len, shapes))
        result = []
        for axis in range(-rank, 0):
            sizes = [self.resolve(shape[axis]) for shape in shapes if len(shape) >= -axis]
            wide = list(dict.fromkeys(size for size in sizes if size.value != 1))
            named = [size for size in wide if size.value is None]
            for other in named[1:]:
                self.equate(named[0], other)
            result.append(next((size for size in wide if size.value is not None), named[0] if named else ONE))
        return tuple(map(self.resolve, result))


def input_symbols(model: onnx.ModelProto) -> list[str]:
    """Return the names in the sizes of the inputs, in their order."""
    weights = {tensor.name for tensor in model.graph.initializer}
    dims = [dim for value in model.graph.input if value.name not in weights for dim in dims_of(value)]
    return list(dict.fromkeys(name for dim in dims if isinstance(dim, str) for name in parse_size(dim).names))


def dims_of(value: onnx.ValueInfoProto) -> list[int | str]:
    """Return the sizes of an input; an axis without a name gets `<tensor>_<axis>`, as in its signature."""
    dims = _dims(value.type)
    return [dim if dim != "" else f"{value.name}_{axis}" for axis, dim in enumerate(dims)]


def parse_size(text: str) -> Polynomial:
    """Return a sum such as `past + sequence + 1` as a polynomial; any other text is one name."""
    parts = [part.strip() for part in text.split("+")]
    if all(part.isidentifier() or part.isdecimal() for part in parts):
        total = ZERO
        for part in parts:
            total += Polynomial.number(int(part)) if part.isdecimal() else Polynomial.symbol(part)
        return total
    return Polynomial.symbol(text)


def _dims(kind: onnx.TypeProto) -> list[int | str]:
    dims = kind.tensor_type.shape.dim
    return [int(dim.dim_value) if dim.HasField("dim_value") else str(dim.dim_param) for dim in dims]


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with functions inlined, the types of its values, and its small constants only."""
    light = without_weights(model)
    declared = {value.name for value in light.graph.input}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and int(np.prod(tensor.dims)) <= _MAX_LENGTH:
            light.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    if light.functions:
        light = inliner.inline_local_functions(light)
    return shape_inference.infer_shapes(light)


def _of_constant(tensor: onnx.TensorProto) -> Known:
    shape = tuple(map(Polynomial.number, tensor.dims))
    if tensor.data_type not in (onnx.TensorProto.INT64, onnx.TensorProto.INT32) or not np.prod(tensor.dims):
        return Known(shape)
    numbers = numpy_helper.to_array(tensor)
    small = numbers.ndim <= 1
    data = tuple(Polynomial.number(int(number)) for number in numbers.reshape(-1)) if small else None
    return Known(shape, data, (Polynomial.number(int(numbers.max())),))


def _moved(node: onnx.NodeProto, inputs: Sequence[Known]) -> Shape | None:
    """Return the elements of a scalar or vector that stays one."""
    return inputs[0].data if node.op_type in {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"} else None


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(item.i) for item in node.attribute if item.name == name), default)


def _sizes(known: Known) -> Shape:
    if known.shape is None:
        raise ValueError
    return known.shape


def _elements(known: Known) -> Shape:
    if known.data is None:
        raise ValueError
    return known.data


def _whole(size: Polynomial) -> int:
    if size.value is None:
        raise ValueError
    return size.value


def _shape(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    sizes = _sizes(inputs[0])
    cut = sizes[_attribute(node, "start", 0) : _attribute(node, "end", len(sizes))]
    return [Known((Polynomial.number(len(cut)),), tuple(map(flow.resolve, cut)))]


def _constant(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    value = node.attribute[0]
    if value.name != "value":
        return None
    flow._constants[node.output[0]] = value.t
    return [_of_constant(value.t)]


def _arithmetic(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    shape = flow.broadcast([_sizes(known) for known in inputs])
    return [Known(shape, _computed(node, inputs), _top(flow, node, inputs))]


def _computed(node: onnx.NodeProto, inputs: Sequence[Known]) -> Shape | None:
    function = _ON_SIZES.get(node.op_type)
    if function is None or any(known.data is None for known in inputs):
        return None
    columns = [_elements(known) for known in inputs]
    length = max(map(len, columns))
    stretched = [column * length if len(column) == 1 else column for column in columns]
    found = [function(*row) for row in zip(*stretched, strict=True)]
    return None if None in found else tuple(one for one in found if one is not None)


def _quotient(a: Polynomial, b: Polynomial) -> Polynomial | None:
    return a.divided(b)


def _chosen(condition: Polynomial, a: Polynomial, b: Polynomial) -> Polynomial | None:
    return b if condition.value == 0 else a if condition.value is not None else None


def _same(a: Polynomial, b: Polynomial) -> Polynomial | None:
    """Return 1 or 0; a size is never negative."""
    if (a - b).value is not None:
        return ONE if a == b else ZERO
    return ZERO if any(one.value is not None and one.value < 0 for one in (a, b)) else None


_ON_SIZES: Mapping[str, Callable[..., Polynomial | None]] = {
    "Add": lambda a, b: a + b,
    "Div": _quotient,
    "Equal": _same,
    "Mul": lambda a, b: a * b,
    "Sub": lambda a, b: a - b,
    "Where": _chosen,
}


def _top(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> Shape | None:
    """Return the largest integer of a sum, a product, or indices whose negative values count from the end."""
    if node.op_type == "Less" and inputs[1].data == (ZERO,):
        flow._below_zero[node.output[0]] = node.input[0]
    if node.op_type == "Where" and flow._below_zero.get(node.input[0]) == node.input[2]:
        return inputs[2].top
    tops = [known.top if known.top is not None else known.data for known in inputs]
    if node.op_type not in {"Add", "Mul", "Sub"} or any(top is None or len(top) != 1 for top in tops):
        return None
    left, right = (top[0] for top in tops if top is not None)
    if node.op_type == "Add":
        return (left + right,)
    if node.op_type == "Sub":
        return (left - right,) if inputs[1].data is not None else None
    return (left * right,)


def _range(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    start, limit, step = (_elements(known)[0] for known in inputs)
    return [Known((limit - start,), None, (limit - ONE,))] if step.value == 1 else None


def _concat(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    shapes = [_sizes(known) for known in inputs]
    rank = len(shapes[0])
    axis = _attribute(node, "axis", 0) % rank
    result = []
    for place in range(rank):
        column = [shape[place] for shape in shapes]
        if place == axis:
            result.append(sum(column[1:], column[0]))
            continue
        for other in column[1:]:
            flow.equate(column[0], other)
        result.append(flow.resolve(column[0]))
    data = [known.data for known in inputs]
    joined = None if rank != 1 or None in data else tuple(size for part in data for size in part or ())
    tops = [known.top or (known.data if known.data is not None and len(known.data) == 1 else None) for known in inputs]
    one_each = axis == rank - 1 and all(top is not None and len(top) == 1 for top in tops)
    return [Known(tuple(result), joined, tuple(top[0] for top in tops if top) if one_each else None)]


def _gather(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    data, indices = _sizes(inputs[0]), _sizes(inputs[1])
    axis = _attribute(node, "axis", 0) % len(data)
    if inputs[1].top is not None and len(inputs[1].top) == 1:
        flow.require(data[axis], inputs[1].top[0] + ONE)
    picked = None
    if inputs[0].data is not None and inputs[1].data is not None:
        picked = tuple(inputs[0].data[_whole(place)] for place in inputs[1].data)
    return [Known((*data[:axis], *indices, *data[axis + 1 :]), picked)]


def _gather_nd(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    data, top = _sizes(inputs[0]), inputs[1].top
    depth = _sizes(inputs[1])[-1].value
    if not _attribute(node, "batch_dims", 0) and top is not None and depth is not None and len(top) == depth:
        for size, largest in zip(data, top, strict=False):
            flow.require(size, largest + ONE)
    return None


def _slice(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    shape = list(_sizes(inputs[0]))
    starts, ends = _elements(inputs[1]), _elements(inputs[2])
    given = inputs[3].data if len(inputs) > 3 else None
    axes = range(len(starts)) if given is None else [_whole(axis) % len(shape) for axis in given]
    steps = inputs[4].data if len(inputs) > 4 else None
    if steps is not None and any(step != ONE for step in steps):
        raise ValueError
    data = inputs[0].data
    for axis, start, end in zip(axes, starts, ends, strict=True):
        size = flow.resolve(shape[axis])
        first, last = _bound(start, size), _bound(end, size)
        if size.value is None and end.value is not None and 0 <= end.value < _TO_THE_END:
            shape[axis] = flow.new_symbol()
            continue
        if (size - last).names:
            flow.require(size, last)
        elif size.value is not None and last.value is not None:
            last = Polynomial.number(min(size.value, last.value))
        if data is not None:
            data = data[first.value : last.value]
        shape[axis] = last - first
    return [Known(tuple(shape), data)]


def _bound(bound: Polynomial, size: Polynomial) -> Polynomial:
    if bound.value is None or 0 <= bound.value < _TO_THE_END:
        return bound
    return size if bound.value > 0 else size + bound


def _reshape(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    old = [flow.resolve(size) for size in _sizes(inputs[0])]
    if inputs[1].data is None:
        rank = _sizes(inputs[1])[0].value
        return [Known(tuple(flow.new_symbol() for _ in range(rank or 0)) if rank is not None else None)]
    new = list(inputs[1].data)
    if not _attribute(node, "allowzero", 0):
        new = [old[place] if size == ZERO else size for place, size in enumerate(new)]
    free = [place for place, size in enumerate(new) if size.value == -1]
    fixed = [flow.resolve(size) for place, size in enumerate(new) if place not in free]
    above, below = _product(old), _product(fixed)
    if free:
        if above.divided(below) is None and len(old) == len(new):
            # Only equal sizes can be meant where the axes stay: `[rows, n]` as `[batch, -1]`.
            for place, size in enumerate(old):
                if place not in free:
                    flow.equate(size, new[place])
            above, below = flow.resolve(above), flow.resolve(below)
        new[free[0]] = above.divided(below) or flow.new_symbol()
    elif above.names and below.names:
        flow.equate(*_without_common_factor(above, below))
    return [Known(tuple(flow.resolve(size) for size in new))]


def _flatten(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    sizes = _sizes(inputs[0])
    axis = _attribute(node, "axis", 1)
    return [Known((_product(sizes[:axis]), _product(sizes[axis:])))]


def _constant_of_shape(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    sizes = _elements(inputs[0])
    fill = next((numpy_helper.to_array(item.t).reshape(-1)[0] for item in node.attribute), 0)
    count = _product(sizes).value
    is_small = len(sizes) <= 1 and count is not None and count <= _MAX_LENGTH and float(fill).is_integer()
    return [Known(sizes, (Polynomial.number(int(fill)),) * (count or 0) if is_small else None)]


def _product(sizes: Sequence[Polynomial]) -> Polynomial:
    total = ONE
    for size in sizes:
        total *= size
    return total


def _without_common_factor(left: Polynomial, right: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Return two products divided by the number and the names that both have."""
    names = [name for name in dict.fromkeys(left.names) if all(name in term for term, _ in (*left.terms, *right.terms))]
    factors = [factor for _, factor in (*left.terms, *right.terms)]
    common = _product([Polynomial.number(int(np.gcd.reduce(factors))), *map(Polynomial.symbol, names)])
    return left.divided(common) or left, right.divided(common) or right


def _expand(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    return [Known(flow.broadcast([_sizes(inputs[0]), _elements(inputs[1])]))]


def _matmul(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
    left, right = _sizes(inputs[0]), _sizes(inputs[1])
    rows, columns = left[-2:-1], right[-1:] if len(right) > 1 else ()
    flow.equate(left[-1], right[-2] if len(right) > 1 else right[-1])
    stack = flow.broadcast([left[:-2], right[:-2]]) if max(len(left), len(right)) > 2 else ()
    return [Known((*stack, *rows, *columns))]


def _same_shape(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    return [Known(inputs[0].shape)] * len(node.output) if node.domain == "com.microsoft" else None


def _cached(flow: AxisFlow, inputs: Sequence[Known], past: int, new: Polynomial) -> Polynomial:
    """Return the number of keys: those of a cache (B, N, P, H) and the new ones."""
    return _sizes(inputs[past])[2] + new if len(inputs) > past and inputs[past].shape is not None else new


def _onnx_attention(flow: AxisFlow, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
    """Attention of ONNX: query, key, value, mask (..., S, P + K), past key, past value."""
    total = _cached(flow, inputs, 4, _sizes(inputs[1])[-2])
    if node.domain == "" and len(inputs) > 3 and inputs[3].shape:
        flow.broadcast([inputs[3].shape[-1:], (total,)])
    return None


_RULES: Mapping[str, Callable[[AxisFlow, onnx.NodeProto, Sequence[Known]], list[Known] | None]] = {
    **dict.fromkeys(_BROADCAST, _arithmetic),
    **dict.fromkeys(_SAME_SHAPE, _same_shape),
    "Attention": _onnx_attention,
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "MatMul": _matmul,
    "Range": _range,
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
}
