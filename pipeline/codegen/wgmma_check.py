"""Whether the machine code of a Hopper kernel reads the results of wgmma before it has waited for them.

wgmma works in the background: its accumulators hold nothing until the wait for its group. ptxas (seen in 13.0 and 13.5)
lets a conversion of accumulators move above that wait where another wait, for the group before, lies between the
multiplication and it: a kernel that converts results which are only partly there, and is wrong on a GPU although its
CUDA and its PTX are right. Kernels are written so that it does not happen; this looks at what came out.

Encodings: as nvdisasm 13.5 prints the 16-byte instructions of sm_90a; compared with its text over 170 kernels, and of
8-bit operands over an instruction of each N from 8 to 256.
"""

from __future__ import annotations

import struct

# Low 12 bits of an instruction, with A in shared memory and in registers: HGMMA of 16 bits, QGMMA of float8, IGMMA of
# 8-bit integers.
_INTEGER_WGMMA = frozenset({0x9F1, 0xDF1})
_WGMMA = frozenset({0x9F0, 0xDF0, 0x9F3, 0xDF3}) | _INTEGER_WGMMA
_WARPGROUP = 0x9C5
# Of WARPGROUP's instructions, the wait: until no more groups are pending than 8 bits from bit 72 on say.
_WAIT_BIT = 1 << 47
# In bits 84 to 86 of a wgmma: it ends no group.
_OPEN = 7
# Instructions that read registers as accumulators are read -> where the registers' numbers start. With an operand that
# is an immediate, a constant or uniform, the opcode is another.
_A, _B, _C = 24, 32, 64
_READS = {
    0x23E: (_A, _B),  # F2FP: two float32 to a pair of halves
    0x221: (_A, _B),  # FADD
    0x421: (_A,),
    0x821: (_A,),
    0xC21: (_A,),
    0x220: (_A, _B),  # FMUL
    0x820: (_A,),
    0xC20: (_A,),
    0x223: (_A, _B, _C),  # FFMA
    0x423: (_A, _C),
    0x823: (_A, _C),
    0xC23: (_A, _C),
    0x209: (_A, _B),  # FMNMX
    0x809: (_A,),
    0x208: (_A, _B),  # FSEL
    0x808: (_A,),
    0x20B: (_A, _B),  # FSETP
    0x80B: (_A,),
    0xC0B: (_A,),
    0x308: (_B,),  # MUFU
    0x202: (_B,),  # MOV
    0x224: (_A, _B, _C),  # IMAD, which moves and adds registers too
    0x824: (_A, _C),
    0xC24: (_A, _C),
    0x210: (_A, _B, _C),  # IADD3
    0x810: (_A, _C),
    0xC10: (_A, _C),
    0x836: (_A,),  # VIADD
    0x245: (_B,),  # I2FP
    0x306: (_B,),  # I2F
    0x589: (_A,),  # SHFL
    0xF89: (_A,),
    0x388: (_B,),  # STS
    0x986: (_B,),  # STG
}


def count_early_reads(cubin: bytes) -> int:
    """Return how many instructions read accumulators of wgmma that are still being computed, over all kernels.

    Instructions are followed in the order in which they stand; branches are not taken. Only code for sm_90a
    has any.
    """
    # ELF-64 sections named .text.*, headers of 64 bytes, `e_shoff` at 0x28.
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names = struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * index) for index in range(count)]
    strings = headers[names][4]
    return sum(
        _count(cubin[offset : offset + size])
        for name, _, _, _, offset, size in headers
        if cubin.startswith(b".text.", strings + name)
    )


def _count(code: bytes) -> int:
    early = 0
    # Accumulators of the groups that are pending, the oldest first; the last one may still grow.
    pending: list[set[int]] = [set()]
    for low, high in struct.iter_unpack("<QQ", code):
        opcode = low & 0xFFF
        if opcode in _WGMMA:
            first, eights = low >> 16 & 0xFF, _eights(opcode, low >> 53 & 0x3F)
            pending[-1].update(range(first, first + 4 * eights))
            if high >> 20 & 7 != _OPEN:
                pending.append(set())
        elif opcode == _WARPGROUP and low & _WAIT_BIT:
            keep = (high >> 8 & 0xFF) + 1
            pending = pending[-keep:]
        elif opcode in _READS and any(pending):
            whole = low | high << 64
            read = {whole >> start & 0xFF for start in _READS[opcode]}
            early += any(not read.isdisjoint(group) for group in pending)
    return early


def _eights(opcode: int, field: int) -> int:
    """Return how many times 8 columns an instruction has.

    Of integers, the field counts in threes through 8, 16, 24, 32, 48, 64 and so on.
    """
    if opcode not in _INTEGER_WGMMA:
        return field + 1
    place = field // 3
    return place + 1 if place < 4 else 2 * place - 2
