// SHA-256 (FIPS 180-4): TVM's runtime has none, and the library is to need nothing else.
#ifndef RELAXTUNE_SRC_SHA256_H_
#define RELAXTUNE_SRC_SHA256_H_

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

namespace relaxtune {

class Sha256 {
 public:
  void Update(const char* data, size_t size) {
    bytes_ += size;
    while (size != 0) {
      size_t taken = std::min(size, kBlock - filled_);
      std::memcpy(block_.data() + filled_, data, taken);
      filled_ += taken, data += taken, size -= taken;
      if (filled_ == kBlock) Compress(), filled_ = 0;
    }
  }

  std::string Hex() {
    uint64_t bits = bytes_ * 8;
    const char one = '\x80', zero = 0;
    Update(&one, 1);
    while (filled_ != kBlock - 8) Update(&zero, 1);
    char length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(bits >> (56 - 8 * i));
    Update(length, 8);
    std::string text;
    for (uint32_t word : state_)
      for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(word >> shift) & 15];
    return text;
  }

 private:
  static constexpr size_t kBlock = 64;

  static uint32_t Turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

  void Compress() {
    // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
    static constexpr uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      const auto* p = reinterpret_cast<const unsigned char*>(block_.data()) + 4 * i;
      w[i] = uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | p[3];
    }
    for (int i = 16; i < 64; ++i) {
      uint32_t s0 = Turn(w[i - 15], 7) ^ Turn(w[i - 15], 18) ^ w[i - 15] >> 3;
      uint32_t s1 = Turn(w[i - 2], 17) ^ Turn(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (int i = 0; i < 64; ++i) {
      uint32_t t1 = h + (Turn(e, 6) ^ Turn(e, 11) ^ Turn(e, 25)) + ((e & f) ^ (~e & g)) + k[i] + w[i];
      uint32_t t2 = (Turn(a, 2) ^ Turn(a, 13) ^ Turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const uint32_t added[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state_[i] += added[i];
  }

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<char, kBlock> block_{};
  size_t filled_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace relaxtune

#endif  // RELAXTUNE_SRC_SHA256_H_
