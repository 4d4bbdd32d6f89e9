#include "pool.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "waiting.h"

bool Pool::start(int count) {
  count_ = 1;
  if (count == 1) return true;
  workers_ = static_cast<Worker*>(calloc(count - 1, sizeof(Worker)));
  if (!workers_) return false;
  while (count_ < count) {
    Worker& worker = workers_[count_ - 1];
    worker.pool = this;
    worker.index = count_;
    char name[16];
    snprintf(name, sizeof(name), "asyncllm-op%d", worker.index & 1023);
    if (!start_thread(&worker.thread, name, enter, &worker)) break;
    ++count_;
  }
  if (count_ == count) return true;
  stop();
  return false;
}

void Pool::stop() {
  ended_.store(true);
  signal_.fetch_add(1);
  futex_wake(&signal_, INT_MAX);
  for (int i = 0; i < count_ - 1; ++i) join_thread(&workers_[i].thread);
  free(workers_);
  workers_ = nullptr;
  count_ = 1;
}

void Pool::run(int64_t total, Function fn, void* context) {
  if (count_ == 1 || total <= 1) {
    for (int64_t task = 0; task < total; ++task) fn(context, task, 0);
    return;
  }
  function_ = fn;
  context_ = context;
  total_ = total;
  next_.store(0, std::memory_order_relaxed);
  gate_.store((gate_.load(std::memory_order_relaxed) & ~(GENERATION - 1)) + GENERATION + OPEN);
  signal_.fetch_add(1);
  // No wake-up is lost: a thread counts itself as asleep before it last reads the gate.
  int asleep = asleep_.load();
  if (asleep) futex_wake(&signal_, total - 1 < asleep ? int(total - 1) : asleep);
  work(0);
  gate_.fetch_and(~OPEN);
  if (spin([&] { return !(gate_.load(std::memory_order_acquire) & ACTIVE); })) return;
  uint64_t gate = gate_.fetch_or(WAITING) | WAITING;
  while (gate & ACTIVE) {
    // The futex is the low half of gate_, its first bytes: all supported processors are
    // little-endian.
    futex_wait(&gate_, uint32_t(gate));
    gate = gate_.load(std::memory_order_acquire);
  }
}

void* Pool::enter(void* at) {
  lengthen_slice();
  Worker* worker = static_cast<Worker*>(at);
  worker->pool->serve(worker->index);
  return nullptr;
}

void Pool::serve(int thread) {
  uint64_t seen = 0;
  for (;;) {
    uint64_t gate = 0;
    auto called = [&] {
      gate = gate_.load(std::memory_order_acquire);
      return ended_.load(std::memory_order_relaxed) || ((gate & OPEN) && gate / GENERATION != seen);
    };
    if (!spin(called)) {
      uint32_t signal = signal_.load();
      asleep_.fetch_add(1);
      gate = gate_.load();
      if (!ended_.load() && !((gate & OPEN) && gate / GENERATION != seen))
        futex_wait(&signal_, signal);
      asleep_.fetch_sub(1);
      continue;
    }
    if (ended_.load()) return;
    if (!gate_.compare_exchange_strong(gate, gate + 1)) continue;
    seen = gate / GENERATION;
    work(thread);
    uint64_t before = gate_.fetch_sub(1);
    if ((before & WAITING) && (before & ACTIVE) == 1) futex_wake(&gate_, 1);
  }
}

void Pool::work(int thread) {
  for (;;) {
    int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= total_) return;
    function_(context_, task, thread);
  }
}
