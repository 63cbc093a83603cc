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

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_op, shape_of, static_shape
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import size_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.targets import CpuLimits, target_limits

_BYTES = ("int8", "uint8")
_LARGEST_ACTIVATION = 255
# CPUs on which int8 gains nothing.
NO_WORDS = "multiplies no bytes by fours (features avx512vnni and avxvnni of x86 do)"
_INT32_MAX = 2**31 - 1
# Between int8 and uint8.
_OFFSET = 128

_Values = Mapping[relax.Var, tvm.ir.Expr]


@dataclass(frozen=True)
class IntegerMatmul:
    """A matmul that can be computed in integers; without scales its result is integers, too."""

    integers: tvm.ir.Expr  # The left operand.
    zero: tvm.ir.Expr | None  # Its zero point in int32; None for 0.
    scale: tvm.ir.Expr | None
    centred: np.ndarray  # The right operand [K, N], less its zero points.
    column_scales: np.ndarray | None


def integer_matmuls(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls of dequantised 8-bit activations and constants as int8 matmuls with int32 sums.

    Runs before constants are folded: folded, the weights would be floats (or int32). Matmuls of two activations,
    operands of 16 bits and scales along K stay as they are; `LoweringState.float_nodes` has the ONNX matmuls of numbers
    that stay, `LoweringState.quantised_nodes` those that are integer.

    Without any, `quantise_weights` quantises the floats where a CPU multiplies bytes by fours. Such a CPU reads
    activations as uint8: those of int8 get 128 more, their zero point too.

    Raises `UsageError`: there is none elsewhere: the precision would have no effect.
    """
    policy = state.options.policy
    if policy is None or not policy.integer:
        return mod
    graph = Graph(mod)
    found: dict[relax.Var, IntegerMatmul] = {}
    for binding in graph.bindings:
        if is_op(binding.value, "matmul"):
            match = _match(binding.value, graph.values)
            if match is not None:
                found[binding.var] = match
            nodes = state.float_nodes if match is None else state.quantised_nodes
            nodes.update(state.nodes_of([binding.var.name]))
    has_words = multiplies_words(state.target)
    if not found:
        if not has_words:
            raise UsageError(_no_integers(policy.name, state))
        state.rows_to_bytes = True
        state.float_nodes.clear()
        return mod
    state.note(f"{len(found)} matmuls in integers, {len(state.float_nodes)} not")
    if state.target.kind.name == "llvm" and not has_words:
        state.note(f"their operands are widened: the target {NO_WORDS}")
    return replace_found(mod, state, found, _in_integers)


def multiplies_words(target: tvm.target.Target) -> bool:
    """Whether a target is a CPU that adds four products of bytes in one step."""
    limits = target_limits(target) if target.kind.name == "llvm" else None
    return isinstance(limits, CpuLimits) and limits.has_byte_dot


def _no_integers(precision: str, state: LoweringState) -> str:
    what = (
        f"precision {precision!r} of model {state.graph.name!r}: none of its matmuls reads 8-bit activations and a "
        "constant 8-bit matrix with one scale or one a column"
    )
    quantise = (
        "quantise the model first (quantize_static in QDQ format or quantize_dynamic, of onnxruntime.quantization)"
    )
    if state.target.kind.name == "llvm":
        return (
            f"{what}, and floats are not quantised for this target, which {NO_WORDS}; name a processor that has them "
            f'by --target (as {{"kind": "llvm", "mcpu": "cascadelake"}}), {quantise}, or choose another precision'
        )
    return f"{what}, and floats are quantised for CPUs only; {quantise}, or choose another precision, such as 'fp8'"


def _match(matmul: relax.Call, values: _Values) -> IntegerMatmul | None:
    dtype = dtype_of(matmul)
    if dtype not in ("float32", "int32"):
        return None
    parts = _parts(matmul.args[0], values, scaled=dtype == "float32")
    matrix = _matrix(matmul.args[1], values, scaled=dtype == "float32")
    if parts is None or matrix is None or is_constant(parts[0]) or len(shape_of(parts[0]) or ()) < 2:
        return None
    (_, zero, scale), (centred, scales) = parts, matrix
    # A zero point for each row is taken out of the product as one for all is; one along K is not.
    if (zero is not None and not _are_ones(zero, last=True)) or (scale is not None and not _are_ones(scale)):
        return None
    if scales is not None and not (scales == scales[:1]).all():
        return None
    largest = int(np.abs(centred).sum(axis=0).max(initial=0)) * _LARGEST_ACTIVATION
    return (
        IntegerMatmul(*parts, centred, None if scales is None else scales[0].copy()) if largest <= _INT32_MAX else None
    )


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


def _are_ones(expr: tvm.ir.Expr, *, last: bool = False) -> bool:
    """Return whether the axes of a tensor, or its last one, are of size 1."""
    shape = shape_of(expr)
    return shape is not None and all(size_of(axis) == 1 for axis in (shape[-1:] if last else shape))


def _in_integers(new: Rewriter, binding: relax.VarBinding, match: IntegerMatmul) -> tvm.ir.Expr:
    def extra(what: str, value: tvm.ir.Expr) -> relax.Var:
        return new.extra(f"{binding.var.name}__{what}", value, [binding.var])

    integers, zero, scale = new.of(match.integers), match.zero, match.scale
    if dtype_of(integers) == "int8" and multiplies_words(new.state.target):
        offset = relax.const(_OFFSET, "int32")
        wide = new.emit(relax.op.add(new.emit(relax.op.astype(integers, "int32")), offset))
        integers = new.emit(relax.op.astype(wide, "uint8"))
        if zero is None or is_constant(zero):
            zero = relax.const(_OFFSET + (np.zeros(1, np.int32) if zero is None else array_of(zero).astype(np.int32)))
        else:
            zero = new.emit(relax.op.add(new.of(zero), offset))
    result = relax.op.matmul(integers, relax.const(narrowed(match.centred)), out_dtype="int32")
    if zero is not None:
        products = extra("products", result)
        # The zero point's share of each column's sum: one row, where it is one.
        columns = -match.centred.sum(axis=0, dtype=np.int32)
        if is_constant(zero) and array_of(zero).size == 1:
            correction = relax.const(array_of(zero).reshape(1) * columns)
        else:
            correction = new.emit(relax.op.multiply(new.of(zero), relax.const(columns)))
        result = relax.op.add(products, correction)
    if scale is not None and match.column_scales is not None:
        numbers = extra("float32", relax.op.astype(extra("sums", result), "float32"))
        columns = match.column_scales
        # One number where the columns share theirs.
        shared = columns[:1].reshape(()) if (columns == columns[0]).all() else columns
        if is_constant(scale):
            factors = relax.const(array_of(scale).reshape(()) * shared)
        else:
            factors = new.emit(relax.op.multiply(new.of(scale), relax.const(shared)))
        result = relax.op.multiply(numbers, factors)
    return result


def narrowed(centred: np.ndarray) -> np.ndarray:
    """Return integers less their zero point in int8 where all fit, else in int16 (they are within 255 of 0)."""
    limits = np.iinfo(np.int8)
    fits = centred.size == 0 or (centred.min() >= limits.min and centred.max() <= limits.max)
    return np.ascontiguousarray(centred.astype(np.int8 if fits else np.int16))
