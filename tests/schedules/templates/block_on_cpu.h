// What the source of a kernel asks of a GPU, on one thread of a CPU; see block_on_cpu.py.
#include <math.h>
#include <string.h>
#include <ucontext.h>

#include <bit>
#include <deque>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define RELAXTUNE_MMA_f16
#define RELAXTUNE_MMA_e4m3_e4m3
#define RELAXTUNE_MMA_e4m3_e5m2
#define RELAXTUNE_MMA_e5m2_e4m3
#define RELAXTUNE_MMA_e5m2_e5m2
#define RELAXTUNE_HALVES_e4m3
#define RELAXTUNE_HALVES_e5m2
#define RELAXTUNE_LDMATRIX
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
typedef unsigned int uint32_t;
typedef _Float16 half;
typedef unsigned short nv_bfloat16;
typedef unsigned char __nv_fp8_e4m3;
typedef unsigned char __nv_fp8_e5m2;
struct half2 { half x, y; };
struct uint2 { uint x, y; };
struct uint4 { uint x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Place { unsigned x, y, z; };
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __expf(float x) { return expf(x); }
template <class T> inline T atomicAdd(T* at, T value) { T before = *at; *at += value; return before; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float max(float a, float b) { return a > b ? a : b; }
inline float min(float a, float b) { return a < b ? a : b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __half2float(half x) { return x; }
inline half __ushort_as_half(unsigned short bits) { return std::bit_cast<half>(bits); }
template <class T> inline void __stcg(T* to, T value) { *to = value; }
template <class T> inline T __ldcg(T* from) { return *from; }

// A copy that is on its way until its group is waited for.
struct Copy { char* to; const char* from; int size; };
struct Thread {
  Place at;
  unsigned block;  // Of the cluster.
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  std::vector<Copy> copies;
  std::deque<std::vector<Copy>> groups;
  unsigned operations = 0;
  bool done = false;
};
// Threads that wait at a barrier, and how often all have come.
struct Barrier { int waiting = 0; unsigned turn = 0; };
// What the lanes of a warp show each other: the next operation has the other half.
struct Warp { Barrier barrier; unsigned shown[2][32][8]; };

static std::vector<Thread> threads;
static std::vector<Warp> warps;
static std::vector<std::vector<Barrier>> barriers;
static Barrier of_cluster;
static Thread* current;
static ucontext_t scheduler;
static Place threadIdx, blockIdx;
static std::vector<std::vector<char>> memories;
#define shared_memory memories[current->block]
static size_t block_threads;
// Whether a thread came further since all had their turn; whether one gave up.
static bool moved, trapped;

inline void __trap() {
  trapped = true;
  setcontext(&scheduler);
}
inline void wait_at(Barrier& barrier, int count) {
  unsigned turn = barrier.turn;
  if (++barrier.waiting == count) {
    barrier.waiting = 0;
    ++barrier.turn;
    moved = true;
  }
  while (barrier.turn == turn) swapcontext(&current->context, &scheduler);
}
inline Warp& own_warp() { return warps[(current->block * block_threads + threadIdx.x) / 32]; }
// Shows words to the warp; returns those of all lanes.
inline unsigned (*show(const unsigned* words, int count))[8] {
  auto* shown = own_warp().shown[current->operations++ % 2];
  memcpy(shown[threadIdx.x % 32], words, 4 * count);
  wait_at(own_warp().barrier, 32);
  return shown;
}
inline void __syncwarp() { wait_at(own_warp().barrier, 32); }
inline void __syncthreads() { wait_at(barriers[current->block][0], block_threads); }
inline void relaxtune_sampling_sync(int count) { wait_at(barriers[current->block][1], count); }
inline void relaxtune_sampling_arrive() {}
inline void relaxtune_sampling_wait() { wait_at(of_cluster, threads.size()); }
inline unsigned long long relaxtune_sampling_peer(const void* at, int rank) {
  return (unsigned long long)(memories[rank].data() + ((const char*)at - shared_memory.data()));
}
inline void tvm_builtin_ptx_bar_sync_count_sync(unsigned number, unsigned count) { wait_at(barriers[current->block][number], count); }
template <class T> inline T __shfl_sync(unsigned, T value, int lane, int = 32) {
  unsigned words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
  memcpy(&value, show(words, sizeof(T) / 4)[lane], sizeof(T));
  return value;
}
template <class T> inline T __shfl_xor_sync(unsigned all, T value, int mask) {
  return __shfl_sync(all, value, threadIdx.x % 32 ^ mask);
}
template <class T> inline T __shfl_up_sync(unsigned all, T value, int by) {
  int lane = threadIdx.x % 32;
  return __shfl_sync(all, value, lane < by ? lane : lane - by);
}
inline int __any_sync(unsigned, int value) {
  unsigned word = value != 0;
  auto* shown = show(&word, 1);
  for (int lane = 0; lane < 32; ++lane)
    if (shown[lane][0]) return 1;
  return 0;
}
inline int tvm_builtin_cluster_ctaid_x() { return current->block; }
inline void tvm_builtin_ptx_griddepcontrol_wait() {}
inline void tvm_builtin_ptx_griddepcontrol_launch_dependents() {}
inline unsigned __cvta_generic_to_shared(const void* at) { return (const char*)at - shared_memory.data(); }

inline void copy_async(void* to, const void* from, long long offset, int size) {
  current->copies.push_back({(char*)to, (const char*)from + offset, size});
}
inline void relaxtune_copy_async_lines(void* to, const void* from, long long offset, int size) {
  copy_async(to, from, offset, size);
}
inline void relaxtune_copies_end_group() {
  current->groups.push_back(current->copies);
  current->copies.clear();
}
inline void wait_for_copies(size_t pending) {
  for (; current->groups.size() > pending; current->groups.pop_front())
    for (const Copy& copy : current->groups.front()) {
      memset(copy.to, 0, 16);
      memcpy(copy.to, copy.from, copy.size);
    }
}
// PTX ISA 9.0, "ldmatrix": lane l has row l % 8 of matrix l / 8; of each matrix, row l / 4 and its columns of 2 * (l % 4).
inline void load_matrices(unsigned* r, unsigned at, bool turned) {
  int lane = threadIdx.x % 32;
  auto* shown = show(&at, 1);
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      int row = turned ? lane % 4 * 2 + j : lane / 4, column = turned ? lane / 4 : lane % 4 * 2 + j;
      memcpy((char*)(r + i) + 2 * j, shared_memory.data() + shown[8 * i + row][0] + 2 * column, 2);
    }
}
inline void relaxtune_ldmatrix(unsigned* r, unsigned at) { load_matrices(r, at, false); }
inline void relaxtune_ldmatrix_trans(unsigned* r, unsigned at) { load_matrices(r, at, true); }
// PTX ISA 9.0, "Matrix Fragments for mma.m16n8k16 with floating point type".
inline void relaxtune_mma_f16(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  unsigned words[6] = {a0, a1, a2, a3, b0, b1};
  auto* shown = show(words, 6);
  int lane = threadIdx.x % 32;
  for (int index = 0; index < 4; ++index) {
    int row = lane / 4, column = lane % 4 * 2 + index % 2;
    for (int k = 0; k < 16; ++k) {
      half a, b;
      memcpy(&a, (char*)&shown[row * 4 + k % 8 / 2][index / 2 + k / 8 * 2] + k % 2 * 2, 2);
      memcpy(&b, (char*)&shown[column * 4 + k % 8 / 2][4 + k / 8] + k % 2 * 2, 2);
      d[index] += (float)a * (float)b;
    }
  }
}
inline float value_of(unsigned char byte, bool e4m3) {
  unsigned exponent = e4m3 ? byte >> 3 & 15 : byte >> 2 & 31, fraction = byte & (e4m3 ? 7 : 3);
  int bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  float value = exponent ? ldexpf(1 + ldexpf(fraction, -bits), exponent - bias) : ldexpf(fraction, 1 - bias - bits);
  if (e4m3 ? (byte & 127) == 127 : exponent == 31) value = !e4m3 && fraction == 0 ? INFINITY : NAN;
  return byte & 128 ? -value : value;
}
// PTX ISA 9.0, "Matrix Fragments for mma.m16n8k32"; of each addend, the bits from 13 below the largest one's first on
// (arXiv:2411.10958, section 3.3).
inline void mma_float8(float* d, const unsigned* words, bool a_e4m3, bool b_e4m3) {
  auto* shown = show(words, 6);
  int lane = threadIdx.x % 32;
  for (int index = 0; index < 4; ++index) {
    int row = lane / 4, column = lane % 4 * 2 + index % 2, most = -200;
    float addends[33] = {d[index]};
    for (int k = 0; k < 32; ++k)
      addends[k + 1] = value_of(shown[row * 4 + k % 16 / 4][index / 2 + k / 16 * 2] >> k % 4 * 8, a_e4m3) *
                       value_of(shown[column * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8, b_e4m3);
    for (float addend : addends)
      if (addend != 0) most = max(most, ilogbf(addend));
    d[index] = 0;
    for (float addend : addends) d[index] += ldexpf(truncf(ldexpf(addend, 13 - most)), most - 13);
  }
}
#define MMA_FLOAT8(a, b)                                                                                           \
  inline void relaxtune_mma_##a##_##b(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, \
                                      unsigned b1) {                                                             \
    unsigned words[6] = {a0, a1, a2, a3, b0, b1};                                                                \
    mma_float8(d, words, #a[1] == '4', #b[1] == '4');                                                            \
  }
MMA_FLOAT8(e4m3, e4m3)
MMA_FLOAT8(e4m3, e5m2)
MMA_FLOAT8(e5m2, e4m3)
MMA_FLOAT8(e5m2, e5m2)
inline unsigned halves_of(unsigned bytes, bool e4m3) {
  half pair[2] = {(half)value_of(bytes, e4m3), (half)value_of(bytes >> 8, e4m3)};
  unsigned word;
  memcpy(&word, pair, 4);
  return word;
}
inline unsigned relaxtune_halves_e4m3(unsigned bytes) { return halves_of(bytes, true); }
inline unsigned relaxtune_halves_e5m2(unsigned bytes) { return halves_of(bytes, false); }
inline void tvm_builtin_cuda_warp_sync() { __syncwarp(); }
inline unsigned tvm_builtin_cuda_cvta_generic_to_shared(void* at) { return __cvta_generic_to_shared(at); }
inline void tvm_builtin_ptx_ld_vec_global_v4_u32(uint& a, uint& b, uint& c, uint& d, const void* at) {
  const uint* from = (const uint*)at;
  a = from[0], b = from[1], c = from[2], d = from[3];
}
inline void tvm_builtin_ptx_ld_vec_global_v2_f32(float& a, float& b, const void* at) {
  a = ((const float*)at)[0], b = ((const float*)at)[1];
}
inline void tvm_builtin_ptx_st_vec_shared_v4_u32(unsigned at, uint a, uint b, uint c, uint d) {
  uint words[4] = {a, b, c, d};
  memcpy(shared_memory.data() + at, words, 16);
}
inline void tvm_builtin_ptx_ld_vec_shared_v4_u32(uint& a, uint& b, uint& c, uint& d, unsigned at) {
  const uint* from = (const uint*)(shared_memory.data() + at);
  a = from[0], b = from[1], c = from[2], d = from[3];
}
inline void tvm_builtin_ptx_st_vec_global_v4_u32(void* to, uint a, uint b, uint c, uint d) {
  uint words[4] = {a, b, c, d};
  memcpy(to, words, 16);
}
inline void tvm_builtin_ptx_st_shared_u32(unsigned at, uint word) { memcpy(shared_memory.data() + at, &word, 4); }
inline void tvm_builtin_ptx_ld_global_u32(uint& word, const void* at) { memcpy(&word, at, 4); }
inline float relaxtune_unpack_f16(unsigned packed, int shift) {
  unsigned short bits = packed >> shift;
  half value;
  memcpy(&value, &bits, 2);
  return value;
}
inline float relaxtune_exp2(float x) { return exp2f(x); }
inline float relaxtune_reciprocal(float x) { return 1 / x; }
inline unsigned relaxtune_pack_f16(float low, float high) {
  half pair[2] = {(half)low, (half)high};
  unsigned word;
  memcpy(&word, pair, 4);
  return word;
}
inline void relaxtune_copy_async(void* to, const void* from, long long offset, int size) {
  copy_async(to, from, offset, size);
}
inline void relaxtune_load_2(void* to, const void* from) { memcpy(to, from, 2); }
inline void relaxtune_load_16(void* to, const void* from) { memcpy(to, from, 16); }
inline void relaxtune_load_4(void* to, const void* from) { memcpy(to, from, 4); }
inline void relaxtune_load_8(void* to, const void* from) { memcpy(to, from, 8); }

static void begin();
// Returns a block whose threads wait for ever or gave up, -1 where none does. Blocks of a cluster run together.
static int run_blocks(int blocks, int count, int bytes, int cluster) {
  trapped = false;
  block_threads = count;
  for (int first = 0; first < blocks; first += cluster) {
    threads = std::vector<Thread>(cluster * count);
    warps = std::vector<Warp>(cluster * count / 32);
    barriers.assign(cluster, std::vector<Barrier>(16));
    of_cluster = Barrier();
    // What nothing wrote is no number.
    memories.assign(cluster, std::vector<char>(bytes, (char)0xff));
    for (int number = 0; number < cluster * count; ++number) {
      Thread& thread = threads[number];
      thread.at = {(unsigned)(number % count), 0, 0};
      thread.block = number / count;
      // Not set to zero: most of it is never touched.
      thread.stack.reset(new char[1 << 17]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = 1 << 17;
      thread.context.uc_link = &scheduler;
      makecontext(&thread.context, begin, 0);
    }
    for (int left = cluster * count; left > 0;) {
      moved = false;
      for (Thread& thread : threads) {
        if (thread.done) continue;
        current = &thread;
        threadIdx = thread.at;
        blockIdx = {(unsigned)first + thread.block, 0, 0};
        swapcontext(&scheduler, &thread.context);
        left -= thread.done;
        moved |= thread.done;
      }
      if (trapped || !moved) return first;
    }
  }
  return -1;
}
