"""Sizes of real traffic: how often calls had which sizes, read from a file and cut down to a few points.

::

    sequence,batch,count        a header that names the axes; the last column is the count
    128,1,5200
    16,8,310
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relaxtune.models.axis_profile import AxisProfile
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.files import read_regular

_COUNT = "count"


@dataclass(frozen=True)
class SizePoint:
    """The sizes of some axes, by name, and how many calls had them or are stood for by them."""

    sizes: tuple[tuple[str, int], ...]
    count: int

    def __str__(self) -> str:
        """Return such as `sequence=128 batch=1`."""
        return " ".join(f"{axis}={size}" for axis, size in self.sizes)


def read_histogram(path: Path) -> tuple[SizePoint, ...]:
    """Return the sizes of a file and their counts, the smallest first; lines of equal sizes are added up.

    Raises `ModelShapeError`: the file cannot be read, or is not of the form that the module's text shows; the message
    names the line.
    """
    try:
        lines = list(csv.reader(read_regular(path).decode("utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ModelShapeError(f"lengths {str(path)!r} cannot be read: {error}") from error
    rows = [(number, [cell.strip() for cell in row]) for number, row in enumerate(lines, 1) if any(map(str.strip, row))]
    header = rows[0][1] if rows else []
    *axes, last = header or [""]
    if last != _COUNT or not axes or len(set(axes)) < len(axes) or not all(map(str.isidentifier, axes)):
        raise ModelShapeError(
            f"lengths {str(path)!r}, line 1: expected the names of axes and {_COUNT!r}, as 'sequence,{_COUNT}', got "
            f"{','.join(header)!r}"
        )
    found: Counter[tuple[tuple[str, int], ...]] = Counter()
    for number, row in rows[1:]:
        if len(row) != len(header) or not all(map(str.isdecimal, row)) or 0 in map(int, row):
            raise ModelShapeError(
                f"lengths {str(path)!r}, line {number}: expected {len(header)} whole numbers from 1 on "
                f"({','.join(header)}), got {','.join(row)!r}"
            )
        *sizes, count = map(int, row)
        found[tuple(zip(axes, sizes, strict=True))] += count
    if not found:
        raise ModelShapeError(f"lengths {str(path)!r} has a header and no sizes: expected a line such as '128,5200'")
    ordered = sorted(found, key=lambda sizes: (math.prod(size for _, size in sizes), sizes))
    return tuple(SizePoint(sizes, found[sizes]) for sizes in ordered)


def few_points(points: Sequence[SizePoint], most: int) -> tuple[SizePoint, ...]:
    """Return at most so many points that stand for all: each is the middle of neighbours with about as many calls."""
    if len(points) <= most:
        return tuple(points)
    total, before = sum(point.count for point in points), 0
    groups: dict[int, list[SizePoint]] = {}
    for point in points:
        # The group of the middle one of its calls.
        groups.setdefault(min(most - 1, (2 * before + point.count) * most // (2 * total)), []).append(point)
        before += point.count
    return tuple(_middle(group) for group in groups.values())


def profile_of(points: Sequence[SizePoint]) -> Mapping[str, AxisProfile]:
    """Return the least, the most frequent and the largest size of each axis."""
    profile = {}
    for place, (axis, _) in enumerate(points[0].sizes):
        counts: Counter[int] = Counter()
        for point in points:
            counts[point.sizes[place][1]] += point.count
        profile[axis] = AxisProfile(min(counts), max(counts, key=lambda size: counts[size]), max(counts))
    return profile


def _middle(group: Sequence[SizePoint]) -> SizePoint:
    total, passed = sum(point.count for point in group), 0
    for point in group:
        passed += point.count
        if 2 * passed >= total:
            return SizePoint(point.sizes, total)
    raise AssertionError("counts are positive")
