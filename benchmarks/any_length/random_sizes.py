"""Calls of random sizes, one after another, as a server gets them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from relaxtune.models import TensorSpec

Arm = Callable[[], Any]
# Sizes that come once before calls are timed.
_WARM = 3


def random_points(most: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Return so many points of sizes drawn from 1 to the most of each axis."""
    rng = np.random.default_rng(0)
    return [tuple(int(rng.integers(1, size + 1)) for size in most) for _ in range(count)]


def cut(
    feeds: Mapping[str, np.ndarray], inputs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Return the first part of larger inputs, for axes of these sizes.

    Drawn for each call, the caches of a decode step, which are gigabytes, took minutes.
    """
    from relaxtune.models.dims import evaluate_dim

    shapes = {spec.name: tuple(evaluate_dim(axis, sizes) for axis in spec.shape) for spec in inputs}
    return {name: np.ascontiguousarray(feeds[name][tuple(map(slice, shape))]) for name, shape in shapes.items()}


def time_stream(arms: Mapping[str, Sequence[Arm]], calls: int) -> dict[str, dict[str, float]]:
    """Return for every arm what calls of sizes in random order take: median, 99th percentile and most, microseconds.

    `arms` have a call for each of the sizes; all arms have the same order. The first calls of a size count, as they do
    for a caller: a call must not do what only a check needs.
    """
    found = {}
    for name, of_sizes in arms.items():
        order = np.random.default_rng(1).integers(0, len(of_sizes), calls)
        for one in of_sizes[:_WARM]:
            one()
        times = []
        for place in order:
            began = time.perf_counter()
            of_sizes[place]()
            times.append((time.perf_counter() - began) * 1e6)
        found[name] = {
            "median_us": statistics.median(times),
            "p99_us": float(np.percentile(times, 99)),
            "most_us": max(times),
        }
    return found
