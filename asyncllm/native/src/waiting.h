// Waiting for another thread: spinning for some tens of microseconds, then sleeping.
#pragma once
#include "system.h"

constexpr int64_t SPIN_NANOSECONDS = 50000;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
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
