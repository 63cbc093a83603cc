"""Pad by sizes, and Pad that mirrors: TVM reads behind a tensor that is no longer than its padding."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.importer.converter_input import (
    ConverterInput,
    constant,
    constant_value,
    converts,
    dtype_of,
    sizes_of,
)
from relaxtune.pipeline.importer.shape_values import size_list
from relaxtune.schedules.sizes import Size, simplify


@converts("Pad")
def convert_pad(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return a padding by symbolic sizes, or one mirrored along axes whose sizes are known when the model runs.

    TVM has all others.

    A mirror needs one place more than the padding has. Calls keep that for axes of inputs (`models.axes.rules`); along
    other axes every place is looked up, and such a look-up stays inside.
    """
    given, listed = node.attributes.get("pads"), node.optional(3)
    pads = given if isinstance(given, list) else constant_value(node.input(1))
    axes = constant_value(listed)
    sizes = None if isinstance(given, list) or pads is not None else size_list(node.input(1))
    if sizes is not None:
        return _pad_by_sizes(node, sizes, None if axes is None else [int(axis) for axis in axes])
    if node.attributes.get("mode") != "reflect" or pads is None or (listed is not None and axes is None):
        return None
    data, rank = node.input(0), int(node.input(0).ty.ndim)
    numbers = list(range(rank)) if axes is None else [int(axis) % rank for axis in axes]
    befores, afters = ([int(pad) for pad in half] for half in (pads[: len(numbers)], pads[len(numbers) :]))
    result, computed = data, False
    for axis, before, after in zip(numbers, befores, afters, strict=True):
        size = sizes_of(data)[axis]
        if isinstance(size, tirx.IntImm) and max(before, after) >= int(size):
            raise ValueError(
                f"pads of axis {axis}: expected fewer than its {int(size)} places, got {before} and {after}"
            )
        computed |= not node.sizes.is_of_inputs(size)
        if before or after:
            places = relax.op.abs(relax.op.arange(-before, size + after, 1, "int64"))
            end = relax.op.arange(2 * size - 2, 2 * size - 1, 1, "int64")
            mirrored = relax.op.minimum(places, relax.op.subtract(end, places))
            result = relax.op.take(result, mirrored, axis, mode="clip")
    return result if computed else None


def _pad_by_sizes(node: ConverterInput, pads: list[Size], axes: list[int] | None) -> tvm.ir.Expr:
    """Return a tensor with as much of one value around it as sizes say; a negative padding cuts."""
    mode = node.attributes.get("mode", "constant")
    if mode != "constant":
        raise ValueError(f"attribute 'mode': expected 'constant' for pads that sizes decide, got {mode!r}")
    data, value = node.input(0), node.optional(2)
    rank = int(data.ty.ndim)
    numbers = [axis % rank for axis in axes] if axes is not None else list(range(rank))
    before = dict(zip(numbers, pads[: len(numbers)], strict=True))
    after = dict(zip(numbers, pads[len(numbers) :], strict=True))
    shape = [simplify(size + before.get(axis, 0) + after.get(axis, 0)) for axis, size in enumerate(sizes_of(data))]
    fill = constant(np.zeros((), dtype_of(data))) if value is None else value
    if fill.ty.ndim:
        fill = node.builder.emit(relax.op.reshape(fill, []))

    def padded(x: te.Tensor, filled: te.Tensor) -> te.Tensor:
        def element(*index: tirx.Var) -> tirx.Expr:
            places = [place - before.get(axis, 0) for axis, place in enumerate(index)]
            inside = [
                condition
                for axis in numbers
                if not (before[axis] == 0 and after[axis] == 0)
                for condition in (places[axis] >= 0, places[axis] < x.shape[axis])
            ]
            return tirx.if_then_else(tirx.all(*inside), x(*places), filled())

        return te.compute(shape, element, name="pad")

    return node.builder.emit_te(padded, data, fill, primfunc_name_hint="pad")
