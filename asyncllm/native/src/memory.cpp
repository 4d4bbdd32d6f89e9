// Reads memory as fast as the threads can, to measure a lower bound of a memory-bound step's time.
#include "context.h"

namespace {
constexpr int64_t READ_CHUNK = int64_t(1) << 18;
}

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
