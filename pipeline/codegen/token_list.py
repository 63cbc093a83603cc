"""The function of a module without padding that lists the tokens of a mask, on the device."""

from __future__ import annotations

import tvm
from tvm import relax, te, tirx

from relaxtune.models.unpadding import ENTRY
from relaxtune.pipeline.codegen.cuda_graph import NUM_INPUT
from relaxtune.pipeline.passes.kit.ir import dtype_of, main_of, shape_of
from relaxtune.pipeline.passes.module import LoweredModule


def with_token_list(mod: tvm.ir.IRModule, lowered: LoweredModule) -> tvm.ir.IRModule:
    """Return the module with a function that lists the tokens of a mask, where `main` leaves padding out.

    ::

        list_tokens(mask) -> (rows [rows * places], slots [rows, places], count [1])

    The first `count` of `rows`, rounded up, and `slots` are the last inputs of `main` (`Unpadding.lists`).
    """
    unpadding = lowered.unpadding
    if unpadding is None:
        return mod
    (given,) = (param for param in main_of(lowered.mod).params if param.name == unpadding.mask)
    builder = relax.BlockBuilder(mod)
    sizes: dict[str, tirx.Var] = {}
    shape = [
        sizes.setdefault(size.name, tirx.Var(size.name, "int64")) if isinstance(size, tirx.Var) else size
        for size in shape_of(given) or ()
    ]
    mask = relax.Var(unpadding.mask, relax.TensorType(shape, dtype_of(given)))
    function = builder.add_func(_lists(shape, dtype_of(given), unpadding.kept), f"{ENTRY}_kernels")
    types = [relax.TensorType(one, "int32") for one in ([shape[0] * shape[1]], shape, [1])]
    with builder.function(ENTRY, [mask], attrs={NUM_INPUT: 1}):
        with builder.dataflow():
            lists = builder.emit_output(relax.call_tir(function, [mask], types))
        builder.emit_func_output(lists)
    return builder.get()


def _lists(shape: list[tirx.Expr], dtype: str, kept: tuple[int, ...]) -> tirx.PrimFunc:
    rows, width = (size.astype("int32") for size in shape)
    zero, one = (tirx.IntImm("int32", number) for number in (0, 1))
    mask = te.placeholder(shape, dtype, name="mask")

    def is_kept(b: tirx.Var, s: tirx.Var) -> tirx.Expr:
        seen = mask[b, s] != tirx.const(0, dtype) if dtype != "bool" else mask[b, s]
        for place in kept:
            seen = tirx.any(seen, s.astype("int32") == (place if place >= 0 else width + place))
        return tirx.Select(seen, one, zero)

    keep = te.compute(shape, is_kept, name="keep")

    def axis(size: tirx.Expr, name: str) -> tirx.IterVar:
        return te.reduce_axis((0, size), name=name)

    def total_before(name: str, of: te.Tensor) -> te.Tensor:
        """Return the sums of what stands before each element, along the last axis."""
        last = axis(of.shape[-1], "k")

        def element(*at: tirx.Var) -> tirx.Expr:
            return te.sum(tirx.Select(last.var < at[-1], of(*at[:-1], last.var), zero), axis=last)

        return te.compute(of.shape, element, name=name)

    places, batches, all_rows = axis(shape[1], "s"), axis(shape[0], "b"), axis(shape[0], "b")
    before = total_before("before", keep)
    counts = te.compute([shape[0]], lambda b: te.sum(keep[b, places], axis=places), name="counts")
    starts = total_before("starts", counts)
    count = te.compute([tirx.IntImm("int64", 1)], lambda _: te.sum(counts[all_rows], axis=all_rows), name="count")

    def slot(b: tirx.Var, s: tirx.Var) -> tirx.Expr:
        first = tirx.max(tirx.min(starts[b], count[0] - 1), zero)
        return tirx.Select(keep[b, s] == one, starts[b] + before[b, s], first)

    slots = te.compute(shape, slot, name="slots")
    flat = [shape[0] * shape[1]]

    def row_of(t: tirx.Var) -> tirx.Expr:
        ends = starts[batches] + counts[batches]
        return te.sum(tirx.Select(ends <= t.astype("int32"), one, zero), axis=batches)

    row = te.compute(flat, row_of, name="row")
    inner = axis(shape[1], "s")

    def place_of(t: tirx.Var) -> tirx.Expr:
        b = tirx.min(row[t], rows - 1)
        until = before[b, inner] + keep[b, inner]
        return te.sum(tirx.Select(until <= t.astype("int32") - starts[b], one, zero), axis=inner)

    place = te.compute(flat, place_of, name="place")
    lists = te.compute(
        flat, lambda t: tirx.min(row[t], rows - 1) * width + tirx.min(place[t], width - 1), name="token_rows"
    )
    return te.create_prim_func([mask, lists, slots, count]).with_attr("tirx.noalias", True)
