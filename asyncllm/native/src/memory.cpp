// Reads memory as fast as the threads can: to measure a lower bound of a memory-bound step's time,
// and to compute checksums.
#include <string.h>

#include "context.h"

namespace {
constexpr int64_t READ_CHUNK = int64_t(1) << 18;
constexpr int LANES = 8;

// Both factors are odd, so that every step below is a bijection: different words give different
// results.
uint64_t mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * 0x9E3779B97F4A7C15u;
  return state ^ state >> 29;
}

uint64_t chunk_checksum(const char* bytes, int64_t count, uint64_t seed) {
  uint64_t lanes[LANES];
  for (int lane = 0; lane < LANES; ++lane) lanes[lane] = mix(seed, lane);
  int64_t i = 0;
  for (; i + LANES * 8 <= count; i += LANES * 8)
    for (int lane = 0; lane < LANES; ++lane) {
      uint64_t word;
      memcpy(&word, bytes + i + lane * 8, 8);
      lanes[lane] = mix(lanes[lane], word);
    }
  uint64_t sum = mix(seed, count);
  for (; i < count; i += 8) {
    uint64_t word = 0;
    memcpy(&word, bytes + i, least(8, count - i));
    sum = mix(sum, word);
  }
  for (uint64_t lane : lanes) sum = mix(sum * 0xD1B54A32D192ED03u, lane);
  return sum;
}
}  // namespace

API int32_t asyncllm_read(Context* context, const void* memory, int64_t bytes, uint64_t* sum) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (bytes < 0 || bytes % 64 || !aligned(memory, 8) || !sum || (bytes && !memory))
    return STATUS_INVALID;
  const uint64_t* words = static_cast<const uint64_t*>(memory);
  std::atomic<uint64_t> total{0};
  auto read = [&](int64_t chunk, int) {
    int64_t end = least(bytes, (chunk + 1) * READ_CHUNK) / 8;
    uint64_t sums[8] = {};
    for (int64_t i = chunk * READ_CHUNK / 8; i < end; i += 8)
      for (int lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
    uint64_t all = 0;
    for (uint64_t one : sums) all += one;
    total.fetch_add(all, std::memory_order_relaxed);
  };
  context->pool.each(divide_up(bytes, READ_CHUNK), read);
  *sum = total.load();
  return STATUS_OK;
}

API int32_t asyncllm_checksums(Context* context, const void* memory, const int64_t* offsets,
                               const int64_t* sizes, int64_t count, uint64_t* sums) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (count < 0 || (count && (!memory || !offsets || !sizes || !sums))) return STATUS_INVALID;
  for (int64_t i = 0; i < count; ++i)
    if (offsets[i] < 0 || sizes[i] < 0) return STATUS_INVALID;
  for (int64_t i = 0; i < count; ++i) {
    const char* bytes = static_cast<const char*>(memory) + offsets[i];
    std::atomic<uint64_t> total{mix(0, sizes[i])};
    share(context, divide_up(sizes[i], READ_CHUNK), sizes[i], [&](int64_t chunk, int) {
      int64_t first = chunk * READ_CHUNK, size = least(READ_CHUNK, sizes[i] - first);
      // The index is part of each chunk's checksum, so their sum depends on the chunks' order.
      total.fetch_add(chunk_checksum(bytes + first, size, chunk + 1), std::memory_order_relaxed);
    });
    sums[i] = total.load();
  }
  return STATUS_OK;
}
