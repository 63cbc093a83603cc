"""Fourier transforms as products with constant matrices: DFT (opsets 17 and 20) and STFT.

::

    DFT     y[k] = sum over n of x[n] * exp(-2 pi i k n / N)            inverse: exp(+...), divided by N
    STFT    frames of the signal, times the window, transformed

A complex number is a pair in the last axis. The matrix takes all (part, n) to all (part, k), so one matmul does it;
for the sizes of speech models (N = 400) that is 100 times the work of an FFT and still less than their first layer's.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, te

from relaxtune.pipeline.importer.converter_input import (
    ConverterInput,
    constant,
    constant_value,
    converts,
    dtype_of,
    sizes_of,
    static_size,
)
from relaxtune.schedules.sizes import simplify


@converts("DFT")
def convert_dft(node: ConverterInput) -> tvm.ir.Expr:
    """Return the transform of one axis. Inputs: x (..., 1 or 2), length (optional), axis (optional, -2)."""
    data = node.input(0)
    rank = int(data.ty.ndim)
    default = node.integer("axis", 1) if node.opset < 20 else -2
    axis = _number(node, 2, "axis", default) % rank
    inverse, onesided = bool(node.integer("inverse", 0)), bool(node.integer("onesided", 0))
    given = static_size(data, axis)
    length = _number(node, 1, "dft_length", 2 * (given - 1) if inverse and onesided else given)
    matrix = transform_matrix(given, length, static_size(data, rank - 1), inverse=inverse, onesided=onesided)
    order = [*(place for place in range(rank - 1) if place != axis), axis, rank - 1]
    turned = node.builder.emit(relax.op.permute_dims(data, order))
    result = _transformed(node, turned, matrix)
    return relax.op.permute_dims(result, [order.index(place) for place in range(rank)])


@converts("STFT")
def convert_stft(node: ConverterInput) -> tvm.ir.Expr:
    """Return transforms of frames (B, frames, k, 2). Inputs: signal (B, L, 1 or 2), step, window, length of a frame."""
    emit, signal, window = node.builder.emit, node.input(0), node.optional(2)
    step = _number(node, 1, "frame_step", 0)
    length = _number(node, 3, "frame_length", 0 if window is None else static_size(window, 0))
    if int(signal.ty.ndim) == 2:  # as ONNX Runtime takes it
        signal = emit(relax.op.expand_dims(signal, 2))
    frames = simplify((sizes_of(signal)[1] - length) // step + 1)
    if isinstance(frames, int):
        places = np.arange(frames)[:, None] * step + np.arange(length)[None, :]
        cut = emit(relax.op.take(signal, constant(places.astype("int64")), axis=1))
    else:

        def framed(x: te.Tensor) -> te.Tensor:
            shape = (x.shape[0], frames, length, x.shape[2])
            return te.compute(shape, lambda b, frame, place, part: x[b, frame * step + place, part], name="frames")

        cut = node.builder.emit_te(framed, signal, primfunc_name_hint="frames")
    if window is not None:
        cut = emit(relax.op.multiply(cut, emit(relax.op.reshape(window, (length, 1)))))
    onesided = bool(node.integer("onesided", 1))
    return _transformed(node, cut, transform_matrix(length, length, static_size(signal, 2), onesided=onesided))


def transform_matrix(
    given: int, length: int, parts: int, *, inverse: bool = False, onesided: bool = False
) -> np.ndarray:
    """Return the matrix (given, parts, outputs, result parts) of a transform, in float64.

    Parameters
    ----------
    given, length : int
        Elements there are; those transformed, cut off or filled up with zeros.
    parts : int
        1 for real input, 2 for complex.
    onesided : bool
        Only the outputs up to length // 2; of the inverse, only those are given and the result is real.
    """
    basis = np.zeros((given, parts, given), "complex128")
    basis[np.arange(given), 0, np.arange(given)] = 1.0
    if parts == 2:
        basis[np.arange(given), 1, np.arange(given)] = 1j
    if inverse and onesided:
        return np.fft.irfft(basis, n=length, axis=-1)[..., None]
    result = np.fft.ifft(basis, n=length, axis=-1) if inverse else np.fft.fft(basis, n=length, axis=-1)
    if onesided:
        result = result[..., : length // 2 + 1]
    return np.stack([result.real, result.imag], axis=-1)


def _transformed(node: ConverterInput, data: tvm.ir.Expr, matrix: np.ndarray) -> tvm.ir.Expr:
    """Return data (..., n, part) times the matrix: (..., k, part)."""
    given, parts, outputs, kinds = matrix.shape
    lead = sizes_of(data)[:-2]
    flat = node.builder.emit(relax.op.reshape(data, (*lead, given * parts)))
    weights = constant(matrix.reshape(given * parts, outputs * kinds).astype(dtype_of(data)))
    product = node.builder.emit(relax.op.matmul(flat, weights))
    return node.builder.emit(relax.op.reshape(product, (*lead, outputs, kinds)))


def _number(node: ConverterInput, place: int, what: str, default: int) -> int:
    found = node.optional(place)
    if found is None:
        return default
    value = constant_value(found)
    if value is None:
        raise ValueError(f"input {place} ({what}): expected a constant")
    return int(value.reshape(()))
