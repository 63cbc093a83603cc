"""What the tests read from a cubin: machine instructions, registers and stack of its kernels."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tvm_ffi

from relaxtune.pipeline.codegen.cuda_compiler import COMPILE_CALLBACK, cuda_compiler

# Low 12 bits of a 16-byte instruction, as nvdisasm 12.8 and 13.0 print them for sm_90.
WGMMA = 0x9F0
WGMMA_INTEGER = 0x9F1
WGMMA_FLOAT8 = 0x9F3
# With operand A in registers.
WGMMA_FROM_REGISTERS = 0xDF0
# What begins and waits for them.
WARPGROUP = 0x9C5
TMA_LOAD = 0x5B4
TMA_LOAD_MULTICAST = 0x3B4
MMA_SYNC = 0x23C
# IMMA
MMA_INTEGER = 0x237
# QMMA
MMA_FLOAT8 = 0x27A
# FFMA
MULTIPLY_ADD = 0x223
# LDGSTS
COPY_ASYNC = 0xFAE
LOCAL_LOAD = 0x983
# R2UR
MOVE_TO_UNIFORM = 0x2CA
LOCAL_STORE = 0x387
# LDG
LOAD = 0x981
# griddepcontrol.launch_dependents and .wait
LAUNCH_DEPENDENTS = 0x82D
WAIT = 0x82E

# Attributes of section .nv.info.
_REGISTERS = 0x2F04
_FRAME_BYTES = 0x1104


@dataclass(frozen=True)
class Cubin:
    """Of its only kernel: the opcodes in their order, registers a thread, bytes of stack a thread."""

    opcodes: tuple[int, ...]
    registers: int
    frame_bytes: int

    def count(self, opcode: int) -> int:
        return self.opcodes.count(opcode)


def read_cubin(data: bytes) -> Cubin:
    """Return what is in a cubin with one kernel (ELF-64: section headers of 64 bytes, `e_shoff` at 0x28)."""
    sections, code = _sections(data), kernel_code(data)
    opcodes = tuple(struct.unpack_from("<H", code, position)[0] & 0xFFF for position in range(0, len(code), 16))
    attributes = _attributes(sections[".nv.info"])
    return Cubin(opcodes, attributes[_REGISTERS], attributes[_FRAME_BYTES])


def kernel_code(data: bytes) -> bytes:
    """Return the machine code of a cubin's only kernel, 16 bytes an instruction."""
    (code,) = (content for name, content in _sections(data).items() if name.startswith(".text."))
    return code


def _sections(data: bytes) -> dict[str, bytes]:
    (table,) = struct.unpack_from("<Q", data, 0x28)
    count, names = struct.unpack_from("<HH", data, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", data, table + 64 * index) for index in range(count)]
    strings = headers[names][4]
    found = {}
    for name, _, _, _, offset, size in headers:
        text = data[strings + name : data.index(0, strings + name)].decode()
        found[text] = data[offset : offset + size]
    return found


def _attributes(info: bytes) -> dict[int, int]:
    """Return the value of each attribute, which has a key, a size, a symbol and a value."""
    found, position = {}, 0
    while position < len(info):
        key, size, _, value = struct.unpack_from("<HHII", info, position)
        found[key] = value
        position += 4 + size
    return found


@contextmanager
def captured_cubins(arch: str) -> Iterator[list[bytes]]:
    """Compile CUDA inside the block without a GPU, and collect what came out."""
    with cuda_compiler(arch):
        compile_source = tvm_ffi.get_global_func(COMPILE_CALLBACK)
        found: list[bytes] = []

        def capture(code: str) -> bytes:
            found.append(bytes(compile_source(code)))
            return found[-1]

        # `cuda_compiler` puts back what it found.
        tvm_ffi.register_global_func(COMPILE_CALLBACK, capture, override=True)
        yield found
