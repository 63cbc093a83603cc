"""Shape buckets: sizes that a model is compiled for, which of them a call goes to, and how its arrays are padded.

A *bucket* gives numbers to some symbolic axes. A call whose sizes are a bucket's goes there as it is. A smaller one may
be padded up to it, on one side of each axis, and its outputs cut back; whether that leaves the results alone depends on
the graph, and is for the caller to have tried (`pipeline.validate.padding_trials`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from relaxtune.models.dims import Dim, evaluate_dim
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.spec import TensorSpec


class Side(StrEnum):
    """Where padding goes along an axis."""

    RIGHT = "right"
    LEFT = "left"


@dataclass(frozen=True)
class Bucket:
    """Sizes of symbolic axes, by name."""

    sizes: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """Such as `batch=1,sequence=128`."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes)

    @property
    def elements(self) -> int:
        """The product of its sizes: rows or tokens, which work grows with."""
        return math.prod(size for _, size in self.sizes)


def parse_bucket(text: str) -> tuple[str, tuple[int, ...]]:
    """Return (axis, sizes) of one option such as `sequence=128,256,512`.

    Raises `ModelShapeError`: the text has another form.
    """
    axis, equals, listed = text.partition("=")
    sizes = [part.strip() for part in listed.split(",")]
    if not equals or not axis.strip().isidentifier() or not all(size.isdecimal() and int(size) for size in sizes):
        msg = f"bucket {text!r} cannot be read: expected AXIS=SIZE,SIZE,... such as sequence=128,256,512"
        raise ModelShapeError(msg)
    return axis.strip(), tuple(sorted({int(size) for size in sizes}))


def make_buckets(sizes: Mapping[str, Sequence[int]], specs: Sequence[TensorSpec]) -> tuple[Bucket, ...]:
    """Return one bucket for each combination of the sizes of all axes, the smallest first.

    Raises `ModelShapeError`: an axis is not a symbolic one of the inputs.
    """
    check_axes(sizes, specs, "a bucket")
    combined = itertools.product(*([(axis, size) for size in sizes[axis]] for axis in sizes))
    return tuple(sorted((Bucket(one) for one in combined if one), key=lambda bucket: bucket.elements))


def check_axes(axes: Iterable[str], specs: Sequence[TensorSpec], where: str) -> None:
    """Check that axes are symbolic ones of the inputs; `where` is what messages call their place.

    Raises `ModelShapeError`: one is not.
    """
    symbols = list_symbols(specs)
    unknown = [axis for axis in axes if axis not in symbols]
    if unknown:
        raise ModelShapeError(
            f"axis {unknown[0]!r} of {where} is no symbolic axis of the inputs: expected one of "
            f"{', '.join(symbols) or '(they have none)'}, the inputs are {'; '.join(str(spec) for spec in specs)}"
        )


def list_symbols(specs: Sequence[TensorSpec]) -> list[str]:
    """Return the names of the symbolic axes of some tensors, each once; expressions over them are left out."""
    axes = (axis for spec in specs for axis in spec.shape)
    return list(dict.fromkeys(axis for axis in axes if isinstance(axis, str) and axis.isidentifier()))


def batch_axis(specs: Sequence[TensorSpec]) -> str | None:
    """Return the symbolic axis that most tensors have first, None where none has any."""
    first = [spec.shape[0] for spec in specs if spec.shape]
    symbols = [axis for axis in first if isinstance(axis, str) and axis.isidentifier()]
    return max(symbols, key=symbols.count, default=None)


def bucket_shapes(specs: Sequence[TensorSpec], bucket: Bucket) -> dict[str, tuple[Dim, ...]]:
    """Return the shape of each input in a bucket; axes that it does not name stay symbolic."""
    sizes = dict(bucket.sizes)
    return {spec.name: tuple(evaluate_dim(axis, sizes) for axis in spec.shape) for spec in specs}


def read_sizes(shapes: Mapping[str, Sequence[int]], specs: Sequence[TensorSpec]) -> dict[str, int]:
    """Return the size of every symbolic axis in a call, from the shapes of its inputs."""
    found: dict[str, int] = {}
    for spec in specs:
        for axis, size in zip(spec.shape, shapes[spec.name], strict=True):
            if isinstance(axis, str) and axis.isidentifier():
                found.setdefault(axis, int(size))
    return found


