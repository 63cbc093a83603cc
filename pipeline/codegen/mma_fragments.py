"""What TVM's calls of CUDA's `mma.h` mean where NVRTC compiles: `ldmatrix` and `mma.sync` m16n8k16.

NVRTC's packages have the outer half of that header only. This is the part that `schedules.rules.tensor_tile` needs, for
tiles of 16 x 16 x 16 of float16 or bfloat16 in rows, summed in float32, from compute capability 8.0 on. A fragment is
what the instruction takes (PTX ISA 9.0, "Matrix Fragments for mma.m16n8k16 with floating point type"): two
instructions side by side make 16 columns.
"""

from __future__ import annotations

HEADER = "mma.h"
TEXT = r"""
#pragma once
namespace nvcuda { namespace wmma {
struct matrix_a; struct matrix_b; struct accumulator; struct row_major; struct col_major;
enum layout_t { mem_row_major, mem_col_major };
template <typename Use, int M, int N, int K, typename T, typename Layout = void> struct fragment {
  unsigned x[4];
};
template <int M, int N, int K> struct fragment<accumulator, M, N, K, float, void> { float x[8]; };

// Rows 0 to 15 of the tile by lane, its left half for lanes below 16: four matrices of 8 x 8.
template <typename T> __device__ inline unsigned tile_row(const T *tile, unsigned stride) {
  unsigned lane = threadIdx.x & 31;
  return static_cast<unsigned>(__cvta_generic_to_shared(tile + (lane & 15) * stride + (lane >> 4) * 8));
}
template <int M, int N, int K, typename T>
__device__ inline void load_matrix_sync(fragment<matrix_a, M, N, K, T, row_major> &f, const T *tile, unsigned stride) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "r"(tile_row(tile, stride)) : "memory");
}
template <int M, int N, int K, typename T>
__device__ inline void load_matrix_sync(fragment<matrix_b, M, N, K, T, row_major> &f, const T *tile, unsigned stride) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "r"(tile_row(tile, stride)) : "memory");
}
template <int M, int N, int K>
__device__ inline void fill_fragment(fragment<accumulator, M, N, K, float> &f, float value) {
  for (int i = 0; i < 8; ++i) f.x[i] = value;
}
#define RELAXTUNE_MMA(NAME, TYPE)                                                                                   \
  __device__ inline void NAME(float *d, const unsigned *a, const unsigned *b) {                                    \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "                                    \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                 \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                               \
  }
RELAXTUNE_MMA(multiply_half, "f16")
RELAXTUNE_MMA(multiply_bfloat16, "bf16")
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
"""
