from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from tvm import te, tirx, topi
from tvm.ir import Call
from tvm.ir.expr import TensorLoad
from tvm.sym import Analyzer

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.tir.dataflow import Dataflow, recognise_dataflow
from tests.schedules.templates import memory_cases as cases
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.memory_cases import MemoryCase, tensor


def turned_sums(rows: int, columns: int) -> MemoryCase:
    """Each element less the sum of the row as far from the end."""

    def tensors() -> list[te.Tensor]:
        x, k = tensor("x", (rows, columns), "float32"), te.reduce_axis((0, columns), name="k")
        total = te.compute((rows,), lambda i: te.sum(x[i, k], axis=k), name="total")
        return [x, te.compute((rows, columns), lambda i, j: x[i, j] - total[rows - 1 - i], name="rest")]

    return MemoryCase(tensors, lambda x: x - x.sum(-1, keepdims=True)[::-1])


def of_one_number(*, returned: bool) -> MemoryCase:
    """All elements by one that has no axes; or that one alone."""

    def tensors() -> list[te.Tensor]:
        x = tensor("x", (3, 4), "float32")
        one = te.compute((), lambda: x[1, 2] + 1, name="one")
        return [x, one] if returned else [x, te.compute((3, 4), lambda i, j: x[i, j] * one(), name="scaled")]

    return MemoryCase(tensors, lambda x: x[1, 2] + 1 if returned else x * (x[1, 2] + 1))


CASES = {
    "by one number": of_one_number(returned=False),
    "one number": of_one_number(returned=True),
    "turned": turned_sums(4, 5),
    "layer norm": cases.layer_norm((2, 3, 6), residual=True),
    "rms norm": cases.rms_norm((5, 4)),
    "softmax": cases.softmax((2, 3, 5), masked=True),
    "mean": cases.mean((3, 4)),
    "extremes": cases.row_extremes((3, 5)),
    "gelu": cases.bias_gelu((3, 4)),
    "silu": cases.silu((2, 3)),
    "gather": cases.embedding(5, 4, 3),
    "rotary": cases.rotary(1, 3, 2, 4),
    "transpose": cases.transpose((2, 3, 4), (2, 0, 1)),
    "row put first": cases.append((2, 3, 4), 1),
    "column put first": cases.append((2, 3), 1),
    "causal": cases.causal_mask(4),
    "choice": cases.chosen((2, 2, 3)),
    "booleans": cases.both_marks((2, 3)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_expressions_compute_the_function(case: MemoryCase) -> None:
    func = case.func()
    flow = recognise_dataflow(func)
    assert isinstance(flow, Dataflow)
    arrays = cases.random_inputs(func, np.random.default_rng(0))
    found, right = evaluate(flow, func, arrays), case.expected(*map(cases.widened, arrays))
    np.testing.assert_allclose(found.reshape(right.shape), right, rtol=2e-3, atol=2e-3)


def evaluate(flow: Dataflow, func: tirx.PrimFunc, arrays: list[np.ndarray]) -> np.ndarray:
    """Return the output, element by element."""
    flat = {buffer: cases.widened(arrays[position]).reshape(-1) for buffer, position in flow.flat.items()}
    (output,) = flow.outputs
    result = np.zeros(math.prod(int(size) for size in func.params[-1].ty.shape))
    outer, columns = flow.axes[:-1], flow.columns
    for row, places in enumerate(itertools.product(*(range(axis.size) for axis in outer))):
        known: dict[tirx.Var, float] = {axis.var: place for axis, place in zip(outer, places, strict=True)}
        for reduction in flow.reductions:
            elements = [number(reduction.element, {**known, columns.var: i}, flat) for i in range(columns.size)]
            known[reduction.result] = {"sum": sum, "max": max, "min": min}[reduction.combine](elements)
        if output.per_row:
            result[row] = number(output.value, known, flat)
            continue
        for column in range(columns.size):
            value = number(output.value, {**known, columns.var: column}, flat)
            result[row * columns.size + column] = value
    return result


BINARY = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.Div: lambda a, b: a / b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
    tirx.Min: min,
    tirx.Max: max,
    tirx.NE: lambda a, b: a != b,
    tirx.LT: lambda a, b: a < b,
    tirx.LE: lambda a, b: a <= b,
    tirx.And: lambda a, b: a and b,
}
CALLS = {
    "tirx.exp": math.exp,
    "tirx.erf": math.erf,
    "tirx.rsqrt": lambda x: x**-0.5,
    "tirx.sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


def number(expr: tirx.Expr, known: dict, flat: dict) -> float:
    if isinstance(expr, tirx.Var):
        return known[expr]
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return expr.value
    if isinstance(expr, TensorLoad):
        return flat[expr.source][int(number(expr.indices[0], known, flat))]
    if isinstance(expr, tirx.Cast):
        value = number(expr.value, known, flat)
        return bool(value) if str(expr.ty.dtype) == "bool" else value
    if isinstance(expr, tirx.Select):
        return number(expr.true_value if number(expr.condition, known, flat) else expr.false_value, known, flat)
    if isinstance(expr, Call) and expr.op.name == "prim.if_then_else":
        return number(expr.args[1] if number(expr.args[0], known, flat) else expr.args[2], known, flat)
    if isinstance(expr, Call):
        return CALLS[expr.op.name](*(number(argument, known, flat) for argument in expr.args))
    return BINARY[type(expr)](number(expr.a, known, flat), number(expr.b, known, flat))


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (cases.silu((2, 3, 4)), [24]),
        (cases.bias_gelu((6, 4)), [6, 4]),
        (cases.layer_norm((2, 3, 4)), [6, 4]),
        (cases.softmax((2, 3, 5)), [6, 5]),
        (cases.softmax((2, 3, 5), masked=True), [2, 3, 5]),
        (cases.transpose((1, 6, 4), (0, 2, 1)), [4, 6]),
        # Slices of a packed row become offsets; batch and length stay apart, cos and sin are of the length alone.
        (cases.rotary(2, 3, 4, 8), [2, 4, 3, 8]),
    ],
)
def test_axes_that_no_load_tells_apart_are_one(case: MemoryCase, sizes: list[int]) -> None:
    flow = recognise_dataflow(case.func())
    assert isinstance(flow, Dataflow)
    assert [axis.size for axis in flow.axes] == sizes


