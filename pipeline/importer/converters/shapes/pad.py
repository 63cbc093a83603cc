"""Pad that mirrors what it pads: TVM reads behind a tensor that is no longer than its padding."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.importer.converter_input import ConverterInput, constant_value, converts, sizes_of


@converts("Pad")
def convert_pad(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return a mirrored padding along axes whose sizes are known when the model runs; TVM has all others.

    A mirror needs one place more than the padding has. Calls keep that for axes of inputs (`models.axes.rules`); along
    other axes every place is looked up, and such a look-up stays inside.
    """
    given, listed = node.attributes.get("pads"), node.optional(3)
    pads = given if isinstance(given, list) else constant_value(node.input(1))
    axes = constant_value(listed)
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
