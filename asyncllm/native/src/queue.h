// Queue: runs jobs one after the other on a thread of its own, so that the next job begins at once,
// even while the caller's Python code waits for the GIL.
#pragma once
#include "system.h"

struct Context;
struct Job;

class Queue {
 public:
  // Returns STATUS_INVALID if the queue is full, STATUS_NO_MEMORY if no thread can be started.
  int32_t submit(Context* context, Job* job);
  void wait(const Job* job);
  // Runs the queued jobs, then ends the thread.
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
  Thread thread_ = {};
  bool started_ = false;
};
