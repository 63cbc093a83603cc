"""What tcgen05.mma is told in words of bits: the shared memory descriptor and the instruction descriptor.

PTX ISA 9.0, "tcgen05 Shared memory descriptor" and "Instruction descriptor" of `.kind::f16`.
"""

from __future__ import annotations

# TMA's swizzle mode -> bits 61 to 63 of a shared memory descriptor.
_SWIZZLES = {0: 0, 1: 6, 2: 4, 3: 2}
# Bits 46 to 48 of it have one value.
_FIXED = 0b001
_OPERANDS = {"float16": 0, "bfloat16": 1}
_SUMS_FLOAT32 = 1


def descriptor_high(stride: int, swizzle: int) -> int:
    """Return bits 32 to 63 of a shared memory descriptor.

    Parameters
    ----------
    stride : int
        Units of 16 bytes from 8 rows to the next ones.
    swizzle : int
        TMA's mode: 0 none, 1, 2 and 3 for rows of 32, 64 and 128 bytes.
    """
    return stride | _FIXED << 46 - 32 | _SWIZZLES[swizzle] << 61 - 32


def instruction_descriptor(dtype: str, rows: int, columns: int) -> int:
    """Return the descriptor of a dense `.kind::f16` product with sums in float32, of operands that are rows of K.

    `rows` are those of A, 64 or 128; `columns` are rows of B, a multiple of 8 (of 16 with 128 rows) up to 256.
    """
    kind = _OPERANDS[dtype]
    return _SUMS_FLOAT32 << 4 | kind << 7 | kind << 10 | columns >> 3 << 17 | rows >> 4 << 24
