"""Random graphs of transformers' operators: broadcasts, softmax, reductions, norms, indexing, casts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from tests.guardrails.drawing import Drawing, Drawn

UNARY = (
    "Relu",
    "Tanh",
    "Sigmoid",
    "Erf",
    "Abs",
    "Neg",
    "Softplus",
    "Elu",
    "Celu",
    "ThresholdedRelu",
    "Sign",
    "Floor",
    "Identity",
)
SIZES = (1, 2, 3, 4, 8, 16)
# Equal sizes on different axes are where an index is taken for another one.
SQUARE = 0.4


def unary(d: Drawing) -> None:
    x, shape = d.pick()
    d.keep(d.node(str(d.choice(*UNARY)), x), shape)


def binary(d: Drawing) -> None:
    x, shape = d.pick()
    same = [name for name, other in d.shapes.items() if other == shape]
    y = str(d.choice(*same)) if d.chance(0.4) else d.floats(*d.broadcastable(shape))
    operator = str(d.choice("Add", "Sub", "Mul", "Max", "Min"))
    pair = (x, y) if d.chance(0.7) else (y, x)
    d.keep(d.node(operator, *pair), shape)


def divide(d: Drawing) -> None:
    x, shape = d.pick()
    one = d.constant(np.full((1,) * int(d.rng.integers(len(shape) + 1)), 1.5, "float32"))
    d.keep(d.node("Div", x, d.node("Add", d.node("Abs", x), one)), shape)


def where(d: Drawing) -> None:
    x, shape = d.pick()
    condition = d.node(str(d.choice("Less", "Greater", "LessOrEqual")), x, d.floats(*d.broadcastable(shape)))
    filled = d.constant(np.float32(d.choice(0.0, -1e4, 1.0, np.nan)).reshape((1,) * int(d.rng.integers(2))))
    d.keep(d.node("Where", condition, x, filled), shape)


def softmax(d: Drawing) -> None:
    x, shape = d.pick()
    x = d.node("Clip", x, d.constant(np.array(-30, "float32")), d.constant(np.array(30, "float32")))
    axis = d.axis(shape) - (len(shape) if d.chance(0.5) else 0)
    d.keep(d.node(str(d.choice("Softmax", "LogSoftmax")), x, axis=axis), shape)


def reduction(d: Drawing) -> None:
    x, shape = d.pick()
    first = 1 if d.symbolic else 0
    axes = [axis for axis in range(first, len(shape)) if d.chance(0.5)] or [len(shape) - 1]
    if d.symbolic and axes == [0]:
        return
    keep = int(d.chance(0.6))
    operator = str(d.choice("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"))
    result = tuple(1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes)
    if result:
        d.keep(d.node(operator, x, d.constant(np.array(axes)), keepdims=keep), result)


def arg_reduction(d: Drawing) -> None:
    """The place of the largest or smallest, as a number again."""
    x, shape = d.pick(2)
    axis = d.axis(shape)
    if d.symbolic and axis == 0:
        return
    last = int(d.chance(0.3))
    place = d.node(str(d.choice("ArgMax", "ArgMin")), x, axis=axis, keepdims=1, select_last_index=last)
    d.keep(d.node("Cast", place, to=TensorProto.FLOAT), (*shape[:axis], 1, *shape[axis + 1 :]))


def matmul(d: Drawing) -> None:
    x, shape = d.pick(2)
    width = int(d.rng.choice(SIZES))
    if d.chance(0.3):
        turned = d.node("Transpose", x, perm=[*range(len(shape) - 2), len(shape) - 1, len(shape) - 2])
        if not (d.symbolic and len(shape) == 2):
            d.keep(d.node("MatMul", x, turned), (*shape[:-1], shape[-2]))
        return
    if d.chance(0.15):
        d.keep(d.node("MatMul", x, d.floats(shape[-1])), shape[:-1])
        return
    lead = tuple(1 if d.chance(0.3) else size for size in shape[1:-2]) if d.chance(0.3) else ()
    product = d.node("MatMul", x, d.floats(*lead, shape[-1], width))
    if d.chance(0.5):
        product = d.node("Add", product, d.floats(width))
    d.keep(product, (*shape[:-1], width))


def transpose(d: Drawing) -> None:
    x, shape = d.pick(2)
    first = [0] if d.symbolic else []
    order = [*first, *d.rng.permutation(np.arange(len(first), len(shape))).tolist()]
    d.keep(d.node("Transpose", x, perm=order), tuple(shape[axis] for axis in order))


def reshape(d: Drawing) -> None:
    x, shape = d.pick(2)
    start = 1 if d.symbolic else 0
    place = int(d.rng.integers(start, len(shape)))
    if d.chance(0.5) and place + 1 < len(shape):
        new = (*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :])
    else:
        factors = [size for size in (1, 2, 4) if shape[place] % size == 0]
        factor = int(d.rng.choice(factors))
        new = (*shape[:place], factor, shape[place] // factor, *shape[place + 1 :])
    asked = [0 if d.symbolic and axis == 0 else size for axis, size in enumerate(new)]
    if d.chance(0.4):
        asked[int(d.rng.integers(start, len(new)))] = -1
    if len(new) <= 5:
        d.keep(d.node("Reshape", x, d.constant(np.array(asked))), new)


def cut(d: Drawing) -> None:
    x, shape = d.pick()
    axis = d.axis(shape)
    if d.symbolic and axis == 0:
        return
    size = shape[axis]
    start, step = int(d.rng.integers(-size, size)), int(d.rng.choice([1, 1, 2, -1]))
    first = start % size
    end = int(d.rng.integers(first + 1, size + 1)) if step > 0 else int(d.rng.choice([-size - 1, -(2**63) + 1]))
    taken = len(range(first, end, step)) if step > 0 else first + 1
    numbers = (d.constant(np.array([number])) for number in (start, end, axis, step))
    d.keep(d.node("Slice", x, *numbers), (*shape[:axis], taken, *shape[axis + 1 :]))


def join(d: Drawing) -> None:
    x, shape = d.pick()
    axis = d.axis(shape)
    if shape[axis] <= 16 and not (d.symbolic and axis == 0):
        second = d.node("Neg", x) if d.symbolic or d.chance(0.5) else d.floats(*shape)
        d.keep(d.node("Concat", x, second, axis=axis), (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]))


def gather(d: Drawing) -> None:
    x, shape = d.pick()
    axis = d.axis(shape)
    if d.symbolic and axis == 0:
        return
    indices = d.rng.integers(-shape[axis], shape[axis], d.choice((), (2,), (3,)))
    result = (*shape[:axis], *indices.shape, *shape[axis + 1 :])
    if result:
        d.keep(d.node("Gather", x, d.constant(np.array(indices)), axis=axis), result)


def scatter(d: Drawing) -> None:
    x, shape = d.pick()
    if d.symbolic:
        return
    axis = d.axis(shape)
    covered = tuple(int(d.rng.integers(1, size + 1)) for size in shape)
    order = d.rng.random(tuple(shape[axis] if place == axis else size for place, size in enumerate(covered))).argsort(
        axis
    )
    indices = np.take(order, range(covered[axis]), axis)
    d.keep(d.node("ScatterElements", x, d.constant(indices), d.floats(*covered), axis=axis), shape)


def top_k(d: Drawing) -> None:
    x, shape = d.pick()
    axis = d.axis(shape)
    if d.symbolic and axis == 0:
        return
    count = int(d.rng.integers(1, shape[axis] + 1))
    values = d.node("TopK", x, d.constant(np.array([count])), axis=axis, largest=int(d.chance(0.7)))
    d.nodes[-1].output.append(f"{values}_places")
    d.keep(values, (*shape[:axis], count, *shape[axis + 1 :]))


def layer_norm(d: Drawing) -> None:
    """Layer and RMS norms step by step, their constants of several ranks."""
    x, shape = d.pick()
    axes, two = d.constant(np.array([-1])), d.constant(np.array(2, "float32"))
    centred = x if d.chance(0.5) else d.node("Sub", x, d.node("ReduceMean", x, axes))
    square = d.node("Pow", centred, two) if d.chance(0.5) else d.node("Mul", centred, centred)
    ones = (1,) * int(d.rng.integers(len(shape) + 1))
    epsilon = d.constant(np.full(ones, d.choice(1e-5, 1e-6, 1e-2), "float32"))
    deviation = d.node("Sqrt", d.node("Add", d.node("ReduceMean", square, axes), epsilon))
    inverse = d.chance(0.5)
    normed = d.node("Mul", centred, d.node("Reciprocal", deviation)) if inverse else d.node("Div", centred, deviation)
    for operator in ("Mul", "Add")[: int(d.rng.integers(3))]:
        normed = d.node(operator, normed, d.floats(*d.broadcastable(shape)))
    d.keep(normed, shape)


def fused_norm(d: Drawing) -> None:
    x, shape = d.pick()
    axis = d.axis(shape)
    if d.symbolic and axis == 0:
        return
    scale = d.floats(*shape[axis:]) if d.chance(0.7) else d.floats(shape[-1])
    inputs = [scale, d.floats(*shape[axis:])] if d.chance(0.7) else [scale]
    d.keep(d.node("LayerNormalization", x, *inputs, axis=axis - len(shape)), shape)


def gelu(d: Drawing) -> None:
    """GELU step by step, sometimes with a constant that is near, or of a higher rank."""
    x, shape = d.pick()

    def near(value: float) -> str:
        ranks = (0,) if d.chance(0.7) else (1, len(shape))
        shaped = np.full((1,) * int(d.rng.choice(ranks)), value * (1.01 if d.chance(0.15) else 1), "float32")
        return d.constant(shaped)

    bent = d.node("Add", d.node("Erf", d.node("Div", x, near(2**0.5))), near(1.0))
    d.keep(d.node("Mul", d.node("Mul", x, bent), near(0.5)), shape)


def half(d: Drawing) -> None:
    x, shape = d.pick()
    small = d.node("Cast", d.node("Tanh", x), to=TensorProto.FLOAT16)
    middle = d.node(str(d.choice("Relu", "Neg", "Sigmoid")), small)
    d.keep(d.node("Cast", middle, to=TensorProto.FLOAT), shape)


def attention(d: Drawing) -> None:
    """softmax(x x^T / scale + mask) x over the last two axes."""
    x, shape = d.pick(3)
    turned = d.node("Transpose", x, perm=[*range(len(shape) - 2), len(shape) - 1, len(shape) - 2])
    scores = d.node("Div", d.node("MatMul", x, turned), d.constant(np.array(shape[-1] ** 0.5, "float32")))
    rows = shape[-2]
    if d.chance(0.6):
        mask = np.where(np.tril(np.ones((rows, rows))), 0, d.choice(-np.inf, -1e9)).astype("float32")
        ones = (1,) * int(d.rng.integers(len(shape) - 1))
        scores = d.node("Add", scores, d.constant(mask.reshape(*ones, rows, rows)))
    d.keep(d.node("MatMul", d.node("Softmax", scores, axis=-1), x), shape)


STEPS: tuple[Callable[[Drawing], None], ...] = (
    unary, binary, binary, divide, where, softmax, softmax, reduction, arg_reduction, matmul, matmul, transpose,
    reshape, cut, join, gather, scatter, top_k, layer_norm, layer_norm, fused_norm, gelu, half, attention,
)  # fmt: skip


def draw_graph(seed: int) -> Drawn:
    """Return a graph of about ten steps and one input for it; every third graph has a symbolic batch."""
    rng = np.random.default_rng([seed, 7])
    drawing = Drawing(rng, symbolic=seed % 3 == 0)
    rank = int(rng.integers(2, 5))
    one = int(rng.choice(SIZES[1:]))
    shape = tuple(one if rng.random() < SQUARE else int(rng.choice(SIZES)) for _ in range(rank))
    x = drawing.fed(*shape)
    drawing.keep(x, shape)
    for _ in range(int(rng.integers(3, 12))):
        _, current = next(reversed(drawing.shapes.items()))
        with contextlib.suppress(LookupError):  # no tensor has the rank that the step needs
            if int(np.prod(current)) < 20_000:
                STEPS[rng.integers(len(STEPS))](drawing)
    last, result = next(reversed(drawing.shapes.items()))
    if last == x:
        last = drawing.node("Identity", x)
    return drawing.model(f"seed{seed}", (last, result)), drawing.inputs
