"""Pass: on a CPU, the matmuls of a decode step read keys and values where they lie in the caches."""

from __future__ import annotations

import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.passes.attention.head_layout import Reading, readings_of
from relaxtune.pipeline.passes.generation.write_together import writes_caches
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import dtype_of, is_op
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import Size, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState

# Of each axis of a view: its factors, outermost first, as (size, axis of the cache along which it counts, if any).
_Digits = list[list[tuple[int, int | None]]]


def multiply_by_caches(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls of one row by views of caches as kernels that read the caches.

    ::

        matmul(q, scale * transpose(repeat(permute(cache))))   ->   matmul(q, cache)

    The transposed copies would take several times as long as the products. For many rows they pay.
    """
    if state.target.kind.name != "llvm":
        return mod
    graph = Graph(mod)
    found = {}
    for binding in graph.bindings:
        value = binding.value
        if not is_op(value, "matmul") or (sizes_of(value.args[0]) or ())[-2:-1] != (1,):
            continue
        for reading in readings_of(value.args[1], graph, scaled=True):
            digits = _digits(reading) if writes_caches(reading.base, graph) else None
            rows, columns = map(sizes_of, value.args)
            if digits is not None and rows is not None and columns is not None and rows[:-2] == columns[:-2]:
                found[binding.var] = reading, digits
                break
    return replace_found(mod, state, found, _emit, "matmuls read caches where they lie")


def _digits(reading: Reading) -> _Digits | None:
    """Return how places of a view count along the axes of its cache; None where they do not."""
    shape = sizes_of(reading.base) or ()
    axes: dict[Size, int] = {}
    stride: Size = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] != 1:
            axes[stride] = axis
        stride = stride * shape[axis]
    view = reading.view
    if view.offset != 0 or len(view.axes[-1]) != 1 or view.axes[-1][0][1] not in axes:
        return None
    digits: _Digits = []
    for factors in view.axes:
        # An axis that counts along several others has to do so by numbers.
        sizes = [size if isinstance(size, int) else 0 for size, _ in factors]
        if any(step != 0 and step not in axes for _, step in factors) or (len(factors) > 1 and 0 in sizes):
            return None
        digits.append([(size, axes.get(step)) for size, (_, step) in zip(sizes, factors, strict=True)])
    return digits


def _emit(new: Rewriter, binding: relax.VarBinding, found: tuple[Reading, _Digits]) -> tvm.ir.Expr:
    reading, digits = found
    rows = new.of(binding.value.args[0])
    if reading.scale != 1.0:
        rows = new.emit(relax.op.multiply(rows, relax.const(reading.scale, dtype_of(binding.var))))

    def compute(rows: te.Tensor, cache: te.Tensor) -> te.Tensor:
        over = te.reduce_axis((0, rows.shape[-1]), name="k")
        columns = cache.shape[digits[-1][0][1]]

        def element(*index: tirx.Var) -> tirx.Expr:
            *lead, row, column = index
            place: list[tirx.Expr] = [tirx.IntImm("int64", 0)] * len(cache.shape)
            for at, axis in zip([*lead, over.var, column], digits, strict=True):
                inner = 1
                for size, along in reversed(axis):
                    if along is not None:
                        place[along] = at if len(axis) == 1 else at // inner % size
                    inner = inner * size
            value = cache(*place).astype(rows.dtype)
            return te.sum(rows(*lead, row, over) * value, axis=over)

        return te.compute([*rows.shape[:-1], columns], element, name="matmul")

    return new.kernel(compute, rows, new.of(reading.base), name="matmul")
