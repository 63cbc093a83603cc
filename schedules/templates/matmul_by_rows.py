"""Matmuls that templates take, and the recognition of those by a matrix of rows [N, K], plain or quantised.

::

    for n, k:                                          x: float16, W: bytes and scales, see
    `schedules.functions.quantised_matmul`
        W[n, k] = f16(f32(level - offset) * scale)     (no such block where W is a parameter)
    for m, n, k:
        acc[m, n] += f32(x[m, k]) * f32(W[n, k])
    for m, n:
        C[m, n] = value(acc[m, n], m, n)

A dequantising block is taken for one when it is, expression by expression, what `schedules.functions.quantised_matmul`
writes.
"""

from __future__ import annotations

from dataclasses import replace

import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.s_tir import SBlock

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.float8 import FLOAT8
from relaxtune.schedules.functions.quantised_matmul import dequantise_rows
from relaxtune.schedules.tir.blocks import Block, list_statements, plain_blocks, position_of, static_shape
from relaxtune.schedules.tir.epilogue import MatmulFunction, Quantisation
from relaxtune.schedules.tir.expressions import list_loads
from relaxtune.schedules.tir.matmul import recognise_matmul

#: Dtypes of outputs; and of integer sums besides.
OUTPUTS, INTEGER_OUTPUTS = ("float16", "bfloat16", "float32"), ("int8", "uint8", "int32")
_INDEX_MAX = 2**31 - 1


def refuse_matmul(matmul: MatmulFunction, *, integer: bool, vector: int, reason: str) -> Refusal | None:
    """Return why a matmul's output, or the length of its rows, are none of a template's that copies `vector` elements.

    `integer` says that sums are integers; `reason` says what needs such rows: those of A, and of B as it lies in
    memory.
    """
    outputs = (*OUTPUTS, FLOAT8, *(INTEGER_OUTPUTS if integer else ()))
    if matmul.output_dtype not in outputs:
        return Refusal(f"the output is {matmul.output_dtype}, expected one of {', '.join(outputs)}")
    for name, size in (("K", matmul.k), *(() if matmul.b_transposed else (("N", matmul.n),))):
        if size % vector:
            return Refusal(f"{name} is {size}, expected a multiple of {vector} ({reason})")
    if max(matmul.m * matmul.n, matmul.m * matmul.k, matmul.n * matmul.k) > _INDEX_MAX:
        return Refusal("a matrix has 2**31 elements or more, the kernel counts in 32 bits")
    return None


def recognise_matmul_by_rows(func: tirx.PrimFunc) -> MatmulFunction | Refusal:
    """Return the matmul by rows that a function is, or why it is none."""
    blocks = plain_blocks(func)
    if isinstance(blocks, Refusal):
        return blocks
    if not all(static_shape(param) for param in func.params):
        return Refusal("a parameter is a scalar, expected tensors")
    if blocks[0].init is not None:
        stored: Quantisation | None = None
        matmul = recognise_matmul(func)
    else:
        found = _quantisation(func, blocks[0])
        if isinstance(found, Refusal):
            return found
        stored = found
        if len(blocks) < 2 or blocks[1].init is None:
            return Refusal("the block after the dequantisation is no matmul")
        matmul = recognise_matmul(_with_weight_as_parameter(func, blocks[0]))
    if isinstance(matmul, Refusal):
        return matmul
    if not matmul.b_transposed:
        return Refusal("the right operand is [K, N], expected rows [N, K]")
    return replace(matmul, stored=stored)


def _quantisation(func: tirx.PrimFunc, block: Block) -> Quantisation | Refusal:
    refusal = Refusal(f"block {block.name} before the matmul is no dequantisation of its weight")
    store = block.store
    weight = static_shape(store.buffer)
    loads = list_loads(store.value)
    by_dtype = {str(load.source.ty.dtype): load for load in loads}
    if len(loads) != 2 or set(by_dtype) != {"uint8", "float16"} or weight is None or len(weight) != 2:
        return refusal
    packed, scales = by_dtype["uint8"], by_dtype["float16"]
    positions = position_of(func, packed.source), position_of(func, scales.source)
    shapes = static_shape(packed.source), static_shape(scales.source)
    if positions[0] is None or positions[1] is None or shapes[0] is None or shapes[1] is None:
        return refusal
    (columns, k), bits = weight, 8 * shapes[0][-1] // weight[1]
    # The weights along K with one scale, from the index of a scale.
    index, group = scales.indices[0], None
    if isinstance(index, tirx.IntImm):
        group = k
    elif isinstance(index, tirx.FloorDiv) and isinstance(index.b, tirx.IntImm):
        group = int(index.b)
    if bits not in (4, 8) or group is None or shapes != ((columns, k * bits // 8), (-(-k // group), columns)):
        return refusal
    operands = [
        te.placeholder(shape, dtype, name=dtype) for shape, dtype in zip(shapes, ("uint8", "float16"), strict=True)
    ]
    written = str(store.buffer.ty.dtype)
    made = te.create_prim_func(
        [*operands, dequantise_rows(k, bits, group, written)(*operands)],
        index_dtype_override=str(packed.indices[0].ty.dtype),
    )
    expected = plain_blocks(made)
    if isinstance(expected, Refusal) or not tvm_ffi.structural_equal(store, expected[0].store, map_free_vars=True):
        return refusal
    return Quantisation(positions[0], positions[1], bits, group)


def _with_weight_as_parameter(func: tirx.PrimFunc, dequantise: Block) -> tirx.PrimFunc:
    """Return the function without its first block; the matrix that it made is a parameter, the last one."""
    weight = dequantise.store.buffer
    root = func.body
    block = root.block
    parts = [part for part in block.body.seq if not any(one.same_as(dequantise.stmt) for one in list_statements(part))]
    body = parts[0] if len(parts) == 1 else tirx.SeqStmt(parts)
    kept = [buffer for buffer in block.alloc_buffers if not buffer.same_as(weight)]
    bare = SBlock([], [], [], block.name_hint, body, None, kept, [], block.annotations)
    realize = s_tir.SBlockRealize([], root.predicate, bare)
    return tirx.PrimFunc([*func.params, weight], realize, func.ret_type)
