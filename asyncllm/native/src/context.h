// Common to all entry points: the context, checks of arguments, scratch memory.
#pragma once
#include "kernels.h"
#include "pool.h"
#include "queue.h"

#define API extern "C" __attribute__((visibility("default")))

struct Context {
  Pool pool;
  Queue queue;
  const Kernels* kernels;
  int64_t process;         // the value of `forks` when the context was made
  void** scratch;          // [number of threads], scratch memory of each thread
  int64_t scratch_bytes;   // size of one thread's scratch memory
  void* shared;
  int64_t shared_bytes;
};

// Number of forks between the process that loaded the library and this process.
extern int64_t forks;

constexpr int64_t CACHE_LINE = 64;
// Number of rows of x that stay in the CPU's cache while panels of the weight are read.
constexpr int64_t ROW_CHUNK = 48;
// Number of multiplications below which waking other threads does not pay.
constexpr int64_t SERIAL_WORK = 150000;

inline bool is_open(const Context* context) { return context && context->process == forks; }

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

inline bool is_dtype(int32_t dtype) { return dtype >= DTYPE_F32 && dtype <= DTYPE_F16; }
inline bool is_activation(int32_t kind) {
  return kind == ACTIVATION_SILU || kind == ACTIVATION_GELU_TANH;
}
inline int64_t size_of(int32_t dtype) {
  return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_I8 ? 1 : 2;
}
inline bool aligned(const void* p, int64_t size) { return reinterpret_cast<uintptr_t>(p) % size == 0; }
// Whether p, type and stride are valid for a matrix [rows, width].
inline bool is_matrix(const void* p, int32_t dtype, int64_t rows, int64_t width, int64_t stride) {
  if (!is_dtype(dtype) || rows < 0 || width < 1) return false;
  return rows == 0 || (p && aligned(p, size_of(dtype)) && (rows == 1 || stride >= width));
}

inline void* allocate(int64_t bytes) {
  return allocate_aligned(most(bytes, CACHE_LINE), CACHE_LINE);
}

inline bool grow(void** p, int64_t* held, int64_t bytes) {
  if (bytes <= *held) return true;
  free_aligned(*p);
  *p = allocate(bytes);
  *held = *p ? bytes : 0;
  return *p;
}

inline bool grow_scratch(Context* context, int64_t bytes) {
  if (bytes <= context->scratch_bytes) return true;
  context->scratch_bytes = 0;
  for (int i = 0; i < context->pool.size(); ++i) {
    free_aligned(context->scratch[i]);
    context->scratch[i] = allocate(bytes);
    if (!context->scratch[i]) return false;
  }
  context->scratch_bytes = bytes;
  return true;
}

// Runs f(task, thread) for all tasks: on all threads, or on the caller's if there is little work.
template <class F> void share(Context* context, int64_t tasks, int64_t work, F&& f) {
  if (work < SERIAL_WORK) {
    for (int64_t task = 0; task < tasks; ++task) f(task, 0);
    return;
  }
  context->pool.each(tasks, f);
}
