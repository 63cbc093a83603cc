"""Fragments of matrices for `mma.sync`: how they lie in shared memory, are loaded by `ldmatrix`, and multiplied.

A warp multiplies 16 rows of A by 8 columns of B over 16 of K at a time, over 32 of 8-bit operands. PTX ISA 9.0, "Matrix
Fragments for mma.m16n8k16 with floating point type" and "Warp-level matrix load instruction: ldmatrix".
"""

from __future__ import annotations

from tvm import tirx

from relaxtune.schedules.templates.emit.device_function import device_call

#: Elements of 2 bytes in a chunk of 16 bytes.
CHUNK = 8
_LINE_BYTES, _CHUNK_BYTES = 128, 16
#: dtype -> its name in instructions.
MMA_KINDS = {"float16": "f16", "bfloat16": "bf16"}
#: 8-bit dtype -> its name in instructions, which sum in int32.
BYTE_KINDS = {"int8": "s8", "uint8": "u8"}
#: 8-bit float -> its name in instructions, which sum in float32 in name: tensor cores keep fewer bits
#: (`schedules.templates.gemm_sm90.plan`; Ada's 13, Zhang et al., "SageAttention2", arXiv:2411.10958, section 3.3).
FLOAT8_KINDS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
# More than one function begins with it.
_MMA = """
#ifndef RELAXTUNE_MMA_{kind}
#define RELAXTUNE_MMA_{kind}
__forceinline__ __device__ void relaxtune_mma_{kind}(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                     unsigned b0, unsigned b1) {{
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, "
               "{{%8, %9}}, {{%0, %1, %2, %3}};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}}
#endif
"""
_BYTE_MMA = """
#ifndef RELAXTUNE_MMA_{kind}
#define RELAXTUNE_MMA_{kind}
__forceinline__ __device__ void relaxtune_mma_{kind}({held}* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                     unsigned b0, unsigned b1) {{
  asm volatile("mma.sync.aligned.m16n8k32.row.col.{sum}.{a}.{b}.{sum} {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, "
               "{{%8, %9}}, {{%0, %1, %2, %3}};"
               : "+{kept}"(d[0]), "+{kept}"(d[1]), "+{kept}"(d[2]), "+{kept}"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}}
#endif
"""
# The lower two bytes as halves, exactly.
_HALVES = """
#ifndef RELAXTUNE_HALVES_{kind}
#define RELAXTUNE_HALVES_{kind}
__forceinline__ __device__ unsigned relaxtune_halves_{kind}(unsigned bytes) {{
  unsigned d;
  asm("cvt.rn.f16x2.{kind}x2 %0, %1;" : "=r"(d) : "h"((unsigned short)bytes));
  return d;
}}
#endif
"""
# Four matrices of 8 rows of 16 bytes; lane l has the address of row l % 8 of matrix l / 8.
LDMATRIX_SOURCE = """
#ifndef RELAXTUNE_LDMATRIX
#define RELAXTUNE_LDMATRIX
__forceinline__ __device__ void relaxtune_ldmatrix(unsigned* r, unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__forceinline__ __device__ void relaxtune_ldmatrix_trans(unsigned* r, unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
#endif
"""
_ADDRESS = """
__forceinline__ __device__ unsigned relaxtune_shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}
"""


def mma_source(dtype: str) -> str:
    """Return the source of `relaxtune_mma_f16` or `_bf16`: sums of 16 x 8, in float32, of operands of a dtype."""
    return _MMA.format(kind=MMA_KINDS[dtype])


def mma_function(a: str, b: str) -> tuple[str, str]:
    """Return name and source of a function as `mma_source` gives it, for operands of 8 bits too.

    These are multiplied over 32 of K, and lie as halves do, byte for byte. Integer sums are held as uint32.
    """
    if a in MMA_KINDS:
        return f"relaxtune_mma_{MMA_KINDS[a]}", mma_source(a)
    integer = a in BYTE_KINDS
    kinds = BYTE_KINDS if integer else FLOAT8_KINDS
    held, kept, sums = ("unsigned", "r", "s32") if integer else ("float", "f", "f32")
    kind = f"{kinds[a]}_{kinds[b]}"
    source = _BYTE_MMA.format(kind=kind, a=kinds[a], b=kinds[b], held=held, kept=kept, sum=sums)
    return f"relaxtune_mma_{kind}", source


def halves_source(kind: str) -> str:
    """Return the source of `relaxtune_halves_e4m3` or `_e5m2`: two halves of the lower two bytes of a word."""
    return _HALVES.format(kind=kind)


def swizzle(row: tirx.Expr, width: int, together: int = 1) -> tirx.Expr:
    """Return what the number of a chunk is combined with (exclusive or) in a row of `width` chunks.

    Chunks read at a time then lie in different banks: a chunk of 8 rows, as `ldmatrix` reads, or some chunks
    `together` of fewer rows. Rows of more than 8 chunks have a multiple.
    """
    rows_a_line = max(1, _LINE_BYTES // (width * _CHUNK_BYTES))
    return row // rows_a_line % (min(width, _LINE_BYTES // _CHUNK_BYTES) // together) * together


def chunk_place(row: tirx.Expr, chunk: tirx.Expr, width: int, elements: int = CHUNK, together: int = 1) -> tirx.Expr:
    """Return the element of a tile, with rows of `width` chunks of some elements, at which a chunk starts."""
    return row * (width * elements) + tirx.bitwise_xor(chunk, swizzle(row, width, together)) * elements


def shared_address(pointer: tirx.Expr) -> tirx.Expr:
    """Return an address in shared memory as `ldmatrix` takes it, uint32."""
    return device_call(_ADDRESS, pointer)
