"""Near misses: graphs that are almost what a pass looks for, and some that are; small changes are drawn at random."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.guardrails.drawing import Drawing, Drawn, Shape
from tests.guardrails.near_misses_attention import ATTENTION

# Relative error of a constant: none, what rounding gives, and what makes it another function.
_OFF = (0.0, 0.0, 1e-7, 1e-3, 1e-2, 0.5)
_WIDTHS = (8, 24, 64, 256)


def near(d: Drawing, value: float, shape: Shape) -> str:
    """Return a constant about as a pattern has it: its value, its rank, or its axes may differ."""
    wide = tuple(size if d.chance(0.5) else 1 for size in shape)
    held = d.choice((), (), (), (1,), (1,) * len(shape), (1,) * (len(shape) + 1), wide, wide[1:])
    off = float(d.choice(*_OFF))  # type: ignore[arg-type]
    return d.number(value * (1 + off), *held)  # type: ignore[misc]


def matmul(d: Drawing, x: str, inner: int, outer: int) -> str:
    """Return x by a constant matrix whose result is about as large as x."""
    return d.node("MatMul", x, d.constant((d.rng.standard_normal((inner, outer)) / inner**0.5).astype("float32")))


def _start(d: Drawing) -> tuple[str, Shape]:
    """Return a tensor [batch, rows, columns]: an input, or a projection of one."""
    batch, rows, columns = int(d.choice(1, 2, 3)), int(d.choice(1, 3, 16)), int(d.choice(*_WIDTHS))  # type: ignore[call-overload]
    if rows == 3 and d.chance(0.3):
        columns = 3
    x = d.fed(batch, rows, columns)
    return (x if d.chance(0.5) else matmul(d, x, columns, columns)), (batch, rows, columns)


def _end(d: Drawing, x: str, shape: Shape) -> tuple[str, Shape]:
    """Return a tensor or a projection of it."""
    if d.chance(0.5):
        return x, shape
    return matmul(d, x, shape[-1], 24), (*shape[:-1], 24)


def activation(d: Drawing) -> tuple[str, Shape]:
    """GELU by erf or tanh, SiLU, QuickGELU; constants a bit off, of other ranks, or broadcasting the result."""
    x, shape = _start(d)
    kind = d.choice("erf", "tanh", "silu", "quick")
    other = d.node("Abs", x) if d.chance(0.1) else x
    if kind in ("silu", "quick"):
        inner = d.node("Mul", x, near(d, 1.702, shape)) if kind == "quick" else x
        gate = d.node("Sigmoid", inner)
        result = d.node("Mul", *((other, gate) if d.chance(0.5) else (gate, other)))
    else:
        if kind == "erf":
            bent = d.node("Erf", d.node("Div", x, near(d, 2**0.5, shape)))
        else:
            cube = d.node("Pow", x, near(d, 3.0, ())) if d.chance(0.5) else d.node("Mul", d.node("Mul", x, x), x)
            cubic = d.node("Mul", near(d, 0.044715, shape), cube)
            bent = d.node("Tanh", d.node("Mul", near(d, (2 / np.pi) ** 0.5, shape), d.node("Add", other, cubic)))
        gate = d.node("Add", bent, near(d, 1.0, shape))
        half = near(d, 0.5, shape)
        if d.chance(0.5):
            result = d.node("Mul", d.node("Mul", other, gate), half)
        else:
            result = d.node("Mul", d.node("Mul", half, x), gate)
    return d.node("Identity", result), _broadcast(d, shape)


def _broadcast(d: Drawing, shape: Shape) -> Shape:
    """Return the shape that a result has beside every constant that was drawn so far."""
    small = [array.shape for array in d.constants.values() if array.size == 1 or array.ndim != 2]
    return np.broadcast_shapes(shape, *small)


def norm(d: Drawing) -> tuple[str, Shape]:
    """Layer and RMS norms: other axes, epsilons and gammas of other shapes, centres over another axis."""
    x, shape = _start(d)
    axes = list(d.choice((-1,), (-1,), (-1,), (2,), (-2,), (-1, -2), (1,)))  # type: ignore[call-overload]
    kept = [1 if axis in (a % 3 for a in axes) else size for axis, size in enumerate(shape)]
    others = axes if d.chance(0.85) else [-2]

    def mean(of: str, over: list[int]) -> str:
        if d.chance(0.85):
            return d.node("ReduceMean", of, d.ints(*over), keepdims=1)
        places = [axis % 3 for axis in over]
        return d.node("Unsqueeze", d.node("ReduceMean", of, d.ints(*over), keepdims=0), d.ints(*places))

    centred = d.node("Sub", x, mean(x, others)) if d.chance(0.6) else x
    squared = centred if d.chance(0.9) else x
    powers = (d.node("Pow", squared, near(d, 2.0, ())), d.node("Mul", squared, centred))
    variance = mean(str(d.choice(*powers)), axes)
    epsilon = d.number(
        float(d.choice(1e-5, 1e-12, 0.1)),  # type: ignore[arg-type]
        *d.choice((), (1,), (1, 1, 1), tuple(kept), (shape[-1],)),  # type: ignore[misc]
    )
    root = d.node("Sqrt", d.node("Add", *((variance, epsilon) if d.chance(0.5) else (epsilon, variance))))
    if d.chance(0.5):
        result = d.node("Div", centred, root)
    else:
        one = d.node("Reciprocal", root) if d.chance(0.5) else d.node("Div", d.number(1.0), root)
        result = d.node("Mul", *((centred, one) if d.chance(0.5) else (one, centred)))
    gammas = ((shape[-1],), (shape[-1],), (1, shape[-1]), (shape[-2], shape[-1]), (shape[-2], 1), (1,), shape)
    for operator in ("Mul", "Add")[: int(d.rng.integers(3))]:
        result = d.node(operator, result, d.floats(*d.choice(*gammas)))  # type: ignore[misc]
    return _end(d, result, shape)


def gate(d: Drawing) -> tuple[str, Shape]:
    """Gated activations: factors in either order, other data, biases, a gate that is read twice, other widths."""
    x, shape = _start(d)
    wide = int(d.choice(8, 12, 64, 128))  # type: ignore[call-overload]
    other = x if d.chance(0.7) else d.node("Neg", x)
    left = matmul(d, x, shape[-1], wide)
    right = matmul(d, other, shape[-1], wide if d.chance(0.8) else 1)
    if d.chance(0.3):
        left = d.node("Add", left, d.floats(*d.choice((wide,), (shape[1], 1), (1,))))  # type: ignore[misc]
    kind = d.choice("silu", "silu", "tanh", "Sigmoid", "Relu")
    if kind == "silu":
        bent = d.node("Mul", left, d.node("Sigmoid", left if d.chance(0.8) else right))
    elif kind == "tanh":
        cube = d.node("Mul", d.number(0.044715), d.node("Pow", left, d.number(3.0)))
        inner = d.node("Tanh", d.node("Mul", d.number((2 / np.pi) ** 0.5), d.node("Add", left, cube)))
        bent = d.node("Mul", d.node("Mul", d.number(0.5), left), d.node("Add", inner, d.number(1.0)))
    else:
        bent = d.node(str(kind), left)
    result = d.node("Mul", *((bent, right) if d.chance(0.5) else (right, bent)))
    if d.chance(0.2):
        result = d.node("Add", result, d.choice(left, bent))  # type: ignore[arg-type]
    if d.chance(0.3):
        return result, (*shape[:-1], wide)
    return matmul(d, result, wide, shape[-1]), shape


def projections(d: Drawing) -> tuple[str, Shape]:
    """Matmuls of one tensor side by side: biases of other shapes, scales, one that is read twice, slices of one."""
    x, shape = _start(d)
    rows = shape[1]
    parts = []
    for _ in range(int(d.rng.integers(2, 4))):
        part = matmul(d, x, shape[-1], 32)
        if d.chance(0.6):
            held = d.choice((32,), (32,), (1, 32), (rows, 32), (rows, 1), (1,))
            part = d.node("Add", part, d.floats(*held))  # type: ignore[misc]
        if d.chance(0.3):
            part = d.node("Mul", part, near(d, 0.35, (rows, 32)))
        part = d.node("Reshape", part, d.ints(shape[0], -1, 4, 8) if d.chance(0.8) else d.ints(shape[0], -1, 8, 4))
        parts.append(d.node("Transpose", part, perm=[0, 2, 1, 3]))
    flat = [d.node("Reshape", part, d.ints(shape[0], -1)) for part in parts]
    return d.node("Concat", *flat, axis=1), (shape[0], len(parts) * rows * 32)


def flattened(d: Drawing) -> tuple[str, Shape]:
    """Matmuls over flattened rows whose axes come back otherwise, with what is added behind them."""
    x, (batch, rows, columns) = _start(d)
    flat = d.node("Reshape", x, d.choice(d.ints(-1, columns), d.ints(batch * rows, columns)))  # type: ignore[arg-type]
    result = matmul(d, flat, columns, 24)
    for _ in range(int(d.rng.integers(3))):
        held = d.choice((24,), (batch * rows, 1), (batch * rows, 24), (1, 24), ())
        result = d.node(str(d.choice("Add", "Mul")), result, d.floats(*held))  # type: ignore[misc]
    shape = d.choice(
        (batch, rows, 24), (rows, batch, 24), (batch * rows, 24), (batch, rows, 4, 6), (1, batch * rows, 24)
    )
    result = d.node("Reshape", result, d.ints(*shape))  # type: ignore[misc]
    if d.chance(0.5):
        result = d.node("Add", result, d.floats(*shape))  # type: ignore[misc]
    return result, shape  # type: ignore[return-value]


def patches(d: Drawing) -> tuple[str, Shape]:
    """Convolutions over patches: steps, pads, groups, dilation and the transpose behind them may differ."""
    size = int(d.choice(2, 4))  # type: ignore[call-overload]
    high, wide = 4 * size, int(d.choice(4 * size, 6 * size))  # type: ignore[call-overload]
    step = size if d.chance(0.8) else int(d.choice(1, 2 * size))  # type: ignore[call-overload]
    pad, apart = int(d.chance(0.1)), 1 + int(d.chance(0.1))
    groups = 2 if d.chance(0.1) else 1
    x = d.fed(2, 4, high, wide)
    attributes = {"strides": [step, step], "pads": [pad] * 4, "dilations": [apart] * 2, "group": groups}
    y = d.node("Conv", x, d.floats(8, 4 // groups, size, size), *([d.floats(8)] if d.chance(0.6) else []), **attributes)
    rows, columns = ((n + 2 * pad - apart * (size - 1) - 1) // step + 1 for n in (high, wide))
    if d.chance(0.3):
        y = d.node("Add", y, d.floats(*d.choice((8, 1, 1), (1, 8, 1, 1), (columns,), (rows, 1))))  # type: ignore[misc]
    flat = d.node("Reshape", y, d.ints(2, 8, -1))
    if d.chance(0.8):
        return d.node("Transpose", flat, perm=[0, 2, 1]), (2, rows * columns, 8)
    return d.node("Transpose", flat, perm=[1, 2, 0]), (8, rows * columns, 2)


def look_up(d: Drawing) -> tuple[str, Shape]:
    """Rows of a table: negative indices wrapped by its length or another, other axes, sums of several."""
    rows, columns = int(d.choice(16, 32)), 16  # type: ignore[call-overload]
    axis = int(d.chance(0.2))
    table = d.floats(rows, columns)
    count = columns if axis else rows
    ids = d.input(d.rng.integers(-count // 2, count // 2, (2, 5)))
    if d.chance(0.6):
        by = d.ints(count if d.chance(0.7) else count // 2)
        negative = d.node("Less", ids, d.constant(np.array([0 if d.chance(0.8) else 1])))
        ids = d.node("Where", negative, d.node("Add", ids, by), ids)
    result = d.node("Gather", table, ids, axis=axis)
    shape: Shape = (rows, 2, 5) if axis else (2, 5, columns)
    if d.chance(0.5):
        result = d.node("Add", result, d.floats(*d.choice(shape, shape[1:], (1,))))  # type: ignore[misc]
    return result, shape


def quantised(d: Drawing) -> tuple[str, Shape]:
    """Matmuls of quantised tensors: scales a tensor, a column or a row, zero points or none, signed or not."""
    rows, inner, outer = int(d.choice(1, 4, 16)), 32, int(d.choice(8, 32))  # type: ignore[call-overload]
    # Multiples of the scale: no value is a tie of the quantiser.
    x = d.input((d.rng.integers(-100, 100, (2, rows, inner)) / 64).astype("float32"))
    kind = str(d.choice("uint8", "int8"))
    zero = int(d.choice(0, 128 if kind == "uint8" else 3))  # type: ignore[call-overload]
    scale, point = d.number(1 / 64), d.constant(np.array(zero, kind))
    if d.chance(0.8):
        x = d.node("DequantizeLinear", d.node("QuantizeLinear", x, scale, point), scale, point)
    axis = int(d.rng.integers(2))
    held = (outer if axis else inner,) if d.chance(0.6) else ()
    scales = d.constant((2.0 ** d.rng.integers(-8, -4, held)).astype("float32"))
    wide = str(d.choice("uint8", "int8"))
    limits = np.iinfo(wide)
    points = d.rng.integers(limits.min, limits.max, held) * int(d.chance(0.5))
    matrix = d.constant(d.rng.integers(limits.min, limits.max, (inner, outer)).astype(wide))
    weight = d.node("DequantizeLinear", matrix, scales, d.constant(np.asarray(points).astype(wide)), axis=axis)
    result = d.node("MatMul", x, weight)
    if d.chance(0.5):
        result = d.node("Add", result, d.floats(*d.choice((outer,), (rows, 1), (1,))))  # type: ignore[misc]
    return result, (2, rows, outer)


def guard(d: Drawing) -> tuple[str, Shape]:
    """NaN guards after a softmax: another filling, another tensor, rows that are masked or not."""
    x, shape = _start(d)
    rows, columns = shape[1:]
    mask = np.where(d.rng.random((rows, columns)) < 0.5, 0, d.choice(-np.inf, -1e9, 0.0)).astype("float32")
    scores = d.node("Add", x, d.constant(mask))
    weights = d.node("Softmax", scores, axis=int(d.choice(-1, -1, -2)))  # type: ignore[call-overload]
    tested = weights if d.chance(0.8) else scores
    filled = near(d, float(d.choice(0.0, 0.0, 1.0)), shape)  # type: ignore[arg-type]
    result = d.node("Where", d.node("IsNaN", tested), filled, weights)
    return result, _broadcast(d, shape)


def twice(d: Drawing) -> tuple[str, Shape]:
    """Equal nodes and unequal ones that look alike: attributes, constants and operand orders differ."""
    x, shape = _start(d)
    y = d.floats(*shape[1:])
    operator = str(d.choice("Sub", "Div", "Pow", "Max"))
    base = d.node("Add", d.node("Abs", x), d.number(0.5))
    other = d.node("Add", d.node("Abs", y), d.number(0.5))
    first, second = d.node(operator, base, other), d.node(operator, other, base)
    axes = [int(d.rng.integers(-2, 0)) for _ in range(2)]
    sums = [d.node("ReduceSum", one, d.ints(axis), keepdims=1) for one, axis in zip((first, second), axes, strict=True)]
    return d.node("Mul", d.node("Add", *sums), first), shape


PATTERNS: tuple[Callable[[Drawing], tuple[str, Shape]], ...] = (
    activation, norm, norm, gate, projections, flattened, patches, look_up, quantised, guard, twice, *ATTENTION,
)  # fmt: skip


def draw_near_miss(seed: int) -> Drawn:
    """Return a near miss and one input for it; seeds that follow each other go through the patterns."""
    d = Drawing(np.random.default_rng([seed, 11]), symbolic=False)
    pattern = PATTERNS[seed % len(PATTERNS)]
    output, shape = pattern(d)
    return d.model(f"{pattern.__name__}{seed}", (output, shape)), d.inputs
