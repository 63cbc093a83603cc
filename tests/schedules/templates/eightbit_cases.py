"""Matmuls of 8-bit operands for the GEMM template, at shapes that no tile divides, and what they are in NumPy."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from scipy import special

from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
from tests.schedules.templates.matmul_cases import MatmulCase

INTEGERS = MatmulCase((129,), 208, 208, dtype="int8", accumulator="int32", output="int32", transposed=True)
_NUMBERS = replace(INTEGERS, epilogue=("corrected", "dequantised"), output="float32")
_BYTES = replace(INTEGERS, epilogue=("dequantised", "requantised"), output="int8")
# Equal to NumPy's result in every bit.
EXACT = {
    "sums": (INTEGERS, GemmParameters(64, 64, 3, 1)),
    "one row": (replace(INTEGERS, rows=(1,)), GemmParameters(64, 32, 3, 1, dependent=True)),
    "short sum": (replace(INTEGERS, k=16), GemmParameters(64, 32, 2, 1)),
    "unsigned rows": (replace(INTEGERS, rows=(127,), dtype="uint8", dtype_b="int8"), GemmParameters(128, 48, 4, 2)),
    "unsigned weights": (replace(INTEGERS, n=257, dtype_b="uint8"), GemmParameters(64, 96, 3, 1, dependent=True)),
    "both unsigned": (replace(INTEGERS, dtype="uint8"), GemmParameters(128, 64, 3, 2)),
    "numbers": (replace(_NUMBERS, rows=(3, 43)), GemmParameters(128, 192, 3, 2, 2)),
    "computed scale": (replace(_NUMBERS, epilogue=("corrected", "scaled")), GemmParameters(64, 64, 3, 1)),
    "bytes": (_BYTES, GemmParameters(64, 64, 3, 1, dependent=True)),
    "unsigned bytes": (replace(_BYTES, rows=(1000,), n=784, output="uint8"), GemmParameters(128, 128, 3, 2, 7)),
    "bytes in odd columns": (replace(_BYTES, n=257), GemmParameters(128, 64, 3, 2)),
    "bytes, split": (replace(_BYTES, k=2064), GemmParameters(64, 96, 3, 1, 0, 4, dependent=True)),
    "split": (replace(INTEGERS, k=2064), GemmParameters(64, 64, 3, 1, 0, 3, dependent=True)),
    "split with two consumers": (replace(_NUMBERS, k=2064), GemmParameters(128, 64, 3, 2, 0, 2)),
    "by turns": (replace(INTEGERS, rows=(1000,), n=776, k=528), GemmParameters(64, 128, 3, 2, 7, 1, True, True)),
    "two instructions a tile": (replace(_NUMBERS, rows=(300,), n=520), GemmParameters(128, 256, 3, 2)),
    "two instructions by turns": (
        replace(_BYTES, rows=(1000,), n=800),
        GemmParameters(64, 256, 3, 2, 5, pingpong=True, dependent=True),
    ),
    "stream": (replace(INTEGERS, k=2064), GemmParameters(64, 64, 3, 1, 50, dependent=True, stream_k=True)),
    "bytes, stream": (replace(_BYTES, rows=(700,), k=2064), GemmParameters(128, 96, 3, 2, 7, stream_k=True)),
    "multicast": (replace(_BYTES, rows=(700,)), GemmParameters(128, 96, 3, 2, 0, multicast=2, group=2)),
    "byte residual": (
        replace(_BYTES, epilogue=("dequantised", "byte_residual", "requantised")),
        GemmParameters(64, 64, 3, 1, dependent=True),
    ),
    "byte residual of numbers": (
        replace(_NUMBERS, rows=(300,), n=400, epilogue=("dequantised", "byte_residual")),
        GemmParameters(128, 192, 3, 2),
    ),
}
_EIGHTS = MatmulCase((129,), 208, 208, dtype="float8_e4m3fn", output="float32", transposed=True)
# Equal but for the roundings of sums of 128 products in the tensor cores.
FLOATS = {
    "plain": (_EIGHTS, GemmParameters(64, 64, 3, 1)),
    "one row": (replace(_EIGHTS, rows=(1,), output="float16"), GemmParameters(64, 32, 3, 1, dependent=True)),
    "wide exponents": (replace(_EIGHTS, dtype="float8_e5m2"), GemmParameters(128, 96, 3, 2)),
    "mixed": (replace(_EIGHTS, rows=(127,), dtype_b="float8_e5m2"), GemmParameters(128, 48, 4, 2, dependent=True)),
    "gelu": (
        replace(_EIGHTS, rows=(3, 43), n=257, epilogue=("bias", "gelu"), output="bfloat16"),
        GemmParameters(128, 192, 3, 2, 2),
    ),
    "split": (replace(_EIGHTS, k=2064, epilogue=("bias",), output="float16"), GemmParameters(64, 64, 3, 1, 0, 3)),
    "stream": (
        replace(_EIGHTS, k=2064, epilogue=("bias",), output="float16"),
        GemmParameters(64, 64, 3, 1, 50, dependent=True, stream_k=True),
    ),
    "to float8": (
        replace(_EIGHTS, epilogue=("bias", "gelu"), output="float8_e4m3fn"),
        GemmParameters(128, 96, 3, 2, dependent=True),
    ),
    "to float8 in odd columns": (replace(_EIGHTS, n=257, output="float8_e4m3fn"), GemmParameters(128, 64, 3, 2)),
    "to float8, split": (
        replace(_EIGHTS, k=2064, epilogue=("bias",), output="float8_e4m3fn"),
        GemmParameters(64, 96, 3, 1, 0, 3),
    ),
    "large tiles": (replace(_EIGHTS, rows=(300,), n=520, output="float16"), GemmParameters(128, 192, 3, 2)),
    "by turns": (replace(_EIGHTS, rows=(1000,), n=776, k=528), GemmParameters(64, 128, 3, 2, 7, 1, True, True)),
}
ML_DTYPES = {name: getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}


def random_inputs(case: MatmulCase, rng: np.random.Generator) -> list[np.ndarray]:
    """Return values of a case's inputs: all integers of 8 bits, normal numbers, and scales of about what K gives.

    Where something is added to a scaled sum, scales are powers of two: one rounding or two are the same then.
    """
    arrays = []
    for param in case.func().params[:-1]:
        shape, dtype = [int(size) for size in param.ty.shape], str(param.ty.dtype)
        if dtype in ("int8", "uint8"):
            limits = np.iinfo(dtype)
            arrays.append(rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True))
        elif dtype == "int32":
            arrays.append(rng.integers(-(2**16), 2**16, shape, dtype=dtype))
        elif str(param.name) == "scale" and "byte_residual" in case.epilogue:
            arrays.append(np.exp2(rng.integers(-18, -13, shape)).astype(dtype))
        else:
            values = rng.normal(size=shape) / (2**16 if str(param.name) == "scale" else 1)
            arrays.append(np.asarray(values).astype(ML_DTYPES.get(dtype, dtype)))
    return arrays


def poisoned(case: MatmulCase) -> np.ndarray:
    """Return an output of values that a right result has nowhere, or of 8 bits in few places."""
    dtype = ML_DTYPES.get(case.output, case.output)
    bad = {"int8": -77, "uint8": 77, "int32": -(2**30)}.get(case.output, np.nan)
    return np.full((*case.rows, case.n), bad).astype(dtype)


def expected(case: MatmulCase, arrays: list[np.ndarray]) -> np.ndarray:
    """Return a case's result in float64, rounded to float32 where the function rounds."""
    a, b, *others = arrays
    value = a.astype("float64") @ b.astype("float64").T
    for step in case.epilogue:
        if step == "requantised":
            value = np.rint(value * 64) + 3
            limits = np.iinfo(case.output)
            value = np.clip(value, limits.min, limits.max)
        elif step == "gelu":
            value = value * (0.5 + 0.5 * special.erf(value * 0.5**0.5))
        elif step in ("dequantised", "scaled"):
            value = (value.astype("float32") * others.pop(0)).astype("float64")
        elif step == "byte_residual":
            value = (value + others.pop(0)).astype("float32").astype("float64")
        else:
            value = value + others.pop(0)
    return value
