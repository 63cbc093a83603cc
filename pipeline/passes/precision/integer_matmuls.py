"""Pass: precision "int8": matmuls of a graph that comes quantised multiply 8-bit integers and sum in int32.

::

    quantised       ((a - za) * sa) @ ((b - zb) * sb)  ->  float32(a @ (b - zb) - za * colsum(b - zb)) * (sa * sb)
    integer         (a - za) @ (b - zb)                ->          a @ (b - zb) - za * colsum(b - zb)

a are the 8-bit activations with one scale and one zero point (which may be computed: dynamic quantisation), b a
constant matrix [K, N] with a scale and a zero point for all of it or for each column. b - zb is computed now, and held
in int8 where it fits (always, for symmetric weights), else in int16; the sums of its columns are constants, too. What
is summed is exact, so the result differs from the float graph's by its roundings only.

Formulas: ONNX, Operators.md, DequantizeLinear and MatMulInteger; B. Jacob et al., "Quantization and Training of Neural
Networks for Efficient Integer-Arithmetic-Only Inference", section 2.3 (zero points taken out of the product).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_op, shape_of, static_shape, values_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState

_BYTES = ("int8", "uint8")
_LARGEST_ACTIVATION = 255
_INT32_MAX = 2**31 - 1

_Values = Mapping[relax.Var, tvm.ir.Expr]


@dataclass(frozen=True)
class Activations:
    """The left operand: integers, their zero point in int32 (None: 0) and scale (None: the result is in integers)."""

    integers: tvm.ir.Expr
    zero: tvm.ir.Expr | None
    scale: tvm.ir.Expr | None


@dataclass(frozen=True)
class Weights:
    """The right operand: integers less zero points [K, N], the scale of each column (None: the result is integer)."""

    centred: np.ndarray
    scales: np.ndarray | None


@dataclass(frozen=True)
class IntegerMatmul:
    """A matmul that can be computed in integers."""

    activations: Activations
    weights: Weights


def integer_matmuls(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls of dequantised 8-bit activations and constants as int8 matmuls with int32 sums.

    Runs before constants are folded: folded, the weights would be floats (or int32). Matmuls of two activations,
    operands of 16 bits and scales along K stay as they are; `LoweringState.float_nodes` has the ONNX matmuls of numbers
    that stay, `LoweringState.quantised_nodes` those that are integer.
    """
    policy = state.options.policy
    if policy is None or not policy.integer:
        return mod
    graph = Graph(mod)
    found = find_integer_matmuls(graph.main)
    for binding in graph.bindings:
        if is_op(binding.value, "matmul"):
            nodes = state.quantised_nodes if binding.var in found else state.float_nodes
            nodes.update(state.nodes_of([binding.var.name]))
    state.note(f"{len(found)} matmuls in integers, {len(state.float_nodes)} not")
    return replace_found(mod, state, found, _in_integers)


def find_integer_matmuls(main: relax.Function) -> dict[relax.Var, IntegerMatmul]:
    """Return the matmuls of `main` that can be computed in integers, by the variable that each binds."""
    values = values_of(main)
    found = {}
    for var, value in values.items():
        if is_op(value, "matmul") and (match := _match(value, values)) is not None:
            found[var] = match
    return found


def _match(matmul: relax.Call, values: _Values) -> IntegerMatmul | None:
    dtype = dtype_of(matmul)
    if dtype not in ("float32", "int32"):
        return None
    activations = _activations(matmul.args[0], values, scaled=dtype == "float32")
    weights = _weights(matmul.args[1], values, scaled=dtype == "float32")
    if activations is None or weights is None:
        return None
    largest = int(np.abs(weights.centred).sum(axis=0).max(initial=0)) * _LARGEST_ACTIVATION
    return IntegerMatmul(activations, weights) if largest <= _INT32_MAX else None


def _activations(expr: tvm.ir.Expr, values: _Values, *, scaled: bool) -> Activations | None:
    parts = _parts(expr, values, scaled=scaled)
    if parts is None or is_constant(parts[0]) or len(shape_of(parts[0]) or ()) < 2:
        return None
    integers, zero, scale = parts
    # A zero point for each row is taken out of the product as one for all is; one along K is not.
    if zero is not None and not _is_last_axis_one(zero):
        return None
    if scale is not None and not _is_one_number(scale):
        return None
    return Activations(integers, zero, scale)


def _weights(expr: tvm.ir.Expr, values: _Values, *, scaled: bool) -> Weights | None:
    matrix = _matrix(expr, values, scaled=scaled)
    if matrix is None:
        return None
    centred, scales = matrix
    if scales is None:
        return Weights(centred, None)
    return Weights(centred, scales[0].copy()) if (scales == scales[:1]).all() else None