def test_equal_reductions_are_made_once() -> None:
    x = tensor("x", (4, 6), "float32")
    total = topi.sum(x, axis=1, keepdims=True)
    flow = recognise_dataflow(te.create_prim_func([x, topi.add(topi.divide(x, total), total)]))
    assert isinstance(flow, Dataflow)
    assert [reduction.combine for reduction in flow.reductions] == ["sum"]


def refused(*tensors: te.Tensor) -> str:
    found = recognise_dataflow(te.create_prim_func(list(tensors), index_dtype_override="int64"))
    assert isinstance(found, Refusal)
    return found.reason


def test_refusals_say_why() -> None:
    x = tensor("x", (4, 6), "float32")
    both = topi.add(topi.sum(x, axis=1, keepdims=True), topi.sum(x, axis=0, keepdims=True))
    assert refused(x, topi.add(x, both)) == "its reductions are over rows of different sizes: [4, 6]"
    whole = topi.sum(x, axis=(0, 1), keepdims=True)
    assert "different sizes" in refused(x, topi.add(x, whole))
    square = tensor("square", (4, 4), "float32")
    crossed = topi.add(square, topi.sum(square, axis=1))
    assert "is read at another row than is written" in refused(square, crossed)
    far = te.compute((4, 6), lambda i, j: x[i, tirx.floordiv(j * 2**40, 2**40 + 1)], name="far")
    assert "the kernel counts in 32 bits" in refused(x, far)
    huge = tensor("huge", (2**16, 2**15))
    assert refused(huge, topi.negative(huge)).startswith("a tensor has more than 2147418112 elements")
    integers = tensor("n", (4, 6), "int64")
    assert "is of int64, expected float16" in refused(integers, topi.sum(integers, axis=1))


def test_matmul_is_a_reduction_over_scattered_rows() -> None:
    """The templates refuse it: it is recognised here, since rows are all that it is made of."""
    flow = recognise_dataflow(MatmulCase((8,), 16, 4, ("bias",)).func())
    assert isinstance(flow, Dataflow)
    assert [output.per_row for output in flow.outputs] == [True]


@pytest.mark.parametrize("case", [cases.layer_norm, cases.rms_norm, cases.silu])
def test_symbolic_rows_are_one_axis(case: Callable[[tuple[int, ...]], MemoryCase]) -> None:
    batch, sequence = (tirx.Var(name, "int64") for name in ("batch", "sequence"))
    func = case((batch, sequence, 8)).func()
    assert isinstance(recognise_dataflow(func), Refusal)
    flow = recognise_dataflow(func, symbolic=True)
    assert isinstance(flow, Dataflow), flow
    elements = math.prod(axis.size for axis in flow.axes)
    assert Analyzer().can_prove_equal(elements, batch * sequence * 8)
    if flow.reductions:
        assert flow.columns.size == 8
        assert len(flow.axes) == 2


def test_reductions_over_a_symbolic_axis_are_refused() -> None:
    columns = tirx.Var("columns", "int64")
    found = recognise_dataflow(cases.rms_norm((4, columns)).func(), symbolic=True)
    assert isinstance(found, Refusal)
    assert found.reason == "it reduces over rows of a symbolic size"
