"""Steps of graphs with symbolic axes: sizes that are computed, cut, joined and bounded; branches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from relaxtune.polynomials import Polynomial
from tests.guardrails.graph_cases import UNARY
from tests.guardrails.sized_drawing import KINDS, Size, SizedDrawing

_SINCE = {"Celu": 12, "ThresholdedRelu": 10}
WIDTHS = (1, 3, 4, 8, 16)
_LIMITS = (4, 7, 16, 24)
# Operators of a branch, whose results have the shape of what they read.
_BRANCH = ("Relu", "Tanh", "Neg", "Sigmoid", "Abs")


def unary(d: SizedDrawing) -> None:
    x, shape = d.pick()
    operator = d.choice(*UNARY)
    if _SINCE.get(operator, 1) <= d.opset and not (operator == "Celu" and d.dtype == "float16"):
        d.keep(d.node(operator, x), shape)


def binary(d: SizedDrawing) -> None:
    x, shape = d.pick()
    same = [name for name, other in d.shapes.items() if other == shape]
    rows = [name for name, other in d.shapes.items() if other and other == shape[-len(other) :]]
    first = int(d.rng.integers(len(shape)))
    held = tuple(size if isinstance(size, int) and d.chance(0.7) else 1 for size in shape[first:])
    y = d.choice(d.choice(*same), d.choice(*rows), d.floats(*held))
    pair = (x, y) if d.chance(0.7) else (y, x)
    operators = ["Add", "Sub", "Mul", *(["Max", "Min"] if d.opset >= 12 or d.dtype == "float32" else [])]
    d.keep(d.node(d.choice(*operators), *pair), shape)


def divide(d: SizedDrawing) -> None:
    x, shape = d.pick()
    d.keep(d.node("Div", x, d.node("Add", d.node("Abs", x), d.number(1.5))), shape)


def scaled_by_size(d: SizedDrawing) -> None:
    """A size as a number: a mean by hand."""
    x, shape = d.pick()
    axis = d.axis(shape, Polynomial)
    size = d.node("Cast", d.length(x, axis), to=KINDS[d.dtype])
    d.keep(d.node(d.choice("Mul", "Add"), x, d.node("Div", d.number(1.0), d.node("Add", size, d.number(1.0)))), shape)


def softmax(d: SizedDrawing) -> None:
    x, shape = d.pick()
    axis = d.axis(shape) - (len(shape) if d.chance(0.5) and d.opset >= 11 else 0)
    d.keep(d.node(d.choice("Softmax", "LogSoftmax"), d.clip(x, -9, 9), axis=axis), shape)


def reduction(d: SizedDrawing) -> None:
    x, shape = d.pick()
    axes = [axis for axis in range(len(shape)) if d.chance(0.4)] or [d.axis(shape)]
    keep = d.chance(0.6)
    operator = d.choice("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2")
    result = tuple(1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes)
    if result:
        signed = axes if d.opset < 11 or d.chance(0.5) else [axis - len(shape) for axis in axes]
        d.keep(d.reduce(operator, x, signed, keep), result)


def arg_reduction(d: SizedDrawing) -> None:
    x, shape = d.pick(2)
    axis = d.axis(shape)
    place = d.node(d.choice("ArgMax", "ArgMin"), x, axis=axis, keepdims=1)
    d.keep(d.node("Cast", place, to=KINDS[d.dtype]), (*shape[:axis], 1, *shape[axis + 1 :]))


def matmul(d: SizedDrawing) -> None:
    x, shape = d.pick(2, known_end=True)
    inner, outer = int(shape[-1]), d.choice(*WIDTHS)  # type: ignore[arg-type]
    product = d.node("MatMul", x, d.floats(inner, outer, size=inner**-0.5))
    d.keep(d.node("Add", product, d.floats(outer)) if d.chance(0.5) else product, (*shape[:-1], outer))


def attention(d: SizedDrawing) -> None:
    """softmax(x x^T + mask) x; the mask of a table cut to the length, of positions compared, or none."""
    x, shape = d.pick(3, known_end=True)
    swapped = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    scores = d.node("Mul", d.node("MatMul", x, d.node("Transpose", x, perm=swapped)), d.number(0.3))
    length = d.length(x, len(shape) - 2)
    kind = d.choice("none", "compare", "table")
    if kind == "table" and d.opset >= 10 and isinstance(shape[-2], Polynomial):
        most = d.choice(*_LIMITS)
        table = d.constant(np.tril(np.ones((1, most, most))).astype("float32"))
        end = d.unsqueeze(length, 0)
        rows = d.node("Slice", table, d.ints(0), end, d.ints(1), d.ints(1))
        seen = d.node("Cast", d.node("Slice", rows, d.ints(0), end, d.ints(2), d.ints(1)), to=TensorProto.BOOL)
        scores = d.node("Where", seen, scores, d.number(-1e4))
        d.limits.append((shape[-2], most))
    elif kind == "compare":
        places = d.range(length)
        seen = d.node("Less", d.unsqueeze(places, 1), d.unsqueeze(places, 0))
        scores = d.node("Where", seen, d.number(-1e4), scores)
    d.keep(d.node("MatMul", d.node("Softmax", scores, axis=len(shape) - 1), x), shape)


def transpose(d: SizedDrawing) -> None:
    x, shape = d.pick(2)
    order = d.rng.permutation(len(shape)).tolist()
    d.keep(d.node("Transpose", x, perm=order), [shape[axis] for axis in order])


def merge(d: SizedDrawing) -> None:
    """Two axes become one, by numbers or by sizes that the graph computes."""
    x, shape = d.pick(2)
    place = int(d.rng.integers(len(shape) - 1))
    new = (*shape[:place], _product(shape[place], shape[place + 1]), *shape[place + 2 :])
    symbolic = [axis for axis, size in enumerate(new) if not isinstance(size, int)]
    if d.chance(0.5) and all(axis <= place for axis in symbolic):
        asked = [0 if axis < place and not isinstance(size, int) else size for axis, size in enumerate(new)]
        asked = [-1 if axis == place else size for axis, size in enumerate(asked)]
        d.keep(d.node("Reshape", x, d.ints(*asked)), new)  # type: ignore[arg-type]
        return
    lengths = [d.unsqueeze(d.length(x, axis), 0) for axis in range(len(shape))]
    joined = d.ints(-1) if d.chance(0.4) else d.node("Mul", lengths[place], lengths[place + 1])
    d.keep(d.node("Reshape", x, d.node("Concat", *lengths[:place], joined, *lengths[place + 2 :], axis=0)), new)


def _product(one: Size, other: Size) -> Size:
    return one * other if isinstance(one, int) and isinstance(other, int) else Polynomial.number(1) * one * other


def split_axis(d: SizedDrawing) -> None:
    """A known axis becomes two: heads."""
    x, shape = d.pick()
    axis = d.axis(shape, int)
    size = int(shape[axis])  # type: ignore[arg-type]
    factor = d.choice(*[one for one in (1, 2, 4) if size % one == 0])
    if len(shape) > 4:
        return
    new = (*shape[:axis], factor, size // factor, *shape[axis + 1 :])
    if all(isinstance(one, int) for one in shape[axis + 1 :]):
        d.keep(d.node("Reshape", x, d.ints(*[one if isinstance(one, int) else 0 for one in new])), new)
        return
    parts = [d.ints(one) if isinstance(one, int) else d.unsqueeze(d.length(x, place if place < axis else place - 1), 0)
             for place, one in enumerate(new)]  # fmt: skip
    d.keep(d.node("Reshape", x, d.node("Concat", *parts, axis=0)), new)


def cut(d: SizedDrawing) -> None:
    """All but the first or last of an axis, its last ones, every second, backwards, or the first few at most."""
    x, shape = d.pick()
    axis = d.axis(shape)
    size, few = shape[axis], d.choice(1, 1, 2, 3)
    kind = d.choice("but last", "but first", "last", "every second", "backwards", "first")
    if kind == "first":
        new: Size = min(size, few) if isinstance(size, int) else d.unknown()
        d.keep(d.slice(x, 0, few, axis), (*shape[:axis], new, *shape[axis + 1 :]))
        return
    if kind == "backwards":
        d.keep(d.slice(x, -1, -(2**63) + 1, axis, -1), shape)
        return
    if kind == "every second":
        new = -(-size // 2) if isinstance(size, int) else d.unknown()
        d.keep(d.slice(x, 0, 2**63 - 1, axis, 2), (*shape[:axis], new, *shape[axis + 1 :]))
        return
    d.require(size, few + 1 if kind != "last" else few)
    start, end = {"but last": (0, -few), "but first": (few, 2**63 - 1), "last": (-few, 2**63 - 1)}[kind]
    d.keep(d.slice(x, start, end, axis), (*shape[:axis], few if kind == "last" else size - few, *shape[axis + 1 :]))


def join(d: SizedDrawing) -> None:
    """A tensor beside itself, beside a constant, or beside one of another length: a cache."""
    x, shape = d.pick()
    axis = d.axis(shape)
    rest = (*shape[:axis], *shape[axis + 1 :])
    kinds = ["itself"]
    if all(isinstance(size, int) for size in rest):
        kinds += ["constant"] * 2
    if not any("?" in str(size) for size in rest) and len(d.inputs) < 4:
        kinds += ["past"] * 2
    kind = d.choice(*kinds)
    if kind == "past":
        other: Size = Polynomial.symbol(d.choice("past", "extra"))
        y = d.input(d.dtype, (*shape[:axis], other, *shape[axis + 1 :]))
    elif kind == "constant":
        other = d.choice(1, 2, 3)
        y = d.floats(*(other if place == axis else int(size) for place, size in enumerate(shape)))  # type: ignore[arg-type]
    else:
        other, y = shape[axis], d.node("Neg", x)
    pair = (y, x) if d.chance(0.5) else (x, y)
    d.keep(d.node("Concat", *pair, axis=axis), (*shape[:axis], _sum(shape[axis], other), *shape[axis + 1 :]))


def _sum(one: Size, other: Size) -> Size:
    return one + other


def pick_row(d: SizedDrawing) -> None:
    """The first, the last, or a named row."""
    x, shape = d.pick(2)
    axis = d.axis(shape)
    if d.chance(0.3):
        place = d.node("Sub", d.length(x, axis), d.scalar(1))
    else:
        place = d.scalar(d.choice(0, 0, -1) if d.opset >= 11 else 0)
    d.keep(d.node("Gather", x, place, axis=axis), (*shape[:axis], *shape[axis + 1 :]))


def positions(d: SizedDrawing) -> None:
    """A row of a table for each place: gathered or cut, the table's length is a limit."""
    x, shape = d.pick(2, known_end=True)
    d.axis(shape[-2:-1], Polynomial)
    most, width = d.choice(*_LIMITS), int(shape[-1])  # type: ignore[arg-type]
    length = d.length(x, len(shape) - 2)
    first = d.choice(0, 0, 2)
    if d.chance(0.5) or d.opset < 10:
        places = d.range(length)
        places = d.node("Add", places, d.scalar(first)) if first else places
        rows = d.node("Gather", d.floats(most, width), places, axis=0)
    else:
        end = d.unsqueeze(length, 0)
        end = d.node("Add", end, d.ints(first)) if first else end
        rows = d.node("Slice", d.floats(most, width), d.ints(first), end, d.ints(0), d.ints(1))
    d.limits.append((_sum(Polynomial(), shape[-2]), most - first))
    d.keep(d.node("Add", x, rows), shape)


