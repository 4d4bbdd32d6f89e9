// Waiting for another thread: spinning for some tens of microseconds, then sleeping.
#pragma once
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

constexpr int64_t SPIN_NANOSECONDS = 50000;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t(1000000000) + time.tv_nsec;
}

// Calls `done` until it returns true, or for some tens of microseconds; returns its last result.
template <class F> bool spin(F&& done) {
  int64_t end = 0;
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      pause_briefly();
    }
    int64_t time = now();
    if (!end) end = time + SPIN_NANOSECONDS;
    if (time > end) return false;
  }
}

inline void futex_wait(void* word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void futex_wake(void* word, int count) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}
