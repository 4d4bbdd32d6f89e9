// Services of the operating system: threads, sleeping on a word of memory, a clock, memory. Linux
// has all of them. On another system the nearest one is used, or none where only speed is lost.
// macOS uses POSIX, whose code `-U__linux__` compiles on Linux as well.
#pragma once
#include <stdint.h>
#include <stdlib.h>

#include <atomic>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <malloc.h>
#include <windows.h>
#undef STATUS_NO_MEMORY  // interface.h has one of its own
#else
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// A multiple of every system's page; 64-bit ARM has pages of up to 64 KiB.
constexpr int64_t PAGE = int64_t(64) << 10, HUGE_PAGE = int64_t(2) << 20;

// Asks for huge pages for memory that begins with a page.
inline void prefer_huge_pages(void* p, int64_t bytes) {
#if defined(__linux__)
  madvise(p, bytes, MADV_HUGEPAGE);
#endif
  (void)p, (void)bytes;
}

#if defined(_WIN32)

struct Thread {
  HANDLE handle;
  void* (*enter)(void*);
  void* at;
};

inline bool start_thread(Thread* thread, const char*, void* (*enter)(void*), void* at) {
  *thread = {nullptr, enter, at};
  auto run = [](void* own) -> DWORD {
    static_cast<Thread*>(own)->enter(static_cast<Thread*>(own)->at);
    return 0;
  };
  thread->handle = CreateThread(nullptr, 0, run, thread, 0, nullptr);
  return thread->handle;
}
inline void join_thread(Thread* thread) {
  WaitForSingleObject(thread->handle, INFINITE);
  CloseHandle(thread->handle);
}

// Windows has no fork.
inline void watch_forks(void (*)()) {}

inline void futex_wait(void* word, uint32_t value) { WaitOnAddress(word, &value, 4, INFINITE); }
inline void futex_wake(void* word, int count) {
  count == 1 ? WakeByAddressSingle(word) : WakeByAddressAll(word);
}

inline int64_t now() {
  LARGE_INTEGER count, rate;
  QueryPerformanceCounter(&count);
  QueryPerformanceFrequency(&rate);
  return int64_t(double(count.QuadPart) * 1e9 / double(rate.QuadPart));
}

inline void* allocate_aligned(int64_t bytes, int64_t alignment) {
  return _aligned_malloc(bytes, alignment);
}
inline void free_aligned(void* p) { _aligned_free(p); }

// Large pages need a right that few accounts have.
inline void* map_pages(int64_t bytes) {
  return VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}
inline void unmap_pages(void* p, int64_t) { VirtualFree(p, 0, MEM_RELEASE); }

#else

using Thread = pthread_t;

// Starts a thread that blocks all signals, so that signal handlers run on the application's
// threads. `Thread` stays where it is until it is joined.
inline bool start_thread(Thread* thread, const char* name, void* (*enter)(void*), void* at) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = !pthread_create(thread, nullptr, enter, at);
#if defined(__linux__)
  if (started) pthread_setname_np(*thread, name);
#endif
  (void)name;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}
inline void join_thread(Thread* thread) { pthread_join(*thread, nullptr); }

// Calls `in_child` in every child that this process forks.
inline void watch_forks(void (*in_child)()) { pthread_atfork(nullptr, nullptr, in_child); }

inline int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t(1000000000) + time.tv_nsec;
}

inline void* allocate_aligned(int64_t bytes, int64_t alignment) {
  void* p = nullptr;
  return posix_memalign(&p, alignment, bytes) ? nullptr : p;
}
inline void free_aligned(void* p) { free(p); }

// Allocates whole huge pages, and small pages for the rest. The weights of an expert fill only a
// few huge pages: half a huge page wasted per expert would be a tenth of the model.
inline void* map_pages(int64_t bytes) {
  int64_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  char* raw = static_cast<char*>(mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (raw == MAP_FAILED) return nullptr;
  int64_t before = -reinterpret_cast<uintptr_t>(raw) & (HUGE_PAGE - 1);
  if (before) munmap(raw, before);
  munmap(raw + before + size, HUGE_PAGE - before);
  prefer_huge_pages(raw + before, bytes / HUGE_PAGE * HUGE_PAGE);
  return raw + before;
}
inline void unmap_pages(void* p, int64_t bytes) {
  munmap(p, (bytes + PAGE - 1) / PAGE * PAGE);
}

#if defined(__linux__)

inline void futex_wait(void* word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void futex_wake(void* word, int count) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

#else

// Sleepers of some words share a lock and a condition, so a wake-up wakes all of them.
struct Sleepers {
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t woken = PTHREAD_COND_INITIALIZER;
};
inline Sleepers sleepers[64];
inline Sleepers& sleepers_on(void* word) {
  return sleepers[reinterpret_cast<uintptr_t>(word) / 64 % 64];
}

inline void futex_wait(void* word, uint32_t value) {
  Sleepers& on = sleepers_on(word);
  pthread_mutex_lock(&on.lock);
  // A waker changes the word before it takes the lock.
  if (__atomic_load_n(static_cast<uint32_t*>(word), __ATOMIC_SEQ_CST) == value)
    pthread_cond_wait(&on.woken, &on.lock);
  pthread_mutex_unlock(&on.lock);
}
inline void futex_wake(void* word, int) {
  Sleepers& on = sleepers_on(word);
  pthread_mutex_lock(&on.lock);
  pthread_cond_broadcast(&on.woken);
  pthread_mutex_unlock(&on.lock);
}

#endif
#endif

#if !defined(__linux__)

// This system has no setting for time slices.
inline void lengthen_slice() {}

#else

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

#endif
