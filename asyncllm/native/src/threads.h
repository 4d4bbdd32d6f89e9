// Starting threads, and the time slices of threads that compute.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

// Starts a thread that blocks all signals, so that signal handlers run on the application's
// threads.
inline bool start_thread(pthread_t* thread, const char* name, void* (*enter)(void*), void* at) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = !pthread_create(thread, nullptr, enter, at);
  if (started) pthread_setname_np(*thread, name);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

// Time slice of threads that compute. Linux's default is at most 2.8 ms.
constexpr uint64_t SLICE_NANOSECONDS = 5000000;

// Asks for long time slices for the calling thread. From Linux 6.12 on, a thread with a shorter
// slice that wakes up, such as the application's event loop, then preempts the calling thread at
// once (PREEMPT_SHORT of EEVDF), instead of waiting for the end of its slice. The processor time
// that each thread gets does not change. Older systems ignore the request, and so do scheduling
// policies without slices, which are all but SCHED_OTHER and SCHED_BATCH.
inline void lengthen_slice() {
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes;
  static_assert(sizeof(attributes) == 48, "sched_attr as of Linux 3.14");
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0)) return;
  constexpr uint32_t OTHER = 0, BATCH = 3;
  if (attributes.policy != OTHER && attributes.policy != BATCH) return;
  attributes.runtime = SLICE_NANOSECONDS;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}
