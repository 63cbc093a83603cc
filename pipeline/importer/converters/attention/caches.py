"""TensorScatter (opset 24): new keys or values written into a cache of fixed length, at each row's own place."""

from __future__ import annotations

import tvm
from tvm import te, tirx

from relaxtune.pipeline.importer.converter_input import ConverterInput, converts, sizes_of


@converts("TensorScatter")
def convert_tensor_scatter(node: ConverterInput) -> tvm.ir.Expr:
    """Return the cache with the update in it. Inputs: cache, update, first place of each row (B) (optional; 0).

    Both are (B, ...) and differ in `axis` only. Mode circular wraps around the end of the cache, linear does not.
    """
    mode = node.attributes.get("mode", "linear")
    if mode not in ("linear", "circular"):
        raise ValueError(f"attribute 'mode': expected 'linear' or 'circular', got {mode!r}")
    cache, update, starts = node.input(0), node.input(1), node.optional(2)
    rank = int(cache.ty.ndim)
    axis = node.integer("axis", -2) % rank
    length, count = (tirx.Cast("int64", sizes_of(tensor)[axis]) for tensor in (cache, update))

    def compute(old: te.Tensor, new: te.Tensor, *first: te.Tensor) -> te.Tensor:
        def at(*places: tirx.Var) -> tvm.ir.Expr:
            start = first[0](places[0]).astype("int64") if first else tirx.const(0, "int64")
            offset = tirx.Cast("int64", places[axis]) - start
            if mode == "circular":
                offset = tirx.floormod(offset, length)
            written = tirx.all(offset >= 0, offset < count)
            source = [*places[:axis], offset, *places[axis + 1 :]]
            return tirx.if_then_else(written, new(*source), old(*places))

        return te.compute(old.shape, at, name="tensor_scatter")

    given = [] if starts is None else [starts]
    return node.builder.emit_te(compute, cache, update, *given, primfunc_name_hint="tensor_scatter")