def _matrix(expr: tvm.ir.Expr, values: _Values, *, scaled: bool) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Return a constant matrix, also a transposed one, less its zero points in int32, and the scale of each element."""
    value = _resolved(expr, values)
    if is_op(value, "permute_dims") and len(shape_of(value) or ()) == 2:
        inner = _matrix(value.args[0], values, scaled=scaled)
        axes = value.attrs.axes
        if inner is None or (axes is not None and [int(axis) % 2 for axis in axes] != [1, 0]):
            return inner
        return inner[0].T, None if inner[1] is None else inner[1].T
    parts = _parts(value, values, scaled=scaled)
    if parts is None or len(static_shape(parts[0]) or ()) != 2:
        return None
    if any(part is not None and not is_constant(part) for part in parts):
        return None
    integers, zero, scale = parts
    centred = array_of(integers).astype(np.int32) - (0 if zero is None else array_of(zero))
    return centred, None if scale is None else np.broadcast_to(array_of(scale), centred.shape)


def _parts(
    expr: tvm.ir.Expr, values: _Values, *, scaled: bool
) -> tuple[tvm.ir.Expr, tvm.ir.Expr | None, tvm.ir.Expr | None] | None:
    """Return the 8-bit integers, zero point and scale of what `converters.quantise` makes of them, None for others."""
    value, scale, zero = _resolved(expr, values), None, None
    if scaled:
        if not is_op(value, "multiply"):
            return None
        wide, scale = value.args
        value = _resolved(wide, values)
        if dtype_of(scale) != "float32" or not is_op(value, "astype"):
            return None
        value = _resolved(value.args[0], values)
    if is_op(value, "subtract") and dtype_of(value) == "int32":
        wide, zero = value.args
        value = _resolved(wide, values)
    if not is_op(value, "astype") or dtype_of(value.args[0]) not in _BYTES:
        return None
    return _constant_or_var(value.args[0], values), _constant_or_var(zero, values), _constant_or_var(scale, values)


def _resolved(expr: tvm.ir.Expr, values: _Values) -> tvm.ir.Expr:
    """Return what a variable is bound to, through variables that are bound to variables."""
    while isinstance(expr, relax.Var) and expr in values:
        expr = values[expr]
    return expr


def _constant_or_var(expr: tvm.ir.Expr | None, values: _Values) -> tvm.ir.Expr | None:
    if expr is None:
        return None
    value = _resolved(expr, values)
    return value if is_constant(value) else expr


def _is_last_axis_one(expr: tvm.ir.Expr) -> bool:
    shape = shape_of(expr)
    return shape is not None and (not shape or _is_one(shape[-1]))


def _is_one_number(expr: tvm.ir.Expr) -> bool:
    shape = shape_of(expr)
    return shape is not None and all(_is_one(axis) for axis in shape)


def _is_one(axis: tvm.tirx.Expr) -> bool:
    return isinstance(axis, tvm.tirx.IntImm) and int(axis) == 1


def _in_integers(new: Rewriter, binding: relax.VarBinding, match: IntegerMatmul) -> tvm.ir.Expr:
    def extra(what: str, value: tvm.ir.Expr) -> relax.Var:
        return new.extra(f"{binding.var.name}__{what}", value, [binding.var])

    activations, weights = match.activations, match.weights
    narrow = relax.const(narrowed(weights.centred))
    result = relax.op.matmul(new.of(activations.integers), narrow, out_dtype="int32")
    if activations.zero is not None:
        products = extra("products", result)
        result = relax.op.add(products, _correction(new, activations.zero, weights.centred))
    if activations.scale is not None and weights.scales is not None:
        numbers = extra("float32", relax.op.astype(extra("sums", result), "float32"))
        result = relax.op.multiply(numbers, _scale(new, activations.scale, weights.scales))
    return result


def _correction(new: Rewriter, zero: tvm.ir.Expr, centred: np.ndarray) -> tvm.ir.Expr:
    """Return what the zero point of the activations takes away from each column's sum: one row, where it is one."""
    columns = -centred.sum(axis=0, dtype=np.int32)
    if is_constant(zero) and array_of(zero).size == 1:
        return relax.const(array_of(zero).reshape(1) * columns)
    return new.emit(relax.op.multiply(new.of(zero), relax.const(columns)))


def _scale(new: Rewriter, activations: tvm.ir.Expr, weights: np.ndarray) -> tvm.ir.Expr:
    """Return the product of both scales, one number where the columns share theirs."""
    shared = weights[:1].reshape(()) if (weights == weights[0]).all() else weights
    if is_constant(activations):
        return relax.const(array_of(activations).reshape(()) * shared)
    return new.emit(relax.op.multiply(new.of(activations), relax.const(shared)))


def narrowed(centred: np.ndarray) -> np.ndarray:
    """Return integers less their zero point in int8 where all fit, else in int16 (they are within 255 of 0)."""
    limits = np.iinfo(np.int8)
    fits = centred.size == 0 or (centred.min() >= limits.min and centred.max() <= limits.max)
    return np.ascontiguousarray(centred.astype(np.int8 if fits else np.int16))
