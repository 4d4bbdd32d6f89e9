// A pool of threads that take the tasks of a job one by one.
//
// A thread that the operating system holds up takes no further task, and one that comes late finds
// the job closed: a busy neighbour costs its share of the cores and no more. Between jobs a thread
// spins for some tens of microseconds, waiting for the next op of a step, and then sleeps.
#pragma once
#include <pthread.h>
#include <stdint.h>

#include <atomic>

class Pool {
 public:
  // fn(context, task, thread); threads are numbered from 0, the caller of run.
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

  // High half: generation of the job. Low half: OPEN, WAITING and the number of active threads.
  static constexpr uint64_t GENERATION = uint64_t(1) << 32;
  static constexpr uint64_t OPEN = uint64_t(1) << 31;
  static constexpr uint64_t WAITING = uint64_t(1) << 30;
  static constexpr uint64_t ACTIVE = WAITING - 1;

  struct Worker {
    Pool* pool;
    int index;
    pthread_t thread;
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
