// Threads of the library, and how the system schedules those that compute.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

// A thread that blocks all signals: the host's handlers run on its own threads.
inline bool start_thread(pthread_t* thread, const char* name, void* (*enter)(void*), void* at) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = !pthread_create(thread, nullptr, enter, at);
  if (started) pthread_setname_np(*thread, name);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

// More than Linux's own slice, which is at most 2.8 ms however many processors there are.
constexpr uint64_t SLICE_NANOSECONDS = 5000000;

// Asks for long time slices for the calling thread. From Linux 6.12 on, a thread that wakes and has
// the shorter slice preempts the running one at once (PREEMPT_SHORT of EEVDF), and so the
// application's event loop; otherwise it waits for the end of that one's slice. Shares of the
// processor are as before. Policies other than SCHED_OTHER and SCHED_BATCH have no slices, and
// older systems ignore them.
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
