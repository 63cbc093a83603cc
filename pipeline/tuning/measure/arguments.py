"""Values of the arguments that candidates are measured and checked with."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from relaxtune.pipeline.arrays import CHUNK, map_chunks, numpy_dtype
from relaxtune.schedules.tir.blocks import static_shape
from relaxtune.schedules.tir.index_ranges import ALL_BYTES

_UNKNOWN_BOUND = 2
# After so many elements the numbers of a large output repeat: they only have to be wrong.
_PERIOD = 16 * CHUNK


@dataclass(frozen=True)
class ArgumentSpec:
    """Shape and TVM dtype name of a kernel's parameter."""

    shape: tuple[int, ...]
    dtype: str


def argument_specs(func: tirx.PrimFunc) -> tuple[ArgumentSpec, ...]:
    """Return the parameters of a PrimFunc of static shapes."""
    return tuple(ArgumentSpec(static_shape(param) or (), str(param.dtype)) for param in func.params)


def make_arrays(
    arguments: Sequence[ArgumentSpec], ranges: Mapping[int, int], seed: int, outputs: Collection[int] = ()
) -> list[np.ndarray]:
    """Return one random array per parameter.

    Parameters
    ----------
    arguments : sequence of ArgumentSpec
        The kernel's parameters, outputs included.
    ranges : mapping
        Parameter position -> exclusive upper bound of its integers, or `ALL_BYTES`; integers without one are 0 or 1.
    seed : int
        Of the random numbers.
    outputs : collection of int
        Positions of parameters that are written: of large ones, the numbers repeat.

    Notes
    -----
    Floats are uniform in [-1, 1), so that a sum of 60,000 products stays far below the largest float16, and are never
    all zero, which a device may compute faster.
    """
    generator = np.random.default_rng(seed)
    arrays = []
    for position, spec in enumerate(arguments):
        dtype = numpy_dtype(spec.dtype)
        if dtype.kind in "iub":
            bound, least = ranges.get(position, _UNKNOWN_BOUND), 0
            if bound == ALL_BYTES:
                least, bound = int(np.iinfo(str(dtype)).min), int(np.iinfo(str(dtype)).max) + 1
            elif dtype.kind != "b":
                bound = min(bound, int(np.iinfo(str(dtype)).max))
            arrays.append(generator.integers(least, bound, spec.shape).astype(dtype))
        else:
            repeats = position in outputs
            arrays.append(_uniform(spec.shape, dtype, (seed, position), _PERIOD if repeats else None))
    return arrays


def hiding_nothing(arrays: Sequence[np.ndarray], masks: Mapping[str, int]) -> list[np.ndarray]:
    """Return the arrays, each mask full of the number that hides nothing (`pipeline.tuning.measure.workload_spec`)."""
    numbers = {int(position): number for position, number in masks.items()}
    return [
        np.full_like(array, numbers[position]) if position in numbers else array
        for position, array in enumerate(arrays)
    ]


def with_partial_sums(arrays: Sequence[np.ndarray], partial_sums: Mapping[str, int]) -> list[np.ndarray]:
    """Return the arrays, the partial sums among them those of the rows they belong to (see `workload_spec`).

    Rows [rows..., K] have partial sums [groups, rows..., 2]: of K / groups elements each, and of their squares.
    """
    made = list(arrays)
    for position, rows in partial_sums.items():
        sums = made[int(position)]
        parts = made[rows].astype(np.float32).reshape(-1, sums.shape[0], made[rows].shape[-1] // sums.shape[0])
        both = np.stack([parts.sum(axis=-1), np.square(parts).sum(axis=-1)], axis=-1)
        made[int(position)] = np.ascontiguousarray(both.swapaxes(0, 1)).reshape(sums.shape).astype(sums.dtype)
    return made


def with_column_sums(arrays: Sequence[np.ndarray], column_sums: Mapping[str, Sequence[int]]) -> list[np.ndarray]:
    """Return the arrays, the sums of columns among them those of their matrices (see `workload_spec`)."""
    made = list(arrays)
    for position, (matrix, axis) in column_sums.items():
        sums = made[int(position)]
        made[int(position)] = made[matrix].astype(np.float32).sum(axis=axis).reshape(sums.shape).astype(sums.dtype)
    return made


def _uniform(
    shape: tuple[int, ...], dtype: np.dtype[np.generic], seed: tuple[int, int], period: int | None = None
) -> np.ndarray:
    """Return floats uniform in [-1, 1), each chunk from a generator of its own: the same on any number of threads.

    With a period, a multiple of a chunk, they repeat after so many.
    """
    made = np.empty(math.prod(shape), dtype)
    if period is not None and period < made.size:
        block = _uniform((period,), dtype, seed)

        def repeat(begin: int, end: int) -> None:
            at = begin % period
            made[begin:end] = block[at : at + end - begin]

        map_chunks(repeat, made.size)
        return made.reshape(shape)

    def fill(begin: int, end: int) -> None:
        generator = np.random.default_rng([*seed, begin // CHUNK])
        values = generator.random(end - begin, np.float64 if dtype.itemsize > 4 else np.float32)
        values *= 2
        values -= 1
        made[begin:end] = values.astype(dtype)

    map_chunks(fill, made.size)
    return made.reshape(shape)
