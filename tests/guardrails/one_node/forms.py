"""One node of each operator: what it is fed beside its first input, and its attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

# Draws numbers of a shape, in the type of the node's first input.
Draw = Callable[..., np.ndarray]


@dataclass
class Node:
    """A node that is being drawn.

    Attributes
    ----------
    x
        Its first input.
    draw
        Returns more numbers of the type of `x`.
    feeds, constants
        What it reads beside `x`, in order, by name.
    attributes
        Of the node.
    outputs
        How many it has.
    """

    x: np.ndarray
    draw: Draw
    operands: list[str] = field(default_factory=lambda: ["x"])
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    attributes: dict[str, object] = field(default_factory=dict)
    outputs: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    def fed(self, array: np.ndarray) -> Node:
        name = f"f{len(self.feeds)}"
        self.feeds[name] = array
        self.operands.append(name)
        return self

    def held(self, array: np.ndarray) -> Node:
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        self.operands.append(name)
        return self

    def with_(self, **attributes: object) -> Node:
        self.attributes |= attributes
        return self

    def ints(self, *values: int) -> Node:
        return self.held(np.array(values, "int64"))


# Integers among ONNX's numbers of types.
_INTEGERS = (2, 3, 5, 6, 7, 12, 13)
# Draws a node, None where the operator does not take the shape.
Form = Callable[[Node], Node | None]


def plain(node: Node) -> Node:
    return node


def attributes(**given: object) -> Form:
    return lambda node: node.with_(**given)


def same(node: Node) -> Node:
    return node.fed(node.draw(*node.shape))


def broadcast(node: Node) -> Node | None:
    return node.held(node.draw(*node.shape[-1:])) if node.x.ndim > 1 else None


def spread(node: Node) -> Node:
    """The first input is the smaller one."""
    return node.fed(node.draw(2, *node.shape))


def shifts(node: Node) -> Node:
    return node.fed((node.draw(*node.shape) % 8).astype(node.x.dtype)).with_(direction="LEFT")


def reduced(*axes: int, keepdims: int = 1) -> Form:
    def form(node: Node) -> Node | None:
        if axes and max(abs(axis) for axis in axes) > node.x.ndim:
            return None
        return (node.ints(*axes) if axes else node).with_(keepdims=keepdims)

    return form


def by_length(power: int) -> Form:
    def form(node: Node) -> Node | None:
        # ONNX's evaluator takes no absolute values where p is 1.
        node.x = np.abs(node.x)
        return node.with_(axis=-1, p=power) if node.x.ndim else None

    return form


def along(axis: int, **given: object) -> Form:
    return lambda node: node.with_(axis=axis, **given) if node.x.ndim else None


def summed_up(node: Node) -> Node | None:
    return node.held(np.array(-1)).with_(exclusive=1, reverse=1) if node.x.ndim else None


def largest(node: Node) -> Node | None:
    if not node.x.ndim:
        return None
    node.outputs = 2
    return node.ints(min(2, node.shape[-1])).with_(axis=-1)


def clipped(node: Node) -> Node:
    low, high = np.sort(np.stack([node.draw(), node.draw()]))
    return node.held(low).held(high)


def joined(node: Node) -> Node | None:
    return node.fed(node.draw(*node.shape)).with_(axis=-1) if node.x.ndim else None


def expanded(node: Node) -> Node:
    # The first axis may be symbolic, and then is not 1 for sure.
    return node.ints(*(2, *(3 if size == 1 and axis else 1 for axis, size in enumerate(node.shape))))


def padded(mode: str) -> Form:
    def form(node: Node) -> Node | None:
        if not node.x.ndim or (mode != "constant" and min(node.shape[-1:]) < 2):
            return None
        zeros = [0] * (node.x.ndim - 1)
        return node.ints(*zeros, 1, *zeros, 1).with_(mode=mode)

    return form


def reshaped(node: Node) -> Node:
    # Of no elements, -1 has no meaning.
    return node.ints(*((-1,) if node.x.size else (0, 3))).with_(allowzero=int(not node.x.size))


def sliced(start: int, end: int, step: int) -> Form:
    return lambda node: node.ints(start).ints(end).ints(-1).ints(step) if node.x.ndim else None


def split(node: Node) -> Node | None:
    if not node.x.ndim:
        return None
    node.outputs = 2
    first = node.shape[-1] // 2
    return node.ints(first, node.shape[-1] - first).with_(axis=-1)


def unsqueezed(node: Node) -> Node:
    return node.ints(0, -1)


def squeezed(node: Node) -> Node | None:
    return node.ints(-1) if node.shape[-1:] == (1,) else None


def tiled(node: Node) -> Node:
    return node.ints(*(2 for _ in node.shape))


def turned(node: Node) -> Node | None:
    return node.with_(perm=list(range(node.x.ndim))[::-1]) if node.x.ndim else None


def triangle(upper: int) -> Form:
    return lambda node: node.held(np.array(1)).with_(upper=upper) if node.x.ndim > 1 else None


def cast(to: int) -> Form:
    def form(node: Node) -> Node:
        # Of floats that an integer cannot hold, and of infinities, a cast means nothing.
        if np.dtype(node.x.dtype).kind not in "iub" and to in _INTEGERS:
            node.x = np.abs(np.nan_to_num(node.x.astype("float32"), posinf=1, neginf=1)).astype(node.x.dtype)
        return node.with_(to=to)

    return form


def gathered(node: Node) -> Node | None:
    if not node.x.ndim or not node.shape[-1]:
        return None
    return node.fed(np.array([[0, -1], [node.shape[-1] - 1, 0]])).with_(axis=-1)


def gathered_elements(node: Node) -> Node | None:
    if not node.x.ndim or not node.shape[-1]:
        return None
    places = np.arange(node.x.size).reshape(node.shape) % node.shape[-1]
    return node.fed(places).with_(axis=-1)


def gathered_rows(node: Node) -> Node | None:
    return node.fed(np.array([[0], [-1]])) if node.x.ndim and node.shape[0] else None


def scattered(reduction: str) -> Form:
    def form(node: Node) -> Node | None:
        found = gathered_elements(node)
        return found.fed(node.draw(*node.shape)).with_(reduction=reduction) if found else None

    return form


def scattered_rows(reduction: str) -> Form:
    def form(node: Node) -> Node | None:
        found = gathered_rows(node)
        return found.fed(node.draw(2, *node.shape[1:])).with_(reduction=reduction) if found else None

    return form


def chosen(node: Node) -> Node | None:
    """Where: the condition is the first input."""
    return node.fed(np.arange(node.x.size, dtype="float32").reshape(node.shape)).held(np.float32(-1))


def times_weights(node: Node) -> Node | None:
    return node.held(node.draw(node.shape[-1], 4)) if node.x.ndim else None


def times_tensor(node: Node) -> Node | None:
    if node.x.ndim < 2:
        return None
    return node.fed(node.draw(*node.shape[:-2], node.shape[-1], 3))


def gemm(node: Node) -> Node | None:
    if node.x.ndim != 2:
        return None
    return node.held(node.draw(4, node.shape[-1])).held(node.draw(4)).with_(transB=1, alpha=2.0)


def einsum(node: Node) -> Node | None:
    return node.fed(node.draw(*node.shape)).with_(equation="...i,...i->...") if node.x.ndim else None


def normed(parameters: int) -> Form:
    def form(node: Node) -> Node | None:
        if not node.x.ndim:
            return None
        for _ in range(parameters):
            node.held(node.draw(node.shape[-1]))
        return node

    return form


def normed_channels(parameters: int, **given: object) -> Form:
    def form(node: Node) -> Node | None:
        if node.x.ndim < 3:
            return None
        for place in range(parameters):
            array = node.draw(node.shape[1])
            # The fourth is a variance.
            node.held(np.abs(array) if place == 3 else array)
        return node.with_(**given)

    return form


def quantised(node: Node) -> Node:
    scale = 2 if node.x.dtype.kind in "iu" else 0.1
    return node.held(np.array(scale, node.x.dtype)).held(np.array(3, "uint8"))


def dequantised(node: Node) -> Node:
    return node.held(np.float32(0.1)).held(np.array(3, node.x.dtype))


def dequantised_by_axis(node: Node) -> Node | None:
    if not node.x.ndim:
        return None
    size = node.shape[-1]
    return node.held(np.linspace(0.1, 1, size, dtype="float32")).held(np.zeros(size, node.x.dtype)).with_(axis=-1)


def dynamic(node: Node) -> Node:
    node.outputs = 3
    return node


def windows(**given: object) -> Form:
    return lambda node: node.with_(**given) if node.x.ndim == 4 else None


def convolved(node: Node) -> Node | None:
    if node.x.ndim != 4:
        return None
    return node.held(node.draw(3, node.shape[1], 3, 3)).held(node.draw(3)).with_(pads=[1, 1, 1, 1])


def one_hot(node: Node) -> Node:
    # ONNX cuts indices to integers; its evaluator does not.
    if node.x.dtype.kind not in "iu":
        node.x = np.trunc(np.nan_to_num(node.x.astype("float32"), posinf=1, neginf=1)).astype(node.x.dtype)
    return node.held(np.array(4, node.x.dtype)).held(np.array([0, 1], "float32"))


def integers_times(node: Node) -> Node | None:
    if not node.x.ndim:
        return None
    weights = (np.arange(node.shape[-1] * 4).reshape(-1, 4) % 7).astype("int8")
    return node.held(weights).held(np.array(2, node.x.dtype))


UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Celu", "Cos", "Cosh",
     "Elu", "Erf", "Exp", "Flatten", "Floor", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN",
     "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shape", "Shrink",
     "Sigmoid", "Sign", "Sin", "Sinh", "Size", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh",
     "ThresholdedRelu", "Dropout"
)  # fmt: skip
BINARY = (
    "Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual",
     "Less", "LessOrEqual", "Max", "Mean", "Min", "Mul", "Or", "Pow", "Sub", "Sum", "Xor"
)  # fmt: skip
REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
# Operator to its forms by name.
FORMS: Mapping[str, Mapping[str, Form]] = {
    **{name: {"": plain} for name in UNARY},
    **{name: {"same": same, "row": broadcast, "spread": spread} for name in BINARY},
    "PRelu": {"same": same, "row": broadcast},
    **{
        f"Reduce{name}": {
            "last": reduced(-1),
            "first": reduced(0, keepdims=0),
            "all": reduced(keepdims=0),
            "nothing": lambda node: node.with_(noop_with_empty_axes=1),
        }
        for name in REDUCTIONS
    },
    "ArgMax": {"last": along(-1), "first": along(0, keepdims=0)},
    "ArgMin": {"last": along(-1), "ties": along(-1, select_last_index=1)},
    "AveragePool": {"": windows(kernel_shape=[2, 2], pads=[1, 1, 0, 0])},
    "BatchNormalization": {"": normed_channels(4)},
    "BitShift": {"": shifts},
    "Cast": {str(to): cast(to) for to in (1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 13, 16)},
    "Clip": {"": clipped},
    "Concat": {"": joined},
    "Conv": {"": convolved},
    "CumSum": {"": summed_up},
    "DequantizeLinear": {"": dequantised, "axis": dequantised_by_axis},
    "DynamicQuantizeLinear": {"": dynamic},
    "Einsum": {"": einsum},
    "Expand": {"": expanded},
    "Gather": {"": gathered},
    "GatherElements": {"": gathered_elements},
    "GatherND": {"": gathered_rows},
    "Gelu": {"": plain, "tanh": attributes(approximate="tanh")},
    "Gemm": {"": gemm},
    "GlobalAveragePool": {"": windows()},
    "GlobalMaxPool": {"": windows()},
    "GroupNormalization": {"": normed_channels(2, num_groups=2)},
    "InstanceNormalization": {"": normed_channels(2)},
    "LayerNormalization": {"": normed(2)},
    "LogSoftmax": {"last": along(-1), "first": along(0)},
    "LpNormalization": {"1": by_length(1), "2": by_length(2)},
    "MatMul": {"weights": times_weights, "tensor": times_tensor},
    "MatMulInteger": {"": integers_times},
    "MaxPool": {"": windows(kernel_shape=[2, 2], strides=[2, 2])},
    "Mod": {"": same, "fmod": lambda node: same(node).with_(fmod=1)},
    "OneHot": {"": one_hot},
    "Pad": {mode: padded(mode) for mode in ("constant", "reflect", "edge", "wrap")},
    "QuantizeLinear": {"": quantised},
    "RMSNormalization": {"": normed(1)},
    "Reshape": {"": reshaped},
    "ScatterElements": {name: scattered(name) for name in ("none", "add", "max")},
    "ScatterND": {name: scattered_rows(name) for name in ("none", "add", "mul")},
    "Slice": {"part": sliced(1, 9, 1), "back": sliced(-1, -9, -1), "none": sliced(2, 1, 1)},
    "Softmax": {"last": along(-1), "first": along(0)},
    "Split": {"": split},
    "Squeeze": {"": squeezed},
    "Swish": {"": attributes(alpha=1.5)},
    "Tile": {"": tiled},
    "TopK": {"": largest},
    "Transpose": {"": turned},
    "Trilu": {"upper": triangle(1), "lower": triangle(0)},
    "Unsqueeze": {"": unsqueezed},
    "Where": {"": chosen},
}
