"""Cut the sizes of calls into ranges: the few kernels that serve all points, and the fewest lines that name them.

A point is a size of each axis that a call may have. A kernel takes half a second to compile, a line costs a comparison:
kernels are as few as serve all points nearly as well as each point's own, and lines are as many as that takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

_KERNELS_MAX = 5
#: Sizes by name, in the order of names: the place of a call among others.
Place = tuple[tuple[str, int], ...]
Kernel = TypeVar("Kernel", bound=Hashable)
#: The losses of all points before another kernel is taken, and with it.
IsEnough = Callable[[Sequence[float], Sequence[float]], bool]


@dataclass(frozen=True)
class Line:
    """The most that each bounded axis may be, and the number of a kernel."""

    most: tuple[tuple[str, int], ...]
    kernel: int


def cover(
    losses: Mapping[Kernel, Sequence[float]], is_enough: IsEnough, taken: Collection[Kernel] = ()
) -> list[Kernel]:
    """Return as few kernels as serve all points well: those `taken`, then at each time the one that loses the least.

    `losses` has a number for each point; the sum over all of the least ones falls until that `is_enough`.
    """
    chosen = list(dict.fromkeys(taken))
    points = range(len(next(iter(losses.values()))))
    reached = [min((losses[kernel][point] for kernel in chosen), default=math.inf) for point in points]
    while points and len(chosen) < _KERNELS_MAX:
        best = min(losses, key=lambda kernel: sum(map(min, losses[kernel], reached)))
        better = list(map(min, losses[best], reached))
        if is_enough(reached, better):
            break
        chosen.append(best)
        reached = better
    return chosen


def nearest(losses: Mapping[Kernel, Sequence[float]], kernels: Collection[Kernel]) -> list[Kernel]:
    """Return for each point the one of some kernels that loses the least."""
    return [min(kernels, key=lambda kernel: losses[kernel][point]) for point in range(len(next(iter(losses.values()))))]


def cut_lines(
    axes: Mapping[str, Sequence[int]], points: Sequence[Mapping[str, int]], kernels: Sequence[int]
) -> tuple[Line, ...]:
    """Return lines that give each point its kernel by the first that it keeps to.

    Lines that later ones make up for are left out. The largest size of an axis is no bound: the last line has none.
    """
    lines = [
        Line(tuple((name, size) for name, size in point.items() if size != axes[name][-1]), kernel)
        for point, kernel in zip(points, kernels, strict=True)
    ]

    keeps = np.array([[all(point[name] <= most for name, most in line.most) for point in points] for line in lines])
    wanted, alive = np.array(kernels), np.ones(len(lines), bool)
    for number in range(len(lines) - 1):
        alive[number] = False
        # The first of the lines that are left, for each point.
        first = np.flatnonzero(alive)[keeps[alive].argmax(axis=0)]
        alive[number] = not np.array_equal(wanted[first], wanted)
    return tuple(line for line, stays in zip(lines, alive, strict=True) if stays)
