"""Sizes of calls of a model with symbolic axes: the least, the typical and the largest size of an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relaxtune.models.axes.relations import axis_sizes, check_bounds
from relaxtune.models.axes.windows import check_sizes
from relaxtune.models.buckets import check_axes
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.onnx_model import OnnxModel


@dataclass(frozen=True)
class AxisProfile:
    """Sizes of one axis; a call with more than `most` is refused."""

    least: int
    typical: int
    most: int


def parse_profile(text: str) -> tuple[str, AxisProfile]:
    """Return (axis, profile) of one option such as `sequence=1:128:512`.

    Raises `ModelShapeError`: the text has another form, or the sizes do not rise.
    """
    axis, equals, listed = text.partition("=")
    sizes = [part.strip() for part in listed.split(":")]
    if not equals or not axis.strip().isidentifier() or len(sizes) != 3 or not all(map(str.isdecimal, sizes)):
        raise ModelShapeError(f"profile {text!r} cannot be read: expected AXIS=MIN:TYPICAL:MAX, as sequence=1:128:512")
    profile = AxisProfile(*map(int, sizes))
    if not 0 <= profile.least <= profile.typical <= profile.most or profile.most < 1:
        raise ModelShapeError(f"profile {text!r}: expected rising sizes MIN:TYPICAL:MAX, as sequence=1:128:512")
    return axis.strip(), profile


def parse_profiles(texts: Sequence[str]) -> dict[str, AxisProfile]:
    """Return axis -> profile of texts such as `sequence=1:128:512,batch=1:8:32`.

    Raises `ModelShapeError`: a text has another form, or an axis is named twice.
    """
    found: dict[str, AxisProfile] = {}
    for part in (part for text in texts for part in text.split(",")):
        axis, profile = parse_profile(part)
        if axis in found:
            raise ModelShapeError(f"profile {part!r} names axis {axis!r} twice: give each axis once")
        found[axis] = profile
    return found


def check_profile(profile: Mapping[str, AxisProfile], model: OnnxModel) -> None:
    """Check that the axes of a profile are symbolic ones of the inputs, and its sizes what the graph takes.

    Raises `ModelShapeError`: an axis is not, or a table of the graph is shorter than the largest size, the other axes
    at their least.
    """
    check_axes(profile, model.inputs, "a profile")
    bounds = [relation for relation in model.relations if relation.sign == "<=" and relation.size.isdecimal()]
    for axis, sizes in profile.items():
        least = {other: one.least for other, one in profile.items()}
        check_bounds(bounds, {**least, axis: sizes.most}, f"profile {axis}={sizes.least}:{sizes.typical}:{sizes.most}")


def sizes_within(model: OnnxModel, maxima: Mapping[str, int], given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return what `axis_sizes` chooses, no axis larger than its largest size.

    Raises `ModelShapeError`: a pooling or a convolution has no room at the sizes that are given, or are the largest.
    """
    chosen = axis_sizes(model, given)
    capped = {axis: maxima[axis] for axis, size in chosen.items() if size > maxima.get(axis, size)}
    sizes = axis_sizes(model, {**capped, **(given or {})})
    check_sizes(model.proto, sizes)
    return sizes
