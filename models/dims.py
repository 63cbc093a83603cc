"""Dimensions: numbers, names, and the expressions over names that exporters write (`past_sequence + 1`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from relaxtune.models.errors import ModelShapeError
from relaxtune.polynomials import read_size

Dim = int | str

#: torch writes "to the end" as the largest int64 or int32.
TO_THE_END = 2**31 - 1
# Bytes of memory that no machine has (64 TiB).
_MEMORY_BYTES = 2**46


def may_be_empty(rank: int, axis: int) -> bool:
    """Return whether an axis of an input may have no places: a cache's may before its first token; tokens' may not."""
    return rank > 2 and axis > 0


def evaluate_dim(dim: Dim, bindings: Mapping[str, int]) -> Dim:
    """Return a dimension as a number where `bindings` decide it, else unchanged.

    Expressions may use names, integers, `+ - * // %`, unary minus, `min`, and parentheses; whatever else an exporter
    writes is left as it is, under its own name.
    """
    if isinstance(dim, int):
        return dim
    if dim in bindings:
        return bindings[dim]
    size = read_size(dim)
    value = None if size is None else size.at(bindings)
    return dim if value is None else value


def split_offset(dim: str) -> tuple[str, int] | None:
    """Return (`past_sequence`, 1) for `past_sequence + 1`, or None when the dimension is not a name plus a number."""
    name, plus, offset = dim.partition("+")
    name, offset = name.strip(), offset.strip()
    if plus and name.isidentifier() and offset.isdecimal():
        return name, int(offset)
    return None


def parse_shape_override(text: str) -> tuple[str, tuple[Dim, ...]]:
    """Return (name, shape) of one override such as `input_ids=1x128` or `input_ids=batchx128`.

    Axes are separated by `x`, and a name is a symbolic axis. A symbolic name that holds an `x` itself needs `*` as the
    separator: `input_ids=max_len*128`.

    Raises `ModelShapeError`: the text has another form, or an axis is not a number or a name.
    """
    name, equals, shape_text = text.strip().rpartition("=")
    name, shape_text = name.strip(), shape_text.strip()
    form = "expected NAME=AxBxC with positive numbers or names, for instance input_ids=1x128 or input_ids=batchx128"
    if not equals or not name or not shape_text:
        raise ModelShapeError(f"shape override {text!r} cannot be read: {form}")
    separator = "*" if "*" in shape_text else "x"
    axes: list[Dim] = []
    for part in (piece.strip() for piece in shape_text.split(separator)):
        if part.isdecimal() and int(part) >= 0:
            axes.append(int(part))
        elif part.isidentifier():
            axes.append(part)
        else:
            raise ModelShapeError(f"shape override {text!r} has the axis {part!r}: {form}")
    return name, tuple(axes)


def parse_dim(text: str) -> tuple[str, int]:
    """Return (axis, size) of one option such as `sequence=128`.

    Raises `ModelShapeError`: the text has another form.
    """
    axis, _, size = (part.strip() for part in text.partition("="))
    if not axis.isidentifier() or not size.isdecimal():
        raise ModelShapeError(f"{text!r} cannot be read: expected AXIS=SIZE, such as sequence=128")
    return axis, int(size)


def reaches_the_end(end: int, others: Iterable[int]) -> bool:
    """Return whether a Slice's end lies behind every place that an axis of unknown size can have.

    jax2tf writes 10^9. No axis is as long where the tensor would then fit no machine.

    `end`: from 0 on.
    `others`: the known sizes of the tensor's other axes; an element has at least a byte.
    """
    return end >= TO_THE_END or end * math.prod(others) > _MEMORY_BYTES
