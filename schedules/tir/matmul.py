"""Recognise a matmul with an elementwise epilogue in a PrimFunc as FuseTIR leaves it.

::

    for b, i, j, k:                                     accumulator[b, i, j] = sum_k A[b, i, k] * B[k, j]
        acc[b, i, j] += f32(A[b, i, k]) * f32(B[k, j])
    for b, i, j:                                   ->   C[b, i, j] = value(accumulator, b, i, j)
        t[b, i, j] = acc[b, i, j] + bias[j]
    for b, i, j:
        C[b, i, j] = f16(gelu(t[b, i, j]))

The other blocks are inlined into one expression over the accumulator and the output's axes; every buffer that it still
loads from is a parameter of the function. Leading axes of A are rows: M is their product.

Blocks before the matmul may make statistics of A's rows, which the expression reads, and a block after the others may
make partial sums of C's rows (`schedules.tir.row_norm`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.sym import Analyzer

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.tir.blocks import Block, Size, plain_blocks, position_of, same_sizes, shape_of, static_shape
from relaxtune.schedules.tir.contraction import are_axes, find_factors
from relaxtune.schedules.tir.epilogue import Epilogue, MatmulFunction, same_position
from relaxtune.schedules.tir.expressions import constant_value, depends_on, substitute, tree_size
from relaxtune.schedules.tir.rotated_matmul import possible_heads
from relaxtune.schedules.tir.row_norm import RowNorm, find_partial_sums, find_row_norm

# Inlining repeats what is used twice; a compiler finds the repetitions of small trees.
_NODES_MAX = 600
# Families of 8-bit dtypes; the two operands may have different dtypes of one family.
_INTEGERS, _FLOATS = frozenset({"int8", "uint8"}), frozenset({"float8_e4m3fn", "float8_e5m2"})
_BYTES = (_INTEGERS, _FLOATS)
# Dtypes of outputs whose heads are rotated: 16 bytes of a row are 8 columns at most.
_ROTATED = ("float16", "bfloat16", "float32")


def recognise_matmul(func: tirx.PrimFunc, rows: int | None = None) -> MatmulFunction | Refusal:
    """Return the matmul that a function is, or why it is none with an elementwise epilogue.

    A function with symbolic rows is refused unless `rows` says for how many of them a kernel is to be good.
    """
    blocks = plain_blocks(func, symbolic=rows is not None)
    if isinstance(blocks, Refusal):
        return blocks
    norm, partials = find_row_norm(func, blocks), find_partial_sums(func, blocks)
    apart = [*(norm.blocks if norm else ()), *([partials.block] if partials else [])]
    blocks = [block for block in blocks if not any(block.same_as(other) for other in apart)]
    reductions = [block for block in blocks if block.init is not None]
    if len(reductions) != 1:
        return Refusal(f"expected one reduction, found {len(reductions)} among {len(blocks)} blocks")
    core = _core(func, reductions[0])
    if isinstance(core, Refusal):
        return core
    if norm is not None and norm.size != core[3][2]:
        return Refusal(f"the statistics are of rows of {norm.size}, the left operand's have {core[3][2]}")
    epilogue = _inline(func, blocks, norm)
    if isinstance(epilogue, Refusal):
        return epilogue
    output, value = epilogue
    if partials is not None and partials.source != output:
        return Refusal("the partial sums are of another parameter than the output")
    if value.head and (partials is not None or str(func.params[output].ty.dtype) not in _ROTATED):
        return Refusal(f"the epilogue rotates heads and sums up rows, or its output is none of {', '.join(_ROTATED)}")
    operand_a, operand_b, transposed, (m, n, k) = core
    symbolic = None if isinstance(m, int) else m
    return MatmulFunction(
        a=operand_a,
        b=operand_b,
        output=output,
        b_transposed=transposed,
        m=m if isinstance(m, int) else rows or 1,
        n=n,
        k=k,
        input_dtype=str(func.params[operand_a].ty.dtype),
        b_dtype=str(func.params[operand_b].ty.dtype),
        output_dtype=str(func.params[output].ty.dtype),
        epilogue=value,
        norm=norm,
        partials=partials,
        rows=symbolic,
    )


Core = tuple[int, int, bool, tuple[Size, int, int]]


def _core(func: tirx.PrimFunc, block: Block) -> Core | Refusal:
    """Return the positions of A and B, whether B is transposed, and M, N and K."""
    store, name = block.store, block.name
    sums = str(store.buffer.ty.dtype)
    if sums not in ("float32", "int32"):
        return Refusal(f"the accumulator is {sums}, expected float32 or int32")
    if block.init is None or constant_value(block.init.value) != 0:
        return Refusal(f"the sum of block {name} does not start at 0")
    reduced, spatial = block.reduced, block.spatial
    # A cast to float32 around each operand is removed; not casts of casts: the inner one may round.
    factors = (one.value if isinstance(one, tirx.Cast) else one for one in find_factors(store) or ())
    operands = [factor for factor in factors if isinstance(factor, TensorLoad)]
    if len(operands) != 2 or len(reduced) != 1 or "O" in block.kinds:
        return Refusal(f"block {name} is not a sum of products of two operands over one axis")
    if not are_axes(store.indices, spatial):
        return Refusal(f"block {name} does not write its axes in their order")
    a, b = operands
    positions = [position_of(func, load.source) for load in operands]
    if positions[0] is None or positions[1] is None:
        return Refusal("an operand is computed inside the function, expected two of its parameters")
    dtypes = {str(load.source.ty.dtype) for load in operands}
    families = [family for family in _BYTES if dtypes <= family]
    if len(dtypes) != 1 and not families:
        return Refusal(f"the operands' dtypes differ: {sorted(dtypes)}")
    if (sums == "int32") != (families[:1] == [_INTEGERS]):
        return Refusal(f"the accumulator is {sums}, the operands are {' and '.join(sorted(dtypes))}")
    if not spatial:
        return Refusal("it sums to one number")
    *rows, column = spatial
    if not are_axes(a.indices, [*rows, reduced[0]]):
        return Refusal("the left operand is not indexed as [rows..., k]")
    if are_axes(b.indices, [reduced[0], column]):
        transposed = False
    elif are_axes(b.indices, [column, reduced[0]]):
        transposed = True
    else:
        return Refusal("the right operand is neither [k, n] nor [n, k] (a batched matmul has its own template)")
    shape_a, shape_b = shape_of(a.source), static_shape(b.source)
    if shape_a is None or shape_b is None:
        return Refusal("the right operand has a symbolic shape")
    n, k = shape_b if transposed else reversed(shape_b)
    if not same_sizes(block.sizes, (*shape_a[:-1], n, k)) or k != shape_a[-1]:
        return Refusal(f"block {name} sums over a part of an operand")
    return positions[0], positions[1], transposed, (math.prod(shape_a[:-1]), n, k)


def _inline(func: tirx.PrimFunc, blocks: Sequence[Block], norm: RowNorm | None) -> tuple[int, Epilogue] | Refusal:
    """Return the position of the output, and its value with every block inlined into it."""
    (matmul,) = (block for block in blocks if block.init is not None)
    last = blocks[-1]
    dtype = str(matmul.store.buffer.ty.dtype)
    written = [position_of(func, block.store.buffer) for block in blocks]
    output = written[-1]
    if output is None or any(position is not None for position in written[:-1]):
        return Refusal("expected the last block alone to write a parameter (one output)")
    shape, product = shape_of(last.store.buffer), shape_of(matmul.store.buffer)
    width = shape[-1] if shape else None
    gated = shape is not None and isinstance(width, int) and same_sizes(product, (*shape[:-1], 2 * width))
    if shape is None or not isinstance(width, int) or not (gated or same_sizes(shape, product)):
        return Refusal(f"the output's shape {shape} is not the matmul's {product}")
    if last is matmul:
        accumulator = tirx.Var("accumulator", dtype)
        return output, Epilogue(accumulator, accumulator, matmul.spatial, shape)
    producers = {}
    for block in blocks:
        if block.same_as(matmul):
            continue
        if not all(isinstance(index, tirx.Var) for index in block.store.indices):
            return Refusal(f"block {block.name} writes a rearranged output")
        if not block.is_spatial:
            return Refusal(f"block {block.name} is not elementwise")
        # A scalar's block has an axis of one element.
        if not same_sizes(block.sizes, shape_of(block.store.buffer) or (1,)):
            return Refusal(f"block {block.name} writes a part of its output")
        producers[block.store.buffer] = block.store
    axes = tuple(last.store.indices)
    accumulator, second = tirx.Var("accumulator", dtype), tirx.Var("second", dtype)
    given = [*func.params] if norm is None else [*func.params, norm.buffer]

    def inlined(form: Epilogue) -> Epilogue | Refusal:
        value = _inlined_value(given, matmul.store.buffer, producers, form)
        return value if isinstance(value, Refusal) else replace(form, value=value)

    found = inlined(Epilogue(accumulator, accumulator, axes, shape, second if gated else None))
    # An epilogue that reads other columns than it writes may rotate heads.
    heads = iter(possible_heads(width) if isinstance(found, Refusal) and not gated else ())
    while isinstance(found, Refusal) and (head := next(heads, 0)):
        rotated = inlined(Epilogue(accumulator, accumulator, axes, shape, second, head))
        found = found if isinstance(rotated, Refusal) else rotated
    if isinstance(found, Refusal):
        return found
    if found.second is not None and not (depends_on(found.value, [accumulator]) and depends_on(found.value, [second])):
        return Refusal("the epilogue reads half of the matmul's columns")
    if found.head and not all(_is_of_heads(found, load, norm) for load in found.loads()):
        return Refusal("the epilogue rotates heads and reads more than tables of their columns")
    size = tree_size(found.value)
    if size > _NODES_MAX:
        return Refusal(f"the epilogue has {size} operations when inlined, more than {_NODES_MAX}")
    return output, found


def _is_of_heads(epilogue: Epilogue, load: TensorLoad, norm: RowNorm | None) -> bool:
    """Whether a load is of a table of a head's columns, or of the rows' statistics."""
    if norm is not None and load.source.same_as(norm.buffer):
        return True
    *others, last = load.indices
    place = tirx.floormod(epilogue.axes[-1], epilogue.head)
    alone = not any(depends_on(index, [epilogue.axes[-1]]) for index in others)
    return alone and Analyzer().can_prove_equal(last, place)


def _inlined_value(
    given: Sequence[tirx.Var], matmul: tirx.Var, producers: Mapping[tirx.Var, tirx.BufferStore], form: Epilogue
) -> tirx.Expr | Refusal:
    """Return the last producer's value over a form's accumulators and buffers that are given."""
    refused: list[Refusal] = []

    def inlined(load: TensorLoad) -> tirx.Expr:
        if load.source.same_as(matmul):
            return accumulator_of(load)
        store = producers.get(load.source)
        if store is None:
            if not any(load.source.same_as(buffer) for buffer in given):
                refused.append(Refusal(f"the epilogue reads {load.source.name}, which nothing computes before it"))
            return load
        inner = dict(zip(store.indices, load.indices, strict=True))
        return tvm_ffi.structural_map(substitute(store.value, inner), (TensorLoad, inlined))

    def accumulator_of(load: TensorLoad) -> tirx.Var:
        if form.second is None:
            if same_position(load.indices, form.axes, form.shape):
                return form.accumulator
        elif same_position(load.indices[:-1], form.axes[:-1], form.shape[:-1]):
            columns = form.product_columns(form.axes[-1])
            for column, accumulator in zip(columns, (form.accumulator, form.second), strict=True):
                if Analyzer().can_prove_equal(load.indices[-1], column):
                    return accumulator
        refused.append(Refusal("the epilogue reads the matmul's result at another position than it writes"))
        return form.accumulator

    *_, last = producers.values()
    value = tvm_ffi.structural_map(last.value, (TensorLoad, inlined))
    return refused[-1] if refused else value
