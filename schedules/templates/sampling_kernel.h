namespace PARTS {MEETING
__forceinline__ __device__ void relaxtune_sampling_meet() {
  relaxtune_sampling_arrive();
  relaxtune_sampling_wait();
}
__forceinline__ __device__ void relaxtune_sampling_sync(int threads) {
  asm volatile("bar.sync 1, %0;" :: "r"(threads) : "memory");
}
#define PEER(at, rank) ((decltype(&(at)))relaxtune_sampling_peer(&(at), rank))
typedef unsigned long long relaxtune_u64;
struct relaxtune_Sampling {
  relaxtune_u64 warp_best[32], best[PEERS], parts[32], sums[2][PEERS], below, weight, goal;
  float filters[4], warp_top[32], warp_mass[32], top[PEERS], mass[PEERS];
  unsigned digits[2][2][256];  // The lower and the upper halves of sums; two of each, used by turns.
  double random;
  int counts[PEERS], digit, listed;
  float list_x[LIST];
  int list_v[LIST];
};
static_assert(sizeof(relaxtune_Sampling) <= SHARED_BYTES, "SHARED_BYTES");
__forceinline__ __device__ float relaxtune_sampling_mass(float d) {
  const float coefficients[] = rules_EXP_COEFFICIENTS;
  d = d > rules_LOWEST ? d : rules_LOWEST;
  float rounded = __fmaf_rn(d, rules_LOG2_E, rules_ROUNDER), n = __fadd_rn(rounded, -rules_ROUNDER);
  float r = __fmaf_rn(n, -rules_LN2_LOW, __fmaf_rn(n, -rules_LN2_HIGH, d)), e = coefficients[4];
#pragma unroll
  for (int at = 3; at >= 0; --at) e = __fmaf_rn(e, r, coefficients[at]);
  e = __fadd_rn(__fmaf_rn(e, __fmul_rn(r, r), r), 1.0f);
  int power = __float_as_int(rounded) - __float_as_int(rules_ROUNDER) + 127 + rules_MASS_BITS;
  return __fmul_rn(e, __int_as_float(power << 23));
}
__forceinline__ __device__ unsigned relaxtune_sampling_whole(float d) {
  return (unsigned)(int)__fadd_rn(relaxtune_sampling_mass(d), 0.5f);
}
// At most 0, and 0 for the difference of infinities: fminf takes the number where one is none.
__forceinline__ __device__ float relaxtune_sampling_difference(float x, float largest) {
  return fminf(__fadd_rn(x, -largest), 0.0f);
}
__forceinline__ __device__ unsigned relaxtune_sampling_bin(float distance) {
  float at = __fmul_rn(distance, rules_STEPS);
  return at < rules_BINS - 1.0f ? (unsigned)at : rules_BINS - 1;
}
// The bits of x, so ordered that a larger x is a larger number; and x of such bits.
__forceinline__ __device__ unsigned relaxtune_sampling_ascending(float x) {
  unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__forceinline__ __device__ float relaxtune_sampling_number(unsigned ascending) {
  return __uint_as_float(ascending & 0x80000000u ? ascending ^ 0x80000000u : ~ascending);
}
// x / divisor, rounded as a division is: the remainder corrects the product with the reciprocal.
__forceinline__ __device__ float relaxtune_sampling_quotient(float x, float divisor, float reciprocal) {
  float quotient = __fmul_rn(x, reciprocal);
  float corrected = __fmaf_rn(__fmaf_rn(-quotient, divisor, x), reciprocal, quotient);
  return fabsf(quotient) < -NOTHING ? corrected : quotient;
}
__forceinline__ __device__ relaxtune_u64 relaxtune_sampling_share(double part, relaxtune_u64 total) {
  double share = ceil(part * (double)total);
  return share < 1.0 ? 1 : (relaxtune_u64)share;
}
__forceinline__ __device__ double relaxtune_sampling_random(long long seed, long long position) {
  const unsigned factors[] = rules_PHILOX_MULTIPLIERS, added[] = rules_PHILOX_KEYS;
  unsigned word[4] = {(unsigned)position, (unsigned)(position >> 32), 0, 0};
  unsigned key[2] = {(unsigned)seed, (unsigned)(seed >> 32)};
  for (int round = 0; round < rules_PHILOX_ROUNDS; ++round) {
    relaxtune_u64 one = (relaxtune_u64)word[0] * factors[0], other = (relaxtune_u64)word[2] * factors[1];
    word[0] = (unsigned)(other >> 32) ^ word[1] ^ key[0];
    word[1] = (unsigned)other;
    word[2] = (unsigned)(one >> 32) ^ word[3] ^ key[1];
    word[3] = (unsigned)one;
    key[0] += added[0];
    key[1] += added[1];
  }
  return (double)((long long)(word[0] >> 5) * 67108864 + (word[1] >> 6)) * (1.0 / 9007199254740992.0);
}
// The tokens that are left, and who shares the work: `peers` blocks of `threads` threads.
struct relaxtune_Tokens {
  const float* x;
  const int* v;
  int count, first, peers, threads;
};
__forceinline__ __device__ void relaxtune_sampling_meet_of(const relaxtune_Tokens& t) {
  if (t.peers > 1) relaxtune_sampling_meet();
  else relaxtune_sampling_sync(t.threads);
}
__forceinline__ __device__ relaxtune_u64 relaxtune_sampling_warp_sum(relaxtune_u64 sum) {
  for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  return sum;
}
// The sum of a number over all threads, in all of them; `slot` is another one in the next call.
__forceinline__ __device__ relaxtune_u64 relaxtune_sampling_sum(
    relaxtune_Sampling& s, const relaxtune_Tokens& t, relaxtune_u64 sum, int slot, int rank, int thread) {
  sum = relaxtune_sampling_warp_sum(sum);
  if (thread % 32 == 0) s.parts[thread / 32] = sum;
  relaxtune_sampling_sync(t.threads);
  if (thread < 32) {
    sum = relaxtune_sampling_warp_sum(thread < t.threads / 32 ? s.parts[thread] : 0);
    if (thread < t.peers) PEER(s.sums[slot], thread)[0][rank] = sum;
  }
  relaxtune_sampling_meet_of(t);
  sum = 0;
  for (int other = 0; other < t.peers; ++other) sum += s.sums[slot][other];
  return sum;
}
// The token of a sequence that is not greedy, in the first block; -1 in others. Each stage selects a key.
__forceinline__ __device__ int relaxtune_sampling_draw(
    relaxtune_Sampling& s, const float* scores, float largest, float best, int count, int rank, int thread) {
  enum { BY_BIN, TOP_K, TOP_P, TIES, TYPICAL, DRAW };
  const float &top_k = s.filters[0], &top_p = s.filters[1], &min_p = s.filters[2], &typical_p = s.filters[3];
  float mean = 0.0f;
  bool limits = top_k >= 1.0f && top_k < (float)VOCABULARY;
  relaxtune_Tokens t = {scores, nullptr, count, rank * CHUNK, PEERS, THREADS};
  if (limits && top_k <= THREADS) {
    // Where k threads have a token in some bins, these have k tokens: each thread's largest x is enough.
    s.list_x[thread] = best;
    t.x = s.list_x;
    t.count = min(count, THREADS);
  }
  relaxtune_u64 found = 0, below = 0, goal_p = 0, ties = 0;
  // A token passes the filters while its key of x is at most `last_x`, and so on.
  unsigned last_x = ~0u, border = ~0u, least = 0, last_distance = ~0u;
  int last_tie = 0x7fffffff, parity = 0;
  for (int stage = BY_BIN; stage <= DRAW; ++stage) {
    bool by_v = stage == TIES || stage == DRAW;
    bool counted = stage == TOP_K || stage == TIES || (stage == BY_BIN && limits);
    int shift = stage == BY_BIN ? 0 : by_v ? 16 : t.v ? 24 : 32;
    unsigned last_bin = rules_BINS - 1;
    auto item = [&](int at, relaxtune_u64* key, unsigned* weight, float* d) {
      float x = t.x[at];
      int v = t.v ? t.v[at] : t.first + at;
      *d = relaxtune_sampling_difference(x, largest);
      unsigned of_x = ~relaxtune_sampling_ascending(x);
      float distance = stage < TYPICAL ? -*d : fabsf(__fadd_rn(*d, -mean));
      relaxtune_u64 bin = t.v ? 0 : relaxtune_sampling_bin(distance);
      *key = by_v ? (relaxtune_u64)v << V_SHIFT
                  : stage == BY_BIN ? bin : bin << 32 | (stage == TYPICAL ? __float_as_uint(distance) : of_x);
      *weight = counted ? 1 : relaxtune_sampling_whole(*d);
      return of_x <= last_x && *weight >= least && __float_as_uint(distance) <= last_distance &&
             (of_x < border || (of_x == border && v <= last_tie)) && (stage != TIES || of_x == border);
    };
    if (stage == BY_BIN && !limits && top_p >= 1.0f) {
      // One more, for the logarithm's rounding.
      if (min_p > 0.0f) last_bin = relaxtune_sampling_bin(fmaxf(0.0f, -logf(min_p)) + 1.0f / rules_STEPS);
      shift = -1;
    }
    if ((stage == TOP_K && !limits) || ((stage == TOP_P || stage == TIES) && top_p >= 1.0f)) continue;
    if (stage == TIES) {
      border = (unsigned)found;
      relaxtune_u64 one = relaxtune_sampling_whole(
          relaxtune_sampling_difference(relaxtune_sampling_number(~border), largest));
      ties = (s.goal - below + one - 1) / one;
      if (ties * one >= s.weight) continue;
    }
    if (stage == TYPICAL) {
      least = min_p > 0.0f ? (unsigned)ceil((double)min_p * (1 << rules_MASS_BITS)) : 0;
      if (!(typical_p > 0.0f && typical_p < 1.0f)) continue;
      long long weighted = 0;
      relaxtune_u64 masses = 0, key;
      for (int at = thread; at < t.count; at += t.threads) {
        unsigned weight;
        float d;
        if (!item(at, &key, &weight, &d) || weight == 0) continue;
        weighted += (long long)((double)weight * (double)d * 1024.0);
        masses += weight;
      }
      weighted = (long long)relaxtune_sampling_sum(s, t, (relaxtune_u64)weighted, 0, rank, thread);
      masses = relaxtune_sampling_sum(s, t, masses, 1, rank, thread);
      mean = (float)((double)weighted / 1024.0 / (double)masses);
    }
    found = below = 0;
    for (bool begins = true; shift >= 0; shift -= 8, begins = false) {
      auto& digits = s.digits[parity];
      for (int at = thread; at < t.count; at += t.threads) {
        relaxtune_u64 key;
        unsigned weight;
        float d;
        if (!item(at, &key, &weight, &d) || (!begins && key >> (shift + 8) != found >> (shift + 8))) continue;
        int digit = (int)(key >> shift & 255);
        if (weight && atomicAdd(&digits[0][digit], weight) > ~weight) atomicAdd(&digits[1][digit], 1u);
      }
      relaxtune_sampling_meet_of(t);
      relaxtune_u64 own = 0, sum = 0, total = 0;
      if (thread < 256) {
        for (int other = 0; other < t.peers; ++other) {
          auto& of = t.peers > 1 ? *PEER(digits, other) : digits;
          own += (relaxtune_u64)of[1][thread] << 32 | of[0][thread];
        }
        s.digits[parity ^ 1][0][thread] = s.digits[parity ^ 1][1][thread] = 0;
        sum = own;
        for (int lane = 1; lane < 32; lane *= 2) {
          relaxtune_u64 before = __shfl_up_sync(~0u, sum, lane);
          if (thread % 32 >= lane) sum += before;
        }
        if (thread % 32 == 31) s.parts[thread / 32] = sum;
      }
      parity ^= 1;
      relaxtune_sampling_sync(t.threads);
      if (thread < 256) {
        for (int warp = 0; warp < 8; ++warp) {
          if (warp == thread / 32) sum += total;
          total += s.parts[warp];
        }
        if (begins)
          s.goal = counted ? (stage == TIES ? ties : (relaxtune_u64)top_k)
                   : stage == DRAW ? (relaxtune_u64)(s.random * (double)total) + 1
                   : stage == TYPICAL ? relaxtune_sampling_share(typical_p, total)
                   : stage == TOP_P && !limits ? goal_p : relaxtune_sampling_share(top_p, total);
        sum += below;
        if (sum - own < s.goal && s.goal <= sum) s.digit = thread, s.below = sum - own, s.weight = own;
      }
      relaxtune_sampling_sync(t.threads);
      found |= (relaxtune_u64)s.digit << shift;
      below = s.below;
    }
    if (stage == BY_BIN) {
      if (limits || top_p < 1.0f) last_bin = (unsigned)found;
      goal_p = s.goal;
      t.x = scores;
      t.count = count;
      if (VOCABULARY > LIST && (last_bin == rules_BINS - 1 || (limits && below + s.weight > LIST))) continue;
      bool has = relaxtune_sampling_bin(-relaxtune_sampling_difference(best, largest)) <= last_bin;
      for (int at = thread; has && at < count && *(volatile int*)&s.listed <= LIST; at += THREADS) {
        float x = scores[at];
        if (relaxtune_sampling_bin(-relaxtune_sampling_difference(x, largest)) > last_bin) continue;
        int to = atomicAdd(&s.listed, 1);
        if (to < LIST) s.list_x[to] = x, s.list_v[to] = t.first + at;
      }
      relaxtune_sampling_sync(THREADS);
      if (thread < PEERS) PEER(s.counts, thread)[0][rank] = s.listed;
      relaxtune_sampling_meet();
      int listed = 0, start = 0;
      for (int other = 0; other < PEERS; ++other) {
        if (other == rank) start = listed;
        listed += s.counts[other];
      }
      if (listed > LIST) continue;
      if (rank)
        for (int at = thread; at < s.counts[rank]; at += THREADS) {
          PEER(s.list_x, 0)[0][start + at] = s.list_x[at];
          PEER(s.list_v, 0)[0][start + at] = s.list_v[at];
        }
      relaxtune_sampling_meet();
      if (rank || thread >= LIST_THREADS) return -1;
      t = {s.list_x, s.list_v, listed, 0, 1, LIST_THREADS};
    }
    if (stage == TOP_K) last_x = (unsigned)found;
    if (stage == TIES) last_tie = (int)(found >> V_SHIFT);
    if (stage == TYPICAL) last_distance = (unsigned)found;
  }
  // Peers read this block's memory until here.
  if (t.peers > 1) relaxtune_sampling_meet();
  return rank ? -1 : (int)(found >> V_SHIFT);
}
__forceinline__ __device__ float relaxtune_sampling_logit(BITS bits) {
  float x = LOGIT;
  return x == x ? x : NOTHING;
}
}  // namespace
__forceinline__ __device__ void NAME(PARAMETERS, void* memory, int row, int rank, int thread) {
  using namespace PARTS;
  ABSENT
  // A block's memory may be written once it has begun.
  relaxtune_sampling_arrive();
  relaxtune_Sampling& s = *(relaxtune_Sampling*)memory;
  float temperature, repetition, presence, frequency;
  parameters += row * 8;
  relaxtune_load_4(&temperature, parameters);
  relaxtune_load_4(&repetition, parameters + 5);
  relaxtune_load_4(&presence, parameters + 6);
  relaxtune_load_4(&frequency, parameters + 7);
  if (thread < 4) relaxtune_load_4(s.filters + thread, parameters + 1 + thread);
  int64_t own_seed, own_position;
  relaxtune_load_8(&own_seed, seed + row);
  relaxtune_load_8(&own_position, position + row);
  bool greedy = temperature < rules_GREEDY_BELOW;
  bool penalised = counts && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
  long long start = (long long)row * VOCABULARY;
  int first = rank * CHUNK, count = min(CHUNK, max(0, VOCABULARY - first));
  const BITS* own_logits = (const BITS*)logits + start + first;
  float* scores = SCORES;
  if (thread < 512) s.digits[0][thread / 256][thread % 256] = 0;
  if (thread == 0) s.listed = 0;
  float top = NOTHING, mass = 0.0f, best_x = NOTHING, reciprocal = __frcp_rn(temperature);
  int best_v = first + thread;
  for (int group = thread; group < count; group += GROUP * THREADS) {
    // All is read before any is used: a use waits for what was read last. Behind the last token it is read again.
    BITS bits[GROUP];
    float logits_of[GROUP], biases[GROUP], top_before = top;
    int words[GROUP], masks[GROUP];
#pragma unroll
    for (int lane = 0; lane < GROUP; ++lane) {
      int at = min(group + lane * THREADS, count - 1), v = first + at;
      relaxtune_load_SIZE(bits + lane, own_logits + at);
      if (counts) relaxtune_load_4(words + lane, counts + start + v);
      if (bias) relaxtune_load_4(biases + lane, bias + start + v);
      if (mask) relaxtune_load_4(masks + lane, mask + (long long)row * WORDS + v / 32);
    }
#pragma unroll
    for (int lane = 0; lane < GROUP; ++lane) {
      logits_of[lane] = group + lane * THREADS < count ? relaxtune_sampling_logit(bits[lane]) : NOTHING;
      top = fmaxf(top, logits_of[lane]);
    }
    mass *= __expf(relaxtune_sampling_difference(top_before, top));
#pragma unroll
    for (int lane = 0; lane < GROUP; ++lane) {
      int at = group + lane * THREADS, v = first + at;
      float x = logits_of[lane];
      mass += __expf(relaxtune_sampling_difference(x, top));
      if (penalised && words[lane]) {
        float generated = (float)(words[lane] & 0x7fffffff);
        x = __fmaf_rn(-frequency, generated, x < 0.0f ? __fmul_rn(x, repetition) : __fdiv_rn(x, repetition));
        if (generated > 0.0f) x = __fadd_rn(x, -presence);
      }
      if (bias) x = __fadd_rn(x, biases[lane]);
      if (mask && !(masks[lane] >> v % 32 & 1)) x = NOTHING;
      if (!greedy) x = relaxtune_sampling_quotient(x, temperature, reciprocal);
      if (counts || bias) x = x == x ? x : NOTHING;
      x = __fadd_rn(x, 0.0f);  // -0 is 0.
      if (at < count && !greedy) scores[at] = x;
      if (at < count && x > best_x) best_x = x, best_v = v;
    }
  }
  if (thread == THREADS - 1) s.random = relaxtune_sampling_random(own_seed, own_position);
  relaxtune_u64 best = thread < count
      ? (relaxtune_u64)relaxtune_sampling_ascending(best_x) << 32 | (unsigned)~best_v : 0;
  auto scale_to = [&](float highest) {
    mass *= __expf(relaxtune_sampling_difference(top, highest));
    top = highest;
  };
  auto join_warp = [&]() {
    float highest = top;
    for (int other = 16; other; other /= 2) {
      relaxtune_u64 key = __shfl_xor_sync(~0u, best, other);
      best = key > best ? key : best;
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, other));
    }
    scale_to(highest);
    for (int other = 16; other; other /= 2) mass += __shfl_xor_sync(~0u, mass, other);
  };
  join_warp();
  int warp = thread / 32;
  if (thread % 32 == 0) s.warp_best[warp] = best, s.warp_top[warp] = top, s.warp_mass[warp] = mass;
  relaxtune_sampling_sync(THREADS);
  relaxtune_sampling_wait();
  if (warp == 0) {
    best = s.warp_best[thread];
    top = s.warp_top[thread];
    mass = s.warp_mass[thread];
    join_warp();
    if (thread < PEERS) {
      PEER(s.best, thread)[0][rank] = best;
      PEER(s.top, thread)[0][rank] = top;
      PEER(s.mass, thread)[0][rank] = mass;
    }
  }
  relaxtune_sampling_meet();
  for (int other = 0; other < PEERS; ++other) best = s.best[other] > best ? s.best[other] : best;
  float largest = relaxtune_sampling_number((unsigned)(best >> 32));
  int found = rank ? -1 : (int)~(unsigned)best;
  if (!greedy && largest != NOTHING)
    found = relaxtune_sampling_draw(s, scores, largest, best_x, count, rank, thread);
  if (found < 0 || thread) return;
  top = s.top[0];
  mass = s.mass[0];
  for (int other = 1; other < PEERS; ++other) {
    float highest = fmaxf(top, s.top[other]);
    scale_to(highest);
    mass += s.mass[other] * __expf(relaxtune_sampling_difference(s.top[other], highest));
  }
  BITS bits;
  relaxtune_load_SIZE(&bits, own_logits + found);
  float d = relaxtune_sampling_difference(relaxtune_sampling_logit(bits), top);
  token[row] = found;
  log_probability[row] = largest == NOTHING ? largest : d - logf(mass);
  if (counts) counts[start + found] += 1;
}
