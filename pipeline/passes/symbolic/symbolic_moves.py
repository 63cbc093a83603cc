"""Reshapes, concatenations and slices at symbolic places as kernels that fuse with their neighbours.

TVM takes the flat position of every element of a reshape apart by symbolic sizes. The result counts as opaque, as
a concatenation or a slice at a symbolic place does: a slice, a reshape and a transpose of heads are three kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import relax, te, tirx, topi

from relaxtune.pipeline.passes.kit.ir import shape_of, static_shape
from relaxtune.pipeline.passes.kit.rewrite import INJECTIVE
from relaxtune.pipeline.passes.kit.sizes import fits, group_axes, size_of, sizes_of


def legalise_reshape(builder: relax.BlockBuilder, call: relax.Call) -> tvm.ir.Expr:
    """Return a reshape, in which axes that stay keep their own index, as the call of a TIR function.

    One of static shapes, or of unknown ones, is lowered as TVM does.
    """
    data = call.args[0]
    before, after = sizes_of(data), sizes_of(call)
    groups = None if before is None or after is None else group_axes(before, after)
    if groups is None or (static_shape(data) is not None and static_shape(call) is not None):
        return tvm.ir.Op.get("relax.reshape").get_attr("FLegalize")(builder, call)

    def regroup(x: te.Tensor, *shape: tirx.Expr) -> te.Tensor:
        def element(*index: tirx.Var) -> tirx.Expr:
            places: list[tirx.Expr] = [tirx.IntImm("int64", 0)] * len(x.shape)
            for inputs, outputs in groups:
                flat = _flat([index[axis] for axis in outputs], [shape[axis] for axis in outputs])
                for count, axis in enumerate(inputs):
                    place = flat // math.prod(x.shape[other] for other in inputs[count + 1 :])
                    places[axis] = place % x.shape[axis] if count else place
            return x(*places)

        return te.compute(shape, element, name="T_reshape", tag=topi.tag.INJECTIVE)

    return builder.call_te(regroup, data, *call.args[1].values, primfunc_name_hint="reshape")


def legalise_concatenation(builder: relax.BlockBuilder, call: relax.Call) -> tvm.ir.Expr:
    """Return a concatenation as the call of a TIR function; one of static shape as TVM lowers it."""
    parts = call.args[0]
    if static_shape(call) is not None or not isinstance(parts, relax.Tuple) or call.attrs.axis is None:
        return tvm.ir.Op.get("relax.concat").get_attr("FLegalize")(builder, call)
    attrs = {"op_pattern": INJECTIVE}
    axis = int(call.attrs.axis)
    return builder.call_te(
        topi.concatenate, list(parts.fields), axis, primfunc_name_hint="concatenate", primfunc_attrs=attrs
    )


def legalise_slice(builder: relax.BlockBuilder, call: relax.Call) -> tvm.ir.Expr:
    """Return a slice from a symbolic place on, known to be inside, as the call of a TIR function; others as TVM."""
    data, axes, starts, _, *strides = call.args
    shape, places = shape_of(call), [size_of(start) for start in starts.fields]
    steps = {int(step) for one in strides for step in one.fields}
    inside = bool(call.attrs.assume_inbound) and all(place is not None and fits(0, place) for place in places)
    if shape is None or not inside or steps - {1} or all(isinstance(place, int) for place in places):
        return tvm.ir.Op.get("relax.strided_slice").get_attr("FLegalize")(builder, call)
    moved = [int(axis) % len(shape) for axis in axes.fields]

    def cut(x: te.Tensor, *sizes: tirx.Expr) -> te.Tensor:
        first = dict(zip(moved, sizes[len(shape) :], strict=True))

        def element(*index: tirx.Var) -> tirx.Expr:
            return x(*(at + first.get(axis, 0) for axis, at in enumerate(index)))

        return te.compute(sizes[: len(shape)], element, name="strided_slice", tag=topi.tag.INJECTIVE)

    attrs, given = {"op_pattern": INJECTIVE}, [*shape, *starts.fields]
    return builder.call_te(cut, data, *given, primfunc_name_hint="strided_slice", primfunc_attrs=attrs)


def _flat(index: Sequence[tirx.Expr], sizes: Sequence[tirx.Expr]) -> tirx.Expr:
    """Return the row-major position of an element."""
    position: tirx.Expr = index[0]
    for place, size in zip(index[1:], sizes[1:], strict=True):
        position = position * size + place
    return position
