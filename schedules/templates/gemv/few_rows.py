"""For how many rows the templates for few of them are there, and where they are taken before others."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from relaxtune.schedules.targets import Feature

#: Each weight is read once and multiplied by all rows.
ROWS_MAX = 16


def makes_few_rows(rows: int | None, features: AbstractSet[Feature]) -> bool:
    """Whether a template for few rows is worth a form of its own of a matmul by a constant in half precision.

    It is where the template for many rows multiplies by mma.sync. For one row of Llama-1B on an H200, that one took
    29 us with K 8192 and N 2048, 8.9 with 2048 and 2048, 19.8 with 2048 and 16384, and 9.5 with 2048 and 3072 where
    heads are rotated, norms included; this one takes 11.2, 6.5, 19.0 and 10.1 beside norms of 1.6
    (`benchmarks/results/h200-decode-sm80.json`). Kernels of wgmma are as fast as either.
    """
    return rows is not None and rows <= ROWS_MAX and Feature.MMA in features and Feature.WGMMA not in features
