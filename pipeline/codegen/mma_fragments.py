"""What TVM's calls of CUDA's `mma.h` mean: `ldmatrix` and `mma.sync`.

NVRTC's packages have the outer half of that header only, and CUDA's own does not say what each register holds. This
is the part that `schedules.search.tensor_tile` needs, for tiles of 16 x 16 x 16, summed in float32, from compute
capability 8.0 on: float16 and bfloat16 by m16n8k16, float32 in tf32 by m16n8k8. The left operand is stored in rows, the
right one in rows or columns. TVM has no fragments of operands in float32: they are accumulators' to it, and wrapped
strides say which they are. A fragment is what the instructions take (PTX ISA 9.0, "Matrix Fragments for mma.m16n8k16
with floating point type" and "... mma.m16n8k8"): two of them side by side make 16 columns, two of tf32 in a row the 16
of the reduction.
"""

from __future__ import annotations

HEADER = "mma.h"
TEXT = r"""
struct __half;
namespace nvcuda { namespace wmma {
struct matrix_a; struct matrix_b; struct accumulator; struct row_major; struct col_major;
enum layout_t { mem_row_major, mem_col_major };
template <typename Use, int M, int N, int K, typename T, typename Layout = void> struct fragment { unsigned x[4]; };
template <int M, int N, int K> struct fragment<accumulator, M, N, K, float, void> { float x[8]; };

// Four matrices of 8 rows of 16 bytes, the rows by lane; "memory", since other threads wrote them.
template <typename T> __device__ inline void load_rows(T *x, const void *row) {
  unsigned *bits = reinterpret_cast<unsigned *>(x);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))) : "memory");
}
__device__ inline void load_columns(unsigned *x, const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))) : "memory");
}
template <int M, int N, int K, typename T>
__device__ inline void load_matrix_sync(fragment<matrix_a, M, N, K, T, row_major> &f, const T *tile, unsigned stride) {
  unsigned lane = threadIdx.x & 31;
  load_rows(f.x, tile + (lane & 15) * stride + (lane >> 4) * 8);
}
template <int M, int N, int K, typename T>
__device__ inline void load_matrix_sync(fragment<matrix_b, M, N, K, T, row_major> &f, const T *tile, unsigned stride) {
  unsigned lane = threadIdx.x & 31;
  load_columns(f.x, tile + (lane & 15) * stride + (lane >> 4) * 8);
}
template <int M, int N, int K, typename T>
__device__ inline void load_matrix_sync(fragment<matrix_b, M, N, K, T, col_major> &f, const T *tile, unsigned stride) {
  unsigned lane = threadIdx.x & 31;
  load_rows(f.x, tile + ((lane & 7) + (lane >> 4) * 8) * stride + (lane >> 3 & 1) * 8);
}
struct left_stride { unsigned of; };
struct right_stride { unsigned of; };
struct right_turned_stride { unsigned of; };
template <int M, int N, int K>
__device__ inline void load_matrix_sync(fragment<accumulator, M, N, K, float> &f, const float *tile,
                                        left_stride stride) {
  unsigned lane = threadIdx.x & 31;
  const float *row = tile + (lane & 15) * stride.of + (lane >> 4) * 4;
  load_rows(f.x, row);
  load_rows(f.x + 4, row + 8);
}
// ldmatrix turns pairs of bytes only.
template <int M, int N, int K>
__device__ inline void load_matrix_sync(fragment<accumulator, M, N, K, float> &f, const float *tile,
                                        right_stride stride) {
  unsigned lane = threadIdx.x & 31;
  const float *first = tile + (lane & 3) * stride.of + (lane >> 2);
  for (int side = 0; side < 2; ++side)
    for (int part = 0; part < 4; ++part) f.x[4 * side + part] = first[4 * part * stride.of + 8 * side];
}
template <int M, int N, int K>
__device__ inline void load_matrix_sync(fragment<accumulator, M, N, K, float> &f, const float *tile,
                                        right_turned_stride stride) {
  unsigned lane = threadIdx.x & 31;
  const float *row = tile + (lane & 7) * stride.of + (lane >> 3) * 4;
  load_rows(f.x, row);
  load_rows(f.x + 4, row + 8 * stride.of);
}
template <int M, int N, int K>
__device__ inline void fill_fragment(fragment<accumulator, M, N, K, float> &f, float value) {
  for (int i = 0; i < 8; ++i) f.x[i] = value;
}
#define RELAXTUNE_MMA(NAME, SHAPE, TYPE)                                                                            \
  __device__ inline void NAME(float *d, const unsigned *a, const unsigned *b) {                                    \
    asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 "                                   \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                          \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                        \
  }
RELAXTUNE_MMA(multiply_half, "m16n8k16", "f16")
RELAXTUNE_MMA(multiply_bfloat16, "m16n8k16", "bf16")
RELAXTUNE_MMA(multiply_tf32, "m16n8k8", "tf32")
#undef RELAXTUNE_MMA
template <typename T> struct is_half { static constexpr bool value = false; };
template <> struct is_half<__half> { static constexpr bool value = true; };
template <int M, int N, int K, typename T, typename LA, typename LB>
__device__ inline void mma_sync(fragment<accumulator, M, N, K, float> &d, const fragment<matrix_a, M, N, K, T, LA> &a,
                                const fragment<matrix_b, M, N, K, T, LB> &b,
                                const fragment<accumulator, M, N, K, float> &) {
  for (int side = 0; side < 2; ++side) {
    if (is_half<T>::value) multiply_half(d.x + 4 * side, a.x, b.x + 2 * side);
    else multiply_bfloat16(d.x + 4 * side, a.x, b.x + 2 * side);
  }
}
template <int M, int N, int K>
__device__ inline void mma_sync(fragment<accumulator, M, N, K, float> &d,
                                const fragment<accumulator, M, N, K, float> &a,
                                const fragment<accumulator, M, N, K, float> &b,
                                const fragment<accumulator, M, N, K, float> &) {
  for (int side = 0; side < 2; ++side)
    for (int half = 0; half < 2; ++half)
      multiply_tf32(d.x + 4 * side, reinterpret_cast<const unsigned *>(a.x + 4 * half),
                    reinterpret_cast<const unsigned *>(b.x + 4 * side + 2 * half));
}
template <int M, int N, int K>
__device__ inline void store_matrix_sync(float *tile, const fragment<accumulator, M, N, K, float> &f, unsigned stride,
                                         layout_t) {
  unsigned lane = threadIdx.x & 31;
  for (int side = 0; side < 2; ++side)
    for (int half = 0; half < 2; ++half) {
      float *place = tile + ((lane >> 2) + 8 * half) * stride + 8 * side + (lane & 3) * 2;
      place[0] = f.x[4 * side + 2 * half];
      place[1] = f.x[4 * side + 2 * half + 1];
    }
}
}}  // namespace nvcuda::wmma
__device__ inline nvcuda::wmma::left_stride relaxtune_left(unsigned stride) { return {stride}; }
__device__ inline nvcuda::wmma::right_stride relaxtune_right(unsigned stride) { return {stride}; }
__device__ inline nvcuda::wmma::right_turned_stride relaxtune_right_turned(unsigned stride) { return {stride}; }
"""


def with_fragments(code: str) -> str:
    """Return TVM's CUDA source with this in place of CUDA's header, for nvcc, which would find its own."""
    return code.replace(f"#include <{HEADER}>", TEXT)