def choose_bucket(
    buckets: Sequence[Bucket], sizes: Mapping[str, int], paddable: Mapping[str, Side]
) -> tuple[int, bool] | None:
    """Return the place of the bucket with the least work that a call fits, and whether it has to be padded.

    `buckets`: the smallest first, as `make_buckets` gives them.
    `sizes`: of the call, by axis.
    `paddable`: the axes along which padding is allowed.
    """
    for place, bucket in enumerate(buckets):
        gaps = {axis: size - sizes[axis] for axis, size in bucket.sizes}
        if all(gap == 0 or (gap > 0 and axis in paddable) for axis, gap in gaps.items()):
            return place, any(gaps.values())
    return None


def hides_a_row(inputs: Mapping[str, np.ndarray], masks: Sequence[str], fills: Mapping[str, float]) -> bool:
    """Return whether a row of a mask hides all its places."""
    return any(inputs[name].ndim > 0 and bool((inputs[name] <= fills[name]).all(-1).any()) for name in masks)


def pad_inputs(
    inputs: Mapping[str, np.ndarray],
    specs: Sequence[TensorSpec],
    sizes: Mapping[str, int],
    sides: Mapping[str, Side],
    fills: Mapping[str, float],
) -> dict[str, np.ndarray]:
    """Return the inputs padded to `sizes`, the symbolic axes' by name.

    A first axis is padded by repeating its last row, so that every row is one that the model could be given; any other
    with the input's fill value, on the axis's side.
    """
    padded = {}
    for spec in specs:
        array = inputs[spec.name]
        for place, axis in enumerate(spec.shape):
            want = evaluate_dim(axis, sizes)
            gap = want - array.shape[place] if isinstance(want, int) else 0
            if gap <= 0:
                continue
            widths = [(0, 0)] * array.ndim
            widths[place] = (gap, 0) if side_of(axis, sides) is Side.LEFT else (0, gap)
            if place == 0:
                array = np.pad(array, widths, mode="edge")
            else:
                array = np.pad(array, widths, constant_values=np.asarray(fills[spec.name]).astype(array.dtype))
        padded[spec.name] = array
    return padded


def cut_outputs(
    outputs: Mapping[str, np.ndarray], specs: Sequence[TensorSpec], sizes: Mapping[str, int], sides: Mapping[str, Side]
) -> dict[str, np.ndarray]:
    """Return the outputs of a padded call without what padding added; `specs` are those with symbolic axes."""
    cut = {}
    for spec in specs:
        array = outputs[spec.name]
        for place, axis in enumerate(spec.shape):
            want = evaluate_dim(axis, sizes)
            extra = array.shape[place] - want if isinstance(want, int) else 0
            if extra > 0:
                kept = slice(extra, None) if side_of(axis, sides) is Side.LEFT else slice(0, want)
                array = array[(slice(None),) * place + (kept,)]
        cut[spec.name] = np.asarray(array, order="C")
    return cut


def list_sides(axis: str, specs: Sequence[TensorSpec]) -> tuple[Side, ...]:
    """Return the sides on which an axis can be padded, the usual one first.

    Where an input has the axis plus something (`past_sequence + 1`: the mask over a cache and a new token), what is
    added comes last, so padding can only go before.
    """
    axes = {item for spec in specs for item in spec.shape if isinstance(item, str)}
    grown = any(not item.isidentifier() and side_of(item, {axis: Side.LEFT}) for item in axes)
    first = any(spec.shape and spec.shape[0] == axis for spec in specs)
    if grown:
        return (Side.LEFT,)
    return (Side.RIGHT,) if first else (Side.RIGHT, Side.LEFT)


def unknown_axes(specs: Sequence[TensorSpec], symbols: Sequence[str]) -> list[str]:
    """Return the axes of outputs that no axis of the inputs decides, as `output: axis`."""
    sizes = dict.fromkeys(symbols, 1)
    places = ((spec.name, axis) for spec in specs for axis in spec.shape)
    return [f"{name}: {axis}" for name, axis in places if not isinstance(evaluate_dim(axis, sizes), int)]


def side_of(axis: Dim, sides: Mapping[str, Side]) -> Side | None:
    """Return the side of the axis that a dimension is, or is an expression over."""
    if isinstance(axis, int):
        return None
    names = re.findall(r"[^\W\d]\w*", axis)
    return next((sides[name] for name in names if name in sides), None)
