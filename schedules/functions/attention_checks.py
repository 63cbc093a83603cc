"""Whether an attention's tensors lie where a kernel can take them: within the parameters, and in whole vectors."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import AttentionError, AttentionSpec, HeadLayout, Param, shapes_of
from relaxtune.schedules.sizes import Size, are_equal, is_multiple, is_positive


def refuse_layouts(spec: AttentionSpec, func: tirx.PrimFunc, dtypes: Collection[str], vector: int) -> Refusal | None:
    """Return why a kernel that copies vectors of some elements does not take an attention's tensors.

    All must be of one of `dtypes`. Their strides along axes of several elements, and their starts, are multiples of
    `vector` elements.
    """
    layouts = spec.layouts()
    found = {role: str(func.params[layout.param].ty.dtype) for role, layout in layouts.items()}
    if len(set(found.values())) > 1 or found["query"] not in dtypes:
        return Refusal(f"the dtypes are {found}, expected {' or '.join(dtypes)} for all")
    for role, layout in layouts.items():
        axes = (
            ("batch", spec.batch, layout.batch_stride),
            ("head", spec.heads_of(role), layout.head_stride),
            ("position", spec.positions(role), layout.position_stride),
        )
        for axis, extent, stride in axes:
            if not are_equal(extent, 1) and (are_equal(stride, 0) or not is_multiple(stride, vector)):
                return Refusal(f"the {role}'s {axis} stride is {stride}, expected a positive multiple of {vector}")
        if not is_multiple(layout.offset, vector):
            return Refusal(f"the {role} starts at element {layout.offset}, expected a multiple of {vector}")
    return None


def check_spec(spec: AttentionSpec, params: Sequence[Param]) -> None:
    """Check that an attention's tensors lie within the parameters.

    Raises `AttentionError`: they do not; the message says which and what was expected.
    """
    names = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim")
    sizes = {name: getattr(spec, name) for name in names}
    if not all(map(is_positive, sizes.values())) or spec.heads % spec.kv_heads:
        raise AttentionError(f"sizes {sizes}: expected positive ones, and heads a multiple of kv_heads.")
    if spec.window < 0:
        raise AttentionError(f"window is {spec.window}, expected 0 (none) or a positive number of keys.")
    first = len(params) - spec.outputs
    if spec.output.param != first:
        which = "the last" if spec.growth is None else "the third from the last"
        raise AttentionError(f"the output is parameter {spec.output.param}, expected {which}, {first}.")
    if spec.growth is not None:
        past = spec.growth.past
        if not is_positive(past) or not is_positive(spec.keys - past):
            raise AttentionError(f"the caches have {past} positions, expected 1 to {spec.keys - 1}.")
        # K and V are the last parameters, and all of them.
        for role, layout, param in (("key", spec.key, first + 1), ("value", spec.value, first + 2)):
            if layout.param != param:
                raise AttentionError(f"the {role} that is written is parameter {layout.param}, expected {param}.")
            sizes_written = (spec.batch, spec.kv_heads, spec.keys, spec.width(role))
            _check_written(role, layout, sizes_written, shapes_of(params)[param])
    for role, layout in spec.layouts().items():
        steps = [layout.batch_stride, layout.head_stride, layout.position_stride, 1]
        extents = (spec.batch, spec.heads_of(role), spec.positions(role), spec.width(role))
        _check_inside(role, layout.param, layout.offset, steps, extents, params)
    if spec.spans is not None:
        _check_inside("spans", spec.spans, 0, [0, 0, 2, 1], (1, 1, spec.queries, 2), params)
        if spec.causal or spec.window or spec.growth is not None or not are_equal(spec.batch, 1):
            raise AttentionError("spans go with one batch element, all keys of a span, and no caches that grow.")
    if spec.bias is not None:
        bias = spec.bias
        along = [bias.query_stride, bias.key_stride]
        if bias.limit and not all(isinstance(stride, int) for stride in along):
            raise AttentionError(f"the bias has a limit, and strides {along} of queries and keys: expected numbers.")
        begin, steps = (bias.limit, [0, 0]) if bias.limit else (bias.offset, along)
        sizes_read = (bias.period or spec.batch, spec.heads, spec.queries, spec.keys)
        _check_inside("bias", bias.param, begin, [bias.batch_stride, bias.head_stride, *steps], sizes_read, params)
        if bias.kind not in ("add", "keep"):
            raise AttentionError(f"the bias is of kind {bias.kind!r}, expected 'add' or 'keep'.")
    shape = shapes_of(params)[first]
    _check_written("output", spec.output, (spec.batch, spec.heads, spec.queries, spec.value_dim), shape)


def _check_inside(
    role: str, param: int, offset: Size, steps: Sequence[Size], extents: Sequence[Size], params: Sequence[Param]
) -> None:
    if not 0 <= param < len(params):
        raise AttentionError(f"the {role} is parameter {param}, expected one of the {len(params)} there are.")
    last = offset + sum(step * (extent - 1) for step, extent in zip(steps, extents, strict=True))
    shape = shapes_of(params)[param]
    negative = any(isinstance(number, int) and number < 0 for number in (offset, *steps))
    if negative or not is_positive(math.prod(shape) - last):
        raise AttentionError(
            f"the {role} spans elements {offset} to {last} (strides {list(steps)} of {list(extents)}), "
            f"parameter {param} of shape {list(shape)} has {math.prod(shape)}."
        )


def _check_written(role: str, layout: HeadLayout, sizes: tuple[Size, int, Size, int], shape: Sequence[Size]) -> None:
    """Check that a tensor of some batch, heads, positions and width is all of the parameter it is written to."""
    batch, heads, positions, width = sizes
    axes = [(layout.batch_stride, batch), (layout.head_stride, heads), (layout.position_stride, positions), (1, width)]
    filled: Size = 1
    left = [axis for axis in axes if not are_equal(axis[1], 1)]
    while following := [axis for axis in left if are_equal(axis[0], filled)]:
        left.remove(following[0])
        filled = filled * following[0][1]
    if not are_equal(layout.offset, 0) or left or not are_equal(filled, math.prod(shape)):
        raise AttentionError(
            f"the {role} {layout} leaves elements of {list(shape)} out or writes them twice; expected offset 0 and "
            "the strides of a permutation of batch, heads and positions."
        )
