// Jobs that run one after the other on a thread of their own, so that the next begins without the
// caller, whose Python has to wait for the GIL.
#pragma once
#include <pthread.h>
#include <stdint.h>

#include <atomic>

struct Context;
struct Job;

class Queue {
 public:
  // A status: STATUS_INVALID where there is no room, STATUS_NO_MEMORY where there is no thread.
  int32_t submit(Context* context, Job* job);
  void wait(const Job* job);
  // Runs what is queued, and ends the thread.
  void stop();

 private:
  static void* enter(void*);
  void serve();

  enum { ROOM = 4 };

  alignas(64) std::atomic<uint32_t> submitted_{0};
  std::atomic<bool> asleep_{false};
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> awaited_{false};
  std::atomic<bool> ended_{false};
  Job* jobs_[ROOM] = {};
  Context* context_ = nullptr;
  pthread_t thread_ = {};
  bool started_ = false;
};