def first_of_a_table(d: SizedDrawing) -> None:
    """The table's first rows alone, of which there may be fewer: no limit."""
    x, shape = d.pick()
    if d.opset < 10:
        return
    end = d.unsqueeze(d.length(x, d.axis(shape, Polynomial)), 0)
    d.keep(d.node("Slice", d.floats(d.choice(*_LIMITS), 4), d.ints(0), end, d.ints(0), d.ints(1)), (d.unknown(), 4))


def look_up(d: SizedDrawing) -> None:
    """Rows of a table by ids of the caller."""
    rows, width = d.choice(3, 17, 50), d.choice(*WIDTHS)
    x = d.input("int64", (Polynomial.symbol("batch"), Polynomial.symbol("n")))
    d.ids[x] = rows
    d.keep(d.node("Gather", d.floats(rows, width), x, axis=0), (*d.inputs[x][1], width))


def expanded(d: SizedDrawing) -> None:
    """A row as often as another tensor has rows; or zeros of its shape."""
    x, shape = d.pick()
    if d.chance(0.5):
        row = d.floats(*(size if isinstance(size, int) and d.chance(0.5) else 1 for size in shape))
        d.keep(d.node("Expand", row, d.node("Shape", x)), shape)
        return
    zeros = d.node("ConstantOfShape", d.node("Shape", x), value=helper.make_tensor("v", KINDS[d.dtype], [1], [0.5]))
    d.keep(d.node("Sub", zeros, x), shape)


