"""Pass: precisions "w8a16", "w4a16", "fp8" and "int8": matmuls by constant matrices read them quantised."""

from __future__ import annotations

import logging
from collections.abc import Set

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    bindings_of,
    dtype_of,
    is_constant,
    is_op,
    longest_row_axis,
    main_of,
    multiplies_by_matrix,
    row_count,
    static_shape,
)
from relaxtune.pipeline.passes.kit.rewrite import ELEMENTWISE, OPAQUE, Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.weights.turn_weights import turned_matmul
from relaxtune.pipeline.precision.onnx_weights import MatmulWeights
from relaxtune.pipeline.precision.policy import PrecisionPolicy
from relaxtune.pipeline.precision.quantise import (
    QuantisedMatrix,
    holds_scales,
    packed_panels,
    packed_rows,
    quantise,
    quantise_float8,
    quantise_to_int8,
)
from relaxtune.schedules.cpu.contraction import BYTES_OF_WORD
from relaxtune.schedules.cpu.packing import panel_width
from relaxtune.schedules.functions.byte_rows import quantise_rows_to_bytes
from relaxtune.schedules.functions.float8 import QUANTISES_ROWS, quantise_columns, quantise_rows
from relaxtune.schedules.functions.quantised_matmul import dequantise_rows, matmul_of_panels, matmul_of_rows
from relaxtune.schedules.targets import CpuLimits, Feature, target_features, target_limits
from relaxtune.schedules.templates.gemm_sm80.plan import FEATURES, refuse_stored
from relaxtune.schedules.templates.gemv.plan import ROWS_MAX

logger = logging.getLogger(__name__)

# Rows up to which a kernel on mma.sync dequantises its own weights. For more, each weight is dequantised in many
# blocks, and a kernel of its own that does it once is a small part of the time. On an H200 both take as long at 142
# rows (h200-stored-gemm.json).
_STORED_ROWS = 128
_HALF = "float16"
# Bytes at which rows of float8 start; K and N below which quantising takes longer than float8 saves.
_FLOAT8_ALIGNMENT, _FLOAT8_LEAST = 16, 256
# Rows and columns below which bytes save less than making them takes.
_BYTES_LEAST = 64
# Operations between the matmul of a head and an output.
_AFTER_HEADS = (
    "add", "multiply", "astype", "reshape", "squeeze", "expand_dims", "permute_dims", "tanh", "sigmoid", "nn.softmax",
    "nn.log_softmax", "nn.relu",
)  # fmt: skip
_NO_FLOAT8 = "has no tensor cores of float8 (NVIDIA sm_89, sm_90a, sm_120 and sm_121 have)"


