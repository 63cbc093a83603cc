"""Values of the arguments that candidates are measured and checked with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from tvm import tirx

from relaxtune.pipeline.arrays import CHUNK, map_chunks, numpy_dtype
from relaxtune.schedules.tir.blocks import static_shape
from relaxtune.schedules.tir.index_ranges import ALL_BYTES

_UNKNOWN_BOUND = 2
# Numbers that are drawn, for all tensors of a dtype; larger tensors repeat them. It is a prime: no two rows are alike.
_DRAWN = 4_194_301


@dataclass(frozen=True)
class ArgumentSpec:
    """Shape and TVM dtype name of a kernel's parameter."""

    shape: tuple[int, ...]
    dtype: str


def argument_specs(func: tirx.PrimFunc) -> tuple[ArgumentSpec, ...]:
    """Return the parameters of a PrimFunc of static shapes."""
    return tuple(ArgumentSpec(static_shape(param) or (), str(param.dtype)) for param in func.params)


def make_arrays(arguments: Sequence[ArgumentSpec], ranges: Mapping[int, int], seed: int) -> list[np.ndarray]:
    """Return one random array per parameter.

    `ranges` gives the exclusive upper bound of a parameter's integers by its position, or `ALL_BYTES`; integers without
    one are 0 or 1.

    Floats are uniform in [-1, 1), so that a sum of 60,000 products stays far below the largest float16, and are never
    all zero, which a device may compute faster. They are drawn once in a process for each dtype: a tensor is a part of
    them, which begins where the seed and the position say. Drawing all of them took a third of a GPU's time in a batch.
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
            size = math.prod(spec.shape)
            drawn = generator.integers(least, bound, min(size, _DRAWN)).astype(dtype)
            arrays.append(np.resize(drawn, spec.shape) if size > _DRAWN else drawn.reshape(spec.shape))
        else:
            begin = int(np.random.default_rng((seed, position)).integers(_DRAWN))
            arrays.append(_taken(_uniform(dtype), begin, spec.shape))
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
    filled = list(arrays)
    for position, rows in partial_sums.items():
        sums = filled[int(position)]
        parts = filled[rows].astype(np.float32).reshape(-1, sums.shape[0], filled[rows].shape[-1] // sums.shape[0])
        both = np.stack([parts.sum(axis=-1), np.square(parts).sum(axis=-1)], axis=-1)
        filled[int(position)] = np.ascontiguousarray(both.swapaxes(0, 1)).reshape(sums.shape).astype(sums.dtype)
    return filled


def with_column_sums(arrays: Sequence[np.ndarray], column_sums: Mapping[str, Sequence[int]]) -> list[np.ndarray]:
    """Return the arrays, the sums of columns among them those of their matrices (see `workload_spec`)."""
    filled = list(arrays)
    for position, (matrix, axis) in column_sums.items():
        sums = filled[int(position)]
        filled[int(position)] = filled[matrix].astype(np.float32).sum(axis=axis).reshape(sums.shape).astype(sums.dtype)
    return filled


@cache
def _uniform(dtype: np.dtype[np.generic]) -> np.ndarray:
    """Return floats uniform in [-1, 1); the first chunk stands at the end again. The same on any number of threads."""
    drawn = np.empty(_DRAWN + CHUNK, dtype)

    def fill(begin: int, end: int) -> None:
        generator = np.random.default_rng(begin // CHUNK)
        values = generator.random(end - begin, np.float64 if dtype.itemsize > 4 else np.float32)
        values *= 2
        values -= 1
        drawn[begin:end] = values.astype(dtype)

    map_chunks(fill, _DRAWN)
    drawn[_DRAWN:] = drawn[:CHUNK]
    return drawn


def _taken(drawn: np.ndarray, first: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of these numbers from one of them on, repeated as often as it takes."""
    filled = np.empty(math.prod(shape), drawn.dtype)

    def copy(begin: int, end: int) -> None:
        at = (first + begin) % _DRAWN
        filled[begin:end] = drawn[at : at + end - begin]

    map_chunks(copy, filled.size)
    return filled.reshape(shape)