def counted(d: SizedDrawing) -> None:
    """The place of each row, as a number."""
    x, shape = d.pick()
    axis = d.axis(shape, Polynomial)
    places = d.node("Cast", d.range(d.length(x, axis)), to=KINDS[d.dtype])
    after = len(shape) - 1 - axis
    places = d.unsqueeze(places, *range(1, after + 1)) if after else places
    d.keep(d.node("Add", x, d.node("Mul", places, d.number(0.125))), shape)


def norm(d: SizedDrawing) -> None:
    x, shape = d.pick(1, known_end=True)
    width = int(shape[-1])  # type: ignore[arg-type]
    if d.opset >= 17 and d.chance(0.5):
        d.keep(d.node("LayerNormalization", x, d.floats(width), d.floats(width), axis=-1), shape)
        return
    last = [len(shape) - 1]
    centred = d.node("Sub", x, d.reduce("ReduceMean", x, last))
    variance = d.reduce("ReduceMean", d.node("Mul", centred, centred), last)
    deviation = d.node("Sqrt", d.node("Add", variance, d.number(1e-2)))
    d.keep(d.node("Mul", d.node("Div", centred, deviation), d.floats(width)), shape)


def halves(d: SizedDrawing) -> None:
    """Two halves of a known axis, both kept."""
    x, shape = d.pick()
    axis = d.axis(shape, int)
    size = int(shape[axis])  # type: ignore[arg-type]
    if size % 2:
        return
    if d.opset < 13:
        first = d.node("Split", x, outputs=2, axis=axis, split=[size // 2, size // 2])
    else:
        first = d.node("Split", x, d.ints(size // 2, size // 2), outputs=2, axis=axis)
    for name in (first, f"{first}_1"):
        d.keep(name, (*shape[:axis], size // 2, *shape[axis + 1 :]))


def top_k(d: SizedDrawing) -> None:
    x, shape = d.pick()
    axis = d.axis(shape)
    count = d.choice(1, 2)
    d.require(shape[axis], count)
    if d.opset < 10:
        name = d.node("TopK", x, outputs=2, axis=axis, k=count)
    else:
        name = d.node("TopK", x, d.ints(count), outputs=2, axis=axis)
    d.keep(name, (*shape[:axis], count, *shape[axis + 1 :]))


def padded(d: SizedDrawing) -> None:
    x, shape = d.pick()
    axis = d.axis(shape)
    before, after = int(d.rng.integers(3)), int(d.rng.integers(3))
    pads = [0] * 2 * len(shape)
    pads[axis], pads[axis + len(shape)] = before, after
    new = (*shape[:axis], shape[axis] + (before + after), *shape[axis + 1 :])
    d.keep(d.node("Pad", x, pads=pads) if d.opset < 11 else d.node("Pad", x, d.ints(*pads)), new)


def convolution(d: SizedDrawing) -> None:
    """A convolution or pooling along the last axis; its first axis a batch, its second known."""
    x, shape = d.pick(3)
    if len(shape) != 3 or not isinstance(shape[1], int) or isinstance(shape[2], int):
        raise LookupError
    width, stride, pad = d.choice(1, 2, 3, 4), d.choice(1, 1, 2), d.choice(0, 0, 1)
    pad = min(pad, width - 1)
    d.require(shape[2], max(1, width - 2 * pad))
    new: Size = shape[2] + (2 * pad - width + 1) if stride == 1 else d.unknown()
    if d.chance(0.3):
        name = d.node(d.choice("MaxPool", "AveragePool"), x, kernel_shape=[width], strides=[stride], pads=[pad, pad])
        d.keep(name, (shape[0], shape[1], new))
        return
    outer = d.choice(2, 4)
    group = 2 if shape[1] % 2 == 0 and d.chance(0.3) else 1
    weights = d.floats(outer, shape[1] // group, width, size=0.4)
    d.keep(d.node("Conv", x, weights, strides=[stride], pads=[pad, pad], group=group), (shape[0], outer, new))


def branch(d: SizedDrawing) -> None:
    """One of two functions, by a size or by what the caller says."""
    x, shape = d.pick()
    if d.chance(0.5):
        condition = d.squeeze(d.input("bool", (1,)), 0)
    else:
        length = d.length(x, d.axis(shape, Polynomial))
        condition = d.node(d.choice("Greater", "Less"), length, d.scalar(d.choice(1, 4, 16)))
    held = d.floats(*(size if isinstance(size, int) else 1 for size in shape))
    dims = [size if isinstance(size, int) else None for size in shape]

    def inner(stem: str, *operators: str) -> object:
        nodes, last = [], x
        for operator in operators:
            name = d.name(stem)
            pair = [last, held] if operator in ("Add", "Mul") else [last]
            nodes.append(helper.make_node(operator, pair, [name]))
            last = name
        return helper.make_graph(nodes, stem, [], [helper.make_tensor_value_info(last, KINDS[d.dtype], dims)])

    then = inner("then", d.choice(*_BRANCH), d.choice("Add", "Mul"))
    other = inner("else", *d.choice(("Identity",), ("Mul",), (d.choice(*_BRANCH), "Add")))
    d.keep(d.node("If", condition, then_branch=then, else_branch=other), shape)


def repeated(d: SizedDrawing) -> None:
    x, shape = d.pick()
    axis = d.axis(shape)
    times = [2 if place == axis else 1 for place in range(len(shape))]
    d.keep(d.node("Tile", x, d.ints(*times)), (*shape[:axis], shape[axis] * 2, *shape[axis + 1 :]))


def added_up(d: SizedDrawing) -> None:
    x, shape = d.pick()
    if d.opset >= 11 and d.dtype == "float32":
        d.keep(d.node("CumSum", d.clip(x, -2, 2), d.scalar(d.axis(shape))), shape)


def ranks(d: SizedDrawing) -> None:
    x, shape = d.pick()
    ones = [place for place, size in enumerate(shape) if size == 1 and isinstance(size, int)]
    if ones and len(shape) > 1:
        place = d.choice(*ones)
        d.keep(d.squeeze(x, place), (*shape[:place], *shape[place + 1 :]))
    elif len(shape) < 4:
        place = int(d.rng.integers(len(shape) + 1))
        d.keep(d.unsqueeze(x, place), (*shape[:place], 1, *shape[place:]))


STEPS: tuple[Callable[[SizedDrawing], None], ...] = (
    unary, binary, binary, binary, divide, scaled_by_size, softmax, reduction, reduction, arg_reduction, matmul, matmul,
    attention, attention, transpose, merge, merge, split_axis, cut, cut, join, join, pick_row, positions, positions,
    first_of_a_table, look_up, expanded, counted, norm, halves, top_k, padded, convolution, convolution, branch, branch,
    repeated, added_up, ranks,
)  # fmt: skip
