"""The function of a module without padding that lists the tokens of a mask, on the device."""

from __future__ import annotations

import tvm
from tvm import relax, te, tirx

from relaxtune.models.unpadding import ENTRY, ROWS, SLOTS, SPANS
from relaxtune.pipeline.codegen.cuda_graph import NUM_INPUT
from relaxtune.pipeline.passes.kit.ir import dtype_of, main_of, shape_of
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.schedules.templates.token_list import token_list_kernel


def with_token_list(mod: tvm.ir.IRModule, lowered: LoweredModule) -> tvm.ir.IRModule:
    """Return the module with a function that lists the tokens of a mask, where `main` leaves padding out.

    ::

        list_tokens(mask, rows [rows * places], spans [rows * places, 2], slots [rows, places], count [1])

    It writes all but the mask. The first `count` of `rows` and `spans`, rounded up, and `slots` are the last inputs of
    `main` (`Unpadding.lists`).
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
    func = _lists(shape, dtype_of(given), unpadding.kept)
    if lowered.target.kind.name == "cuda":
        func = token_list_kernel(func, unpadding.kept)
    function = builder.add_func(func, f"{ENTRY}_kernel")
    places = shape[0] * shape[1]
    types = [relax.TensorType(one, "int32") for one in ([places], [places, 2], shape, [1])]
    mask = relax.Var(unpadding.mask, relax.TensorType(shape, dtype_of(given)))
    written = [relax.Var(name, kind) for name, kind in zip((ROWS, SPANS, SLOTS, "count"), types, strict=True)]
    params = [mask, *written]
    with builder.function(ENTRY, params, attrs={NUM_INPUT: len(params)}):
        with builder.dataflow():
            lists = builder.emit_output(relax.op.call_tir_inplace(function, relax.Tuple(params), [1, 2, 3, 4], types))
        builder.emit_func_output(lists)
    return builder.get()


def _lists(shape: list[tirx.Expr], dtype: str, kept: tuple[int, ...]) -> tirx.PrimFunc:
    rows, width = (size.astype("int32") for size in shape)
    zero, one = (tirx.IntImm("int32", number) for number in (0, 1))
    mask = te.placeholder(shape, dtype, name="mask")

    def number(condition: tirx.Expr) -> tirx.Expr:
        return tirx.Select(condition, one, zero)

    def is_seen(b: tirx.Var, s: tirx.Var) -> tirx.Expr:
        return mask[b, s] if dtype == "bool" else mask[b, s] != tirx.const(0, dtype)

    def is_kept(b: tirx.Var, s: tirx.Var) -> tirx.Expr:
        wanted = [s.astype("int32") == (place if place >= 0 else width + place) for place in kept]
        return tirx.all(tirx.Not(is_seen(b, s)), tirx.any(*wanted)) if wanted else tirx.const(False, "bool")

    seen = te.compute(shape, lambda b, s: number(is_seen(b, s)), name="seen")
    keep = te.compute(shape, lambda b, s: number(is_kept(b, s)), name="keep")

    def axis(size: tirx.Expr) -> tirx.IterVar:
        return te.reduce_axis((0, size), name="k")

    def sums_before(of: te.Tensor) -> te.Tensor:
        """Return the sums of what stands before each element, along the last axis."""
        last = axis(of.shape[-1])

        def element(*at: tirx.Var) -> tirx.Expr:
            return te.sum(tirx.Select(last.var < at[-1], of(*at[:-1], last.var), zero), axis=last)

        return te.compute(of.shape, element, name="before")

    def sum_of(of: te.Tensor) -> te.Tensor:
        last = axis(of.shape[-1])
        return te.compute(of.shape[:-1], lambda *at: te.sum(of(*at, last.var), axis=last), name="total")

    shown = sum_of(seen)
    kept_count = sum_of(keep)
    counts = te.compute(shape[:1], lambda b: shown[b] + kept_count[b], name="counts")
    seen_before, keep_before, starts = sums_before(seen), sums_before(keep), sums_before(counts)
    every = axis(shape[0])
    count = te.compute([tirx.IntImm("int64", 1)], lambda _: te.sum(counts[every.var], axis=every), name="count")

    def slot(b: tirx.Var, s: tirx.Var) -> tirx.Expr:
        behind = starts[b] + shown[b] + keep_before[b, s]
        first = tirx.max(tirx.min(starts[b], count[0] - 1), zero)
        hidden = tirx.Select(keep[b, s] == one, behind, first)
        return tirx.Select(seen[b, s] == one, starts[b] + seen_before[b, s], hidden)

    slots = te.compute(shape, slot, name="token_slots")
    flat = [shape[0] * shape[1]]
    batches, inner = axis(shape[0]), axis(shape[1])

    def ended(t: tirx.Var) -> tirx.Expr:
        return te.sum(number(starts[batches.var] + counts[batches.var] <= t.astype("int32")), axis=batches)

    before = te.compute(flat, ended, name="rows_before")
    row = te.compute(flat, lambda t: tirx.min(before[t], rows - 1), name="row")

    def passed(t: tirx.Var) -> tirx.Expr:
        """Count the places of a token's row that lie before it."""
        b, s = row[t], inner.var
        place = t.astype("int32") - starts[b]
        of_seen = seen_before[b, s] + seen[b, s] <= place
        of_kept = keep_before[b, s] + keep[b, s] <= place - shown[b]
        return te.sum(number(tirx.Select(place < shown[b], of_seen, of_kept)), axis=inner)

    place = te.compute(flat, passed, name="places_before")
    token_rows = te.compute(flat, lambda t: row[t] * width + tirx.min(place[t], width - 1), name="token_rows")

    def bound(t: tirx.Var, which: tirx.Var) -> tirx.Expr:
        first = starts[row[t]]
        return tirx.Select(which == 0, first, first + tirx.max(shown[row[t]], one))

    spans = te.compute([*flat, tirx.IntImm("int64", 2)], bound, name="token_spans")
    outputs = [token_rows, spans, slots, count]
    return te.create_prim_func([mask, *outputs]).with_attr("tirx.noalias", True)
