"""Fragments of matrices for `mma.sync`: how they lie in shared memory, are loaded by `ldmatrix`, and multiplied.

A warp multiplies 16 rows of A by 8 columns of B over 16 of K at a time, over 32 of 8-bit operands. PTX ISA 9.0, "Matrix
Fragments for mma.m16n8k16 with floating point type" and "Warp-level matrix load instruction: ldmatrix".
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

#: Elements of 2 bytes in a chunk of 16 bytes.
CHUNK = 8
_LINE_BYTES, _CHUNK_BYTES = 128, 16
#: dtype -> its name in instructions.
MMA_KINDS = {"float16": "f16", "bfloat16": "bf16"}
#: 8-bit dtype -> its name in instructions, which sum in int32.
BYTE_KINDS = {"int8": "s8", "uint8": "u8"}
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
__forceinline__ __device__ void relaxtune_mma_{kind}(unsigned* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                     unsigned b0, unsigned b1) {{
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.{a}.{b}.s32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, "
               "{{%8, %9}}, {{%0, %1, %2, %3}};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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
_ADDRESS_SOURCE = """
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
    if a not in BYTE_KINDS:
        return f"relaxtune_mma_{MMA_KINDS[a]}", mma_source(a)
    kind = f"{BYTE_KINDS[a]}_{BYTE_KINDS[b]}"
    return f"relaxtune_mma_{kind}", _BYTE_MMA.format(kind=kind, a=BYTE_KINDS[a], b=BYTE_KINDS[b])


def swizzle(row: tirx.Expr, width: int, together: int = 1) -> tirx.Expr:
    """Return what the number of a chunk is combined with (exclusive or) in a row of `width` chunks.

    What is read at a time then lies in different banks: a chunk of 8 rows, as `ldmatrix` reads, or some chunks
    `together` of fewer rows. Rows of more than 8 chunks have a multiple.
    """
    rows_a_line = max(1, _LINE_BYTES // (width * _CHUNK_BYTES))
    return row // rows_a_line % (min(width, _LINE_BYTES // _CHUNK_BYTES) // together) * together


def chunk_place(row: tirx.Expr, chunk: tirx.Expr, width: int, elements: int = CHUNK, together: int = 1) -> tirx.Expr:
    """Return the element of a tile, with rows of `width` chunks of some elements, at which a chunk starts."""
    return row * (width * elements) + tirx.bitwise_xor(chunk, swizzle(row, width, together)) * elements


def shared_address(pointer: tirx.Expr) -> tirx.Expr:
    """Return an address in shared memory as `ldmatrix` takes it, uint32."""
    return T.cuda.func_call("relaxtune_shared_address", pointer, source_code=_ADDRESS_SOURCE, return_type="uint32")
