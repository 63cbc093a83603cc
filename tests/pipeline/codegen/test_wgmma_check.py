"""Machine code that reads results of wgmma before the wait for them: found, told, and nothing else is taken for it."""

from __future__ import annotations

import struct

import pytest

from relaxtune.pipeline.codegen import cuda_compiler
from relaxtune.pipeline.codegen.cuda_compiler import CubinRequest, find_toolchain
from relaxtune.pipeline.codegen.wgmma_check import count_early_reads
from relaxtune.pipeline.errors import LoweringError

# As nvdisasm 13.5 prints kernels of the GEMM template (sm_90a).
MULTIPLY_24 = (0x40E000000C1879F0, 0x000FE20008700818)  # HGMMA.64x64x16.F32 R24, gdesc[UR12].tnspB, R24
END_GROUP_24 = (0x40E000000C1879F0, 0x000FE60008000818)  # HGMMA.64x64x16.F32 R24, gdesc[UR12].tnspB, R24, gsb0
END_GROUP_56 = (0x40E000000C3879F0, 0x000FE60008000838)  # HGMMA.64x64x16.F32 R56, gdesc[UR12].tnspB, R56, gsb0
WIDE_24 = (0x42E000000C1879F0, 0x000FE60008000818)  # HGMMA.64x192x16.F32 R24, gdesc[UR12].tnspB, R24, gsb0
INTEGER_24 = (0x02A00000081879F1, 0x000FE60008041018)  # IGMMA.64x96x32.S8.S8 R24, gdesc[UR8], R24, gsb0
FLOAT8_24 = (0x01600000041879F3, 0x000FE60008000818)  # QGMMA.64x96x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24, gsb0
BEGIN = (0x00000000000079C5, 0x000FE20000000000)  # WARPGROUP.ARRIVE
WAIT_ALL = (0x00008000000079C5, 0x000FE40000010000)  # WARPGROUP.DEPBAR.LE gsb0, 0x0
WAIT_BUT_ONE = (0x00008000000079C5, 0x000FE40000010100)  # WARPGROUP.DEPBAR.LE gsb0, 0x1


def pack(first: int, second: int) -> tuple[int, int]:
    """F2FP.F16.F32.PACK_AB R0, R(first), R(second)"""
    return 0x23E | 0x7000 | first << 24 | second << 32, 0x000FE200000000FF


def cubin(*instructions: tuple[int, int]) -> bytes:
    """Return an ELF-64 file with one kernel of these instructions."""
    names = b"\0.shstrtab\0.text.kernel\0"
    code = b"".join(struct.pack("<QQ", *one) for one in instructions)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HH", header, 0x3C, 3, 1)
    start = 64 + 3 * 64

    def section(name: bytes, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQ", names.index(name), 1, 0, 0, offset, size).ljust(64, b"\0")

    table = (
        bytes(64) + section(b".shstrtab", start, len(names)) + section(b".text.kernel", start + len(names), len(code))
    )
    return bytes(header) + table + names + code


def test_conversion_before_the_wait_is_an_early_read_and_one_after_it_is_not() -> None:
    assert count_early_reads(cubin(BEGIN, END_GROUP_24, pack(55, 54), WAIT_ALL, pack(53, 52))) == 1


def test_wait_for_the_group_before_does_not_make_the_last_one_complete() -> None:
    groups = (BEGIN, MULTIPLY_24, END_GROUP_24, BEGIN, MULTIPLY_24, END_GROUP_24)
    assert count_early_reads(cubin(*groups, WAIT_BUT_ONE, pack(25, 24), pack(27, 26), WAIT_ALL)) == 2


def test_older_groups_are_complete_at_a_wait_that_leaves_the_newest() -> None:
    code = (END_GROUP_56, END_GROUP_24, WAIT_BUT_ONE, pack(57, 56), pack(25, 24), WAIT_ALL)
    assert count_early_reads(cubin(*code)) == 1


def test_accumulators_are_as_many_as_the_instruction_has_columns() -> None:
    code = (WIDE_24, pack(119, 118), pack(121, 120), pack(23, 22), WAIT_ALL)
    assert count_early_reads(cubin(*code)) == 1


def to_float(source: int) -> tuple[int, int]:
    """I2FP.F32.S32 R0, R(source)"""
    return 0x245 | 0x7000 | source << 32, 0x000FE40000201400


def add(first: int, second: int) -> tuple[int, int]:
    """IMAD.IADD R0, R(first), 0x1, R(second)"""
    return 0x824 | 0x7000 | first << 24 | 1 << 32, 0x002FC400078E0200 | second


def test_accumulators_of_integers_are_as_many_as_the_instruction_has_columns() -> None:
    assert count_early_reads(cubin(INTEGER_24, to_float(71), to_float(72), to_float(23), WAIT_ALL, to_float(24))) == 1
    assert count_early_reads(cubin(INTEGER_24, add(24, 100), add(100, 71), add(100, 72), WAIT_ALL)) == 2


def test_accumulators_of_float8_are_as_many_as_the_instruction_has_columns() -> None:
    assert count_early_reads(cubin(FLOAT8_24, pack(71, 72), pack(72, 73), WAIT_ALL, pack(24, 25))) == 1


def test_multiplications_may_follow_each_other_without_a_wait() -> None:
    assert count_early_reads(cubin(MULTIPLY_24, END_GROUP_24, MULTIPLY_24, END_GROUP_24, WAIT_ALL)) == 0


ONE = 'extern "C" __global__ void one(float* x) { *x += 1.0f; }'


def test_kernel_without_wgmma_has_no_early_reads() -> None:
    data = CubinRequest(ONE, "sm_90a", find_toolchain()).compile()
    assert count_early_reads(data) == 0


def test_compiler_that_makes_such_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compiler, "count_early_reads", lambda _: 3)
    with pytest.raises(LoweringError, match=r"3 instructions read results of wgmma before the wait .* another version"):
        CubinRequest(ONE, "sm_90a", find_toolchain()).compile()
