// Pool: threads that take the tasks of a job one by one.
//
// A thread that the operating system preempts takes no further task, and a thread that wakes late
// finds the job closed. So another process on the machine slows a job down only by the processor
// time that it uses. After a job a thread spins for some tens of microseconds, because the step's
// next op follows soon, and then sleeps.
#pragma once
#include "system.h"

class Pool {
 public:
  // Called as fn(context, task, thread). Thread 0 is the caller of `run`.
  using Function = void (*)(void*, int64_t, int);

  // Starts the threads; if one cannot be started, ends the others and returns false.
  bool start(int count);
  void stop();
  int size() const { return count_; }
  // Runs tasks 0 to total - 1 and returns when all are done.
  void run(int64_t total, Function fn, void* context);

  template <class F> void each(int64_t total, F& f) {
    run(total, [](void* at, int64_t task, int thread) { (*(F*)at)(task, thread); }, &f);
  }

 private:
  static void* enter(void*);
  void serve(int thread);
  void work(int thread);

  // gate_: the job's generation in the high half; OPEN, WAITING and the number of threads that work
  // on the job in the low half.
  static constexpr uint64_t GENERATION = uint64_t(1) << 32;
  static constexpr uint64_t OPEN = uint64_t(1) << 31;
  static constexpr uint64_t WAITING = uint64_t(1) << 30;
  static constexpr uint64_t ACTIVE = WAITING - 1;

  struct Worker {
    Pool* pool;
    int index;
    Thread thread;
  };

  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> signal_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> ended_{false};
  Function function_ = nullptr;
  void* context_ = nullptr;
  int64_t total_ = 0;
  int count_ = 1;
  Worker* workers_ = nullptr;
};
