"""Quantisation of weight matrices in groups along K, in NumPy; laid out as ONNX Runtime's MatMulNBits.

::

    W[k, n] ~ (level[n, k] - offset) * scale[n, k // group]        level: 0 .. 2**bits - 1, offset 2**(bits - 1)

8 bits: scale = max|w| / 127. 4 bits: scale = w / -8 of the weight of largest magnitude, which is then hit exactly, and
all 16 levels serve (ONNX Runtime's and llama.cpp's symmetric form). Levels are chosen for the scale as it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relaxtune.schedules.functions.float8 import FLOAT8_MAX, float8_array

# Rows of the transposed matrix at a time: what is needed beside the results stays small.
_ROWS = 1024


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [K, N] as levels [N, K] (uint8, one each) and scales [N, groups].

    `schedules.functions.quantised_matmul` says how kernels read them.
    """

    levels: np.ndarray
    scales: np.ndarray
    bits: int
    group: int

    def dequantised(self) -> np.ndarray:
        """Return the matrix [K, N] that the levels stand for, in float32."""
        rows, k = self.levels.shape
        result = np.empty((k, rows), np.float32)
        offset = np.float32(2 ** (self.bits - 1))
        for start in range(0, rows, _ROWS):
            part = slice(start, start + _ROWS)
            scales = np.repeat(self.scales[part].astype(np.float32), self.group, axis=1)[:, :k]
            result[:, part] = ((self.levels[part].astype(np.float32) - offset) * scales).T
        return result


def group_of(k: int, group_size: int) -> int:
    """Return the group of a matrix of K rows: all of them for 0 and where there are fewer than a group."""
    return k if group_size == 0 else min(group_size, k)


def quantise(weight: np.ndarray, bits: int, group_size: int, scale_dtype: str = "float16") -> QuantisedMatrix:
    """Return a [K, N] float matrix quantised; the last group of a column may be shorter.

    `weight`: finite, of any float dtype. `bits`: 4 or 8. `group_size`: weights along K with one scale; 0 for all.
    """
    k, columns = weight.shape
    group = group_of(k, group_size)
    groups = -(-k // group)
    levels = np.empty((columns, k), np.uint8)
    scales = np.empty((columns, groups), scale_dtype)
    for start in range(0, columns, _ROWS):
        part = slice(start, start + _ROWS)
        rows = np.zeros((min(_ROWS, columns - start), groups * group), np.float32)
        rows[:, :k] = weight[:, part].T
        grouped = rows.reshape(len(rows), groups, group)
        scales[part] = _scales(grouped, bits)
        step = scales[part].astype(np.float32)[..., None]
        found = np.divide(grouped, step, out=np.zeros_like(grouped), where=step != 0)
        offset = 2 ** (bits - 1)
        found = np.clip(np.rint(found) + offset, 0, 2 * offset - 1)
        levels[part] = found.reshape(len(rows), -1)[:, :k]
    return QuantisedMatrix(levels, scales, bits, group)


def holds_scales(weight: np.ndarray, bits: int, group_size: int) -> bool:
    """Return whether every group's scale is stored to 1/256 of itself; those of weights around 1e-6 are 0 in float16.

    Parameters are those of `quantise`.
    """
    k, columns = weight.shape
    group = group_of(k, group_size)
    for start in range(0, columns, _ROWS):
        rows = weight[:, start : start + _ROWS].T.astype(np.float32)
        padded = np.pad(rows, ((0, 0), (0, -k % group)))
        exact = _scales(padded.reshape(len(rows), -1, group), bits)
        if (np.abs(exact.astype(np.float16).astype(np.float32) - exact) > np.abs(exact) / 256).any():
            return False
    return True


def quantise_float8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a [K, N] float matrix in float8 e4m3 [N, K], and a scale for each column, float32 [N]."""
    rows = weight.T.astype(np.float32)
    scales = np.abs(rows).max(axis=1, initial=0.0) / np.float32(FLOAT8_MAX)
    scales[scales == 0] = 1.0
    return np.ascontiguousarray(float8_array(rows / scales[:, None])), scales


def quantise_to_int8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a [K, N] float matrix in int8, -127 to 127, and a scale for each column, float32 [N]."""
    numbers = weight.astype(np.float32)
    scales = np.abs(numbers).max(axis=0, initial=0.0) / np.float32(127)
    scales[scales == 0] = 1.0
    return np.rint(numbers / scales).astype(np.int8), scales


def packed_rows(matrix: QuantisedMatrix) -> np.ndarray:
    """Return the levels as bytes [N, K * bits / 8]: of 4 bits, the even position along K is the lower half."""
    if matrix.bits == 8:
        return matrix.levels
    return np.ascontiguousarray(matrix.levels[:, ::2] | matrix.levels[:, 1::2] << 4)


def packed_panels(matrix: QuantisedMatrix, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes [P, K * bits / 8, width] and scales [P, groups, width]; past the last column scales are 0."""
    packed, scales = packed_rows(matrix), matrix.scales
    panels = -(-len(packed) // width)
    missing = panels * width - len(packed)
    return _panels(packed, panels, width, missing), _panels(scales, panels, width, missing)


def _panels(rows: np.ndarray, panels: int, width: int, missing: int) -> np.ndarray:
    padded = np.pad(rows, ((0, missing), (0, 0)))
    return np.ascontiguousarray(padded.reshape(panels, width, -1).transpose(0, 2, 1))


def _scales(grouped: np.ndarray, bits: int) -> np.ndarray:
    at = np.argmax(np.abs(grouped), axis=-1, keepdims=True)
    largest: np.ndarray = np.take_along_axis(grouped, at, axis=-1)[..., 0]
    return largest / -8 if bits == 4 else np.abs(largest) / 127
