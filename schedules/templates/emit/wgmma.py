"""Multiplications of a warpgroup: 64 rows of A by columns of B, both in shared memory, or A in registers.

A tile lies in shared memory in rows of 32, 64 or 128 bytes, swizzled as TMA writes them. It starts at a multiple of
1024 bytes; so does a pool: on sm_90 the system reserves the first KiB of a block's shared memory, and kernels have no
static shared memory. Its descriptor holds the address and byte offsets in units of 16 bytes. "K-major" is a tile whose
rows run along K; "MN-major" one whose rows run along M or N (16-bit operands only). PTX ISA 9.0, "Asynchronous
Warpgroup Level Matrix Multiply-Accumulate Instructions": shapes, register fragments, descriptors, swizzle modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.barriers import uniform
from relaxtune.schedules.templates.emit.device_function import device_call, instruction
from relaxtune.schedules.templates.emit.registers import all_of, in_register
from relaxtune.schedules.tir.expressions import dtype_of

#: Threads of a warpgroup, and rows that one instruction makes.
WARPGROUP, ROWS = 128, 64
#: Bytes of a swizzled row of a K-major tile, those of it that one instruction reads, and units of 16 bytes of both.
ROW_BYTES, STEP_BYTES = 128, 32
ROW_UNITS, STEP_UNITS = ROW_BYTES // 16, STEP_BYTES // 16

# Keeps the compiler from moving a use of an accumulator above the wait for the wgmma that writes it.
_PINS = {
    "float32": """
__forceinline__ __device__ void relaxtune_pin(float& value) { asm volatile("" : "+f"(value) :: "memory"); }
""",
    "uint32": """
__forceinline__ __device__ void relaxtune_pin_integer(unsigned& value) { asm volatile("" : "+r"(value) :: "memory"); }
""",
}
_DESCRIPTOR = """
__forceinline__ __device__ unsigned long long relaxtune_descriptor(int low, unsigned high) {
  return static_cast<unsigned long long>(high) << 32 | static_cast<unsigned>(low);
}
"""


class Descriptor:
    """A matrix descriptor whose low half is held in a register; the default is that of a K-major tile.

    An offset in units of 16 bytes may be added to the low half, which is uniform: 32-bit sums stay in uniform registers
    where those of whole descriptors did not, which took 430 cycles for four instructions of 64 columns.

    `address` is in shared memory, at a multiple of the swizzle's period; `leading` and `stride` are the byte offsets of
    PTX's descriptor, in units of 16 bytes: of a K-major tile, `stride` is from 8 rows to the next. `swizzle` is TMA's
    mode: 1, 2 and 3 for rows of 32, 64 and 128 bytes.
    """

    def __init__(self, address: tirx.Expr, leading: int = 1, stride: int = 8 * ROW_UNITS, swizzle: int = 3) -> None:
        # wgmma numbers the modes the other way round, in the topmost two bits.
        self._high = stride | (4 - swizzle) << 30
        window = tirx.Cast("int32", T.cuda.cvta_generic_to_shared(address))
        # In a cluster, the upper bits of an address say whose shared memory it is in.
        self._low = in_register(uniform(((window & 0x3FFFF) >> 4) | (leading << 16)))

    def at(self, offset: tirx.Expr) -> tirx.Expr:
        """Return the descriptor of what lies further by some units of 16 bytes."""
        return device_call(_DESCRIPTOR, self._low + offset, tirx.const(self._high, "uint32"))


def multiply(name: str, products: Iterable[Sequence[tirx.Expr]], modifiers: Sequence[int]) -> None:
    """Emit a group of multiplications by an instruction, not waited for.

    Each has the registers of the sums, A and B (a descriptor, or registers) and whether it adds to the sums.
    `modifiers` are the instruction's operands after these.
    """
    T.evaluate(T.ptx.wgmma.fence.sync.aligned())
    for operands in products:
        T.evaluate(instruction(name)(*operands, *modifiers))
    T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())


def wait_for_products(pending: int, sums: tirx.Var | None = None) -> None:
    """Emit the wait for all groups of multiplications but the last `pending`; no use of `sums` is moved above it."""
    T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(pending))
    for register in [] if sums is None else all_of(sums):
        T.evaluate(device_call(_PINS[dtype_of(register)], register))
