"""Quantised matrices that the kernel of `template.py` reads as they are stored, and how their rows lie in a stage."""

from __future__ import annotations

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import Feature
from relaxtune.schedules.templates.emit.async_copy import COPY_BYTES

#: Along K of a step of the kernel: each has one scale a column.
STORED_DEPTH = 32
#: Features of a GPU that the kernel needs.
FEATURES = frozenset({Feature.MMA, Feature.CP_ASYNC, Feature.LDMATRIX})
# Halves in a copy of 16 bytes.
_SCALES = 8
# Along K of what a lane reads at a time.
_NEIGHBOURS = 8


def refuse_stored(n: int, k: int, bits: int, group: int) -> Refusal | None:
    """Return why a matrix [K, N], quantised in groups along K, is not read as it is stored; None where it is."""
    length = 8 * COPY_BYTES // bits
    if k % length:
        return Refusal(f"K is {k}, expected a multiple of {length}: rows of B start at multiples of {COPY_BYTES} bytes")
    if n % _SCALES:
        return Refusal(f"N is {n}, expected a multiple of {_SCALES}: scales are copied {COPY_BYTES} bytes at a time")
    if group < k and group % STORED_DEPTH:
        return Refusal(f"groups of {group} weights, expected a multiple of {STORED_DEPTH}: a step has one scale")
    return None


def scale_rows(block_k: int, k: int, group: int) -> int:
    """Return the rows of scales that a stage holds: one where it lies within a group, else one for each step."""
    return 1 if group >= k or group % block_k == 0 else block_k // STORED_DEPTH


def chunks_together(bits: int) -> int:
    """Return the chunks of 16 bytes of a row that four neighbouring lanes read together: 8 elements each."""
    return 4 * _NEIGHBOURS * bits // 8 // COPY_BYTES
