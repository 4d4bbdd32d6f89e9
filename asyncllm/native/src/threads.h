// Threads of the library, and the time slices of threads that compute.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

// Starts a thread that blocks all signals: the application's handlers run on its own threads.
inline bool start_thread(pthread_t* thread, const char* name, void* (*enter)(void*), void* at) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = !pthread_create(thread, nullptr, enter, at);
  if (started) pthread_setname_np(*thread, name);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

// Longer than Linux's default slice, which is at most 2.8 ms on any number of processors.
constexpr uint64_t SLICE_NANOSECONDS = 5000000;

// Asks for long time slices for the calling thread. From Linux 6.12 on, a waking thread with a
// shorter slice, such as the application's event loop, then preempts it at once (PREEMPT_SHORT of
// EEVDF), instead of waiting for the end of its slice. Shares of the processor do not change.
// Policies other than SCHED_OTHER and SCHED_BATCH have no slices, and older systems ignore them.
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
