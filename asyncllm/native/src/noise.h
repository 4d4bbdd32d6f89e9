// The exponential noise of sampling, as gpu/ops/gumbel.py computes it.
#pragma once
#include <math.h>
#include <stdint.h>

// Output number `position` of SplitMix64 (Steele, Lea and Flood, 2014).
inline uint64_t gumbel_key(uint64_t state, int64_t position) {
  uint64_t z = state + (uint64_t(position) + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

// Output of Philox4x32-10 (Salmon et al., 2011) for the counter (counter, domain, 0, 0).
struct Philox {
  uint32_t words[4];

  Philox(uint32_t counter, uint32_t domain, uint64_t key) : words{counter, domain, 0, 0} {
    uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
    for (int round = 0; round < 10; ++round) {
      uint64_t a = uint64_t(words[0]) * 0xD2511F53u, b = uint64_t(words[2]) * 0xCD9E8D57u;
      words[0] = uint32_t(b >> 32) ^ words[1] ^ low;
      words[2] = uint32_t(a >> 32) ^ words[3] ^ high;
      words[1] = uint32_t(b);
      words[3] = uint32_t(a);
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
  }
};

// Logarithm of the exponential number, of mean 1, for a word of random bits.
inline float log_exponential(uint32_t word) {
  float u = (float(word) + 0.5f) * 0x1p-32f;
  u = u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;
  if (u >= 0.0625f) return logf(-logf(1.0f - u));
  // For u near 0, as the winners have it, 1 - u would round away the bits of u.
  float series = u * float(1.0 / 6);
  series = u * (float(1.0 / 5) + series);
  series = u * (0.25f + series);
  series = u * (float(1.0 / 3) + series);
  series = u * (0.5f + series);
  return logf(u * (1.0f + series));
}

inline float token_noise(uint64_t key, int64_t token, int64_t chunk_size) {
  int64_t counter = token / (4 * chunk_size) * chunk_size + token % chunk_size;
  return log_exponential(Philox(uint32_t(counter), 0, key).words[token / chunk_size % 4]);
}

inline float chunk_noise(uint64_t key, int64_t chunk) {
  return log_exponential(Philox(uint32_t(chunk), 1, key).words[0]);
}