def quantise_weights(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls of float16 tensors by constant [K, N] matrices reading 4- or 8-bit weights.

    On a CPU, and on a GPU for up to 16 rows, dequantisation is a part of the matmul's kernel; on a GPU that multiplies
    by mma.sync for up to 128 rows. Else it is a kernel of its own before a float16 matmul: visible as such, and what
    is stored is the packed weight.

    Only weights that an ONNX MatMul or Gemm reads as a constant are quantised, so that validation can quantise the same
    ones in the original graph: tables of embeddings, convolutions and products of activations are not. Weights with an
    odd number of rows stay in float16 with a note.

    For "fp8", a kernel of rows quantises what a matmul reads, once for all its readers, and the matmul scales its sums
    by a number for each row and one for each column. With a calibration record, an elementwise function quantises,
    which fusion joins to the producer, and sums have scales of columns only. Matmuls that stay in 16 bits are noted
    with the reason.

    For "int8" of a float graph, a kernel of rows makes bytes of float32 with a scale and a zero point for each row;
    sums are exact, and scaled alike. Matrices that are small, and the heads of classifiers, stay in float32.

    Raises `UsageError`: nothing can be quantised under "int8": the precision would have no effect.
    """
    policy = state.options.policy
    if policy is None or not (policy.quantises or state.rows_to_bytes):
        return mod
    held = "float32" if state.rows_to_bytes else _HALF
    if policy.float8 and not multiplies_float8(state.target):
        state.note(f"all matmuls stay in {_HALF}: the target {_NO_FLOAT8}")
        return mod
    weights = MatmulWeights(state.graph.model)
    heads = _heads(Graph(mod)) if state.rows_to_bytes else set()
    found = {
        binding.var
        for binding in bindings_of(main_of(mod))
        if multiplies_by_matrix(binding.value)
        and {dtype_of(arg) for arg in binding.value.args} == {held}
        and not _stays(binding, weights, policy, state, heads)
    }
    if not found and state.rows_to_bytes:
        raise UsageError(
            f"precision {policy.name!r} of model {state.graph.name!r}: none of its matmuls reads 8-bit activations, "
            f"and none of float32 between other operators has a constant matrix of {_BYTES_LEAST} rows and columns or "
            f"more, K a multiple of {BYTES_OF_WORD}; choose another precision"
        )
    if not found:
        state.note("no matmul by a constant matrix found")
        logger.warning(
            "%s: precision %s quantises no weight: no MatMul or Gemm has a constant matrix that it can hold",
            state.graph.name,
            policy.name,
        )
        return mod
    rule: _Bytes | _Float8 | _Quantise
    if state.rows_to_bytes:
        rule = _Bytes(found)
    else:
        rule = _Float8(_static_tensors(found, weights, state)) if policy.float8 else _Quantise(state, policy, found)
    result = rewrite(mod, state, rule)
    for var in found:
        state.quantised_nodes.update(name for name in state.nodes_of([var.name]) if weights.is_matmul(name))
    state.note(f"{len(found)} weights of {rule.bytes_before} bytes quantised to {rule.bytes_after}")
    return result


def multiplies_float8(target: tvm.target.Target) -> bool:
    """Whether a target multiplies float8 faster than 16 bits."""
    features = target_features(target)
    return target.kind.name == "cuda" and bool(features & {Feature.WGMMA, Feature.FLOAT8_CORES})


def _heads(graph: Graph) -> set[relax.Var]:
    """Return the matmuls whose results are outputs but for constants that are added, views and activations."""
    heads: set[relax.Var] = set()
    seen: set[relax.Var] = set()
    waiting = [var for var in graph.values if var in graph.readers(var)]
    while waiting:
        var = waiting.pop()
        value = graph.value(var)
        if var in seen or value is None:
            continue
        seen.add(var)
        operands = [one for one in getattr(value, "args", ()) if not is_constant(one)]
        if isinstance(value, relax.Var):
            waiting.append(value)
        elif isinstance(value, relax.Tuple):
            waiting += [field for field in value.fields if isinstance(field, relax.Var)]
        elif is_op(value, "matmul"):
            heads.add(var)
        elif is_op(value, *_AFTER_HEADS) and isinstance(operands[0], relax.Var):
            waiting += operands[:1] if all(isinstance(one, relax.ShapeExpr) for one in operands[1:]) else []
    return heads


def _stays(
    binding: relax.VarBinding,
    weights: MatmulWeights,
    policy: PrecisionPolicy,
    state: LoweringState,
    heads: Set[relax.Var],
) -> bool:
    """Return whether a matrix is not the constants of ONNX matmuls side by side, or has no scales."""
    k, columns = static_shape(binding.value.args[1]) or (0, 0)
    matmuls = [name for name in state.nodes_of([binding.var.name]) if weights.is_matmul(name)]
    shapes = [weights.shape(name) for name in matmuls]
    known = bool(shapes) and all(shape is not None and shape[0] == k for shape in shapes)
    bits, group, reason = policy.weight_bits, policy.group_size, ""
    rows = row_count(binding.value.args[0])
    if not known or sum(shape[1] for shape in shapes if shape is not None) != columns or k % 2:
        reason = f"its {k}x{columns} matrix is no constant of ONNX matmuls"
    elif state.rows_to_bytes:
        if binding.var in heads:
            reason = "its result is an output: rounded scores of a head would be the model's"
        elif k % BYTES_OF_WORD or min(k, columns) < _BYTES_LEAST:
            reason = f"its {k}x{columns} matrix is small, or K is no multiple of {BYTES_OF_WORD}"
        elif not np.isfinite(array_of(binding.value.args[1])).all():
            reason = "its weights are not all finite"
    elif policy.float8:
        if k % _FLOAT8_ALIGNMENT or min(k, columns) < _FLOAT8_LEAST:
            reason = f"its {k}x{columns} matrix is small, or K is no multiple of {_FLOAT8_ALIGNMENT}"
        elif rows is not None and rows <= ROWS_MAX:
            reason = f"{rows} rows are too few to be quantised"
    elif bits is not None and not holds_scales(array_of(binding.value.args[1]), bits, group or 0):
        reason = f"its weights are so small that their scales have no {_HALF}"
    if reason:
        state.note(f"{binding.var.name} stays in {_HALF if policy.half else 'float32'}: {reason}")
        if policy.float8 or state.rows_to_bytes:
            state.float_nodes.update(matmuls)
            state.float_reasons.update(dict.fromkeys(matmuls, reason))
    return bool(reason)


def _static_tensors(found: set[relax.Var], weights: MatmulWeights, state: LoweringState) -> dict[relax.Var, str]:
    """Return the matmuls, each with the ONNX tensor on its left whose scale the record has, or ""."""
    scales = state.options.calibration.scales if state.options.calibration is not None else {}
    result = dict.fromkeys(found, "")
    for var in found:
        names = sorted({weights.left(name) for name in state.nodes_of([var.name]) if weights.is_matmul(name)})
        if len(names) == 1 and names[0] in scales:
            result[var] = names[0]
            state.static_tensors.add(names[0])
        elif scales:
            state.note(f"{var.name} finds the scale of each row: the record has no range of {', '.join(names)}")
    return result


class _Float8:
    def __init__(self, found: dict[relax.Var, str]) -> None:
        self._found = found
        self._rows: dict[tuple[tvm.ir.Expr, str], tuple[relax.Var, relax.Var | None]] = {}
        self.bytes_before = self.bytes_after = 0

    def __call__(self, new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        if binding.var not in self._found:
            return None
        left, weight = binding.value.args
        matrix, scales = quantise_float8(array_of(weight))
        calibration, tensor = new.state.options.calibration, self._found[binding.var]
        static = np.float32(calibration.scales[tensor]) if calibration is not None and tensor else None
        if (left, tensor) not in self._rows:
            if static is None:
                attrs = {"op_pattern": OPAQUE, QUANTISES_ROWS: True}
                both = new.emit(new.kernel(quantise_rows, new.of(left), name="quantise_rows", **attrs))
                parts = new.emit(relax.TupleGetItem(both, 0)), new.emit(relax.TupleGetItem(both, 1))
            else:
                # A vector, so that the kernels of all layers are one task.
                factors = relax.const(np.full(matrix.shape[1], 1 / static, np.float32))
                attrs = {"op_pattern": ELEMENTWISE, QUANTISES_ROWS: True}
                made = new.kernel(quantise_columns, new.of(left), factors, name="quantise_columns", **attrs)
                parts = new.emit(made), None
            self._rows[left, tensor] = parts
        data, row_scales = self._rows[left, tensor]
        scales = scales if static is None else scales * static
        self.bytes_before += array_of(weight).nbytes
        self.bytes_after += matrix.nbytes + scales.nbytes
        product = new.emit(new.kernel(turned_matmul("float32"), data, relax.const(matrix), name="matmul"))
        if row_scales is not None:
            product = new.emit(relax.op.multiply(product, row_scales))
        scaled = relax.op.multiply(product, relax.const(scales))
        dtype = dtype_of(binding.var)
        return scaled if dtype == "float32" else relax.op.astype(new.emit(scaled), dtype)


class _Bytes:
    def __init__(self, found: set[relax.Var]) -> None:
        self._found = found
        self._rows: dict[tvm.ir.Expr, tuple[relax.Var, ...]] = {}
        self.bytes_before = self.bytes_after = 0

    def __call__(self, new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        if binding.var not in self._found:
            return None
        left, weight = binding.value.args
        if left not in self._rows:
            parts = new.emit(new.kernel(quantise_rows_to_bytes, new.of(left), name="quantise_rows", op_pattern=OPAQUE))
            self._rows[left] = tuple(new.emit(relax.TupleGetItem(parts, place)) for place in range(3))
        data, row_scales, zeros = self._rows[left]
        matrix, scales = quantise_to_int8(array_of(weight))
        self.bytes_before += array_of(weight).nbytes
        self.bytes_after += matrix.nbytes + scales.nbytes
        products = new.emit(relax.op.matmul(data, relax.const(matrix), out_dtype="int32"))
        # A row's zero point is taken out of its sums by the sums of the columns.
        shifts = new.emit(relax.op.multiply(zeros, relax.const(-matrix.sum(axis=0, dtype=np.int32))))
        sums = new.emit(relax.op.astype(new.emit(relax.op.add(products, shifts)), "float32"))
        return relax.op.multiply(sums, new.emit(relax.op.multiply(row_scales, relax.const(scales))))


class _Quantise:
    def __init__(self, state: LoweringState, policy: PrecisionPolicy, found: set[relax.Var]) -> None:
        self._policy, self._found = policy, found
        limits = target_limits(state.target) if state.target.kind.name == "llvm" else None
        self._cpu = limits if isinstance(limits, CpuLimits) else None
        self._features = target_features(state.target)
        self._known: dict[tvm.ir.Expr, QuantisedMatrix] = {}
        self.bytes_before = self.bytes_after = 0

    def __call__(self, new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        if binding.var not in self._found:
            return None
        left, weight = binding.value.args
        matrix = self._quantised(weight)
        x, rows = new.of(left), row_count(left)
        k, columns = array_of(weight).shape
        shape, dtype = (k, matrix.bits, matrix.group), dtype_of(binding.var)
        if self._cpu is not None:
            longest = None if new.state.options.one_packing else longest_row_axis(left)
            width = panel_width(longest, columns, "float32", self._cpu)
            packed, scales = (relax.const(array) for array in packed_panels(matrix, width))
            compute = matmul_of_panels(k, columns, matrix.bits, matrix.group, dtype)
            return new.kernel(compute, x, packed, scales, name="quantised_matmul")
        stored = relax.const(packed_rows(matrix)), relax.const(np.ascontiguousarray(matrix.scales.T))
        # Whether the template for many rows reads a matrix as it is stored.
        reads_stored = (
            self._features >= FEATURES
            and Feature.WGMMA not in self._features
            and refuse_stored(columns, k, matrix.bits, matrix.group) is None
        )
        if rows is not None and (rows <= ROWS_MAX or (reads_stored and rows <= _STORED_ROWS)):
            return new.kernel(matmul_of_rows(*shape, dtype), x, *stored, name="quantised_matmul")
        # A kernel of its own writes the matrix in float16, once; constants are not folded through it.
        name = f"{binding.var.name}__weight"
        new.state.unfolded.add(name)
        compute = dequantise_rows(*shape, _HALF)
        made = new.kernel(compute, *stored, name="dequantise", op_pattern=OPAQUE)
        return new.kernel(turned_matmul(dtype), x, new.extra(name, made, [binding.var]), name="matmul")

    def _quantised(self, weight: tvm.ir.Expr) -> QuantisedMatrix:
        if weight not in self._known:
            bits, group = self._policy.weight_bits, self._policy.group_size
            assert bits is not None
            assert group is not None
            matrix = quantise(array_of(weight), bits, group)
            self._known[weight] = matrix
            self.bytes_before += array_of(weight).nbytes
            self.bytes_after += matrix.levels.size * bits // 8 + matrix.scales.nbytes
        return self._known[weight]
