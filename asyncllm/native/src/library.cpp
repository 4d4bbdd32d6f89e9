// Contexts and weights, and the ops on rows: they check, share out the work and call the kernels.
#include <math.h>
#include <string.h>
#include <sys/mman.h>

#include <new>

#include "context.h"

struct Weights {
  PackedView view;
  const Kernels* kernels;
  int64_t bytes;
  bool mapped;
};

int64_t forks = 0;

namespace {

constexpr int64_t HUGE_PAGE = int64_t(2) << 20;
// Rows of x that stay in the cache while the panels of a chunk pass.
constexpr int64_t ROW_CHUNK = 48;

const Kernels* const ALL[] = {
#ifdef ASYNCLLM_AVX512
    &kernels_avx512,
#endif
#ifdef ASYNCLLM_AVX2
    &kernels_avx2,
#endif
#ifdef ASYNCLLM_NEON
    &kernels_neon,
#endif
    &kernels_baseline,
};

bool supported(const Kernels* kernels) {
#if defined(__x86_64__)
  if (!strcmp(kernels->name, "avx2"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  if (!strcmp(kernels->name, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
#endif
  (void)kernels;
  return true;
}

const Kernels* find_kernels(const char* isa) {
  for (const Kernels* kernels : ALL)
    if ((!isa || !strcmp(isa, kernels->name)) && supported(kernels)) return kernels;
  return nullptr;
}

pthread_once_t watch_forks = PTHREAD_ONCE_INIT;

// Memory of whole huge pages where there is enough to fill one.
void* map_weights(int64_t bytes, bool* mapped) {
  *mapped = bytes >= HUGE_PAGE;
  if (!*mapped) return allocate(bytes);
  int64_t size = divide_up(bytes, HUGE_PAGE) * HUGE_PAGE;
  char* raw = static_cast<char*>(mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (raw == MAP_FAILED) return nullptr;
  int64_t before = -reinterpret_cast<uintptr_t>(raw) & (HUGE_PAGE - 1);
  if (before) munmap(raw, before);
  munmap(raw + before + size, HUGE_PAGE - before);
  madvise(raw + before, size, MADV_HUGEPAGE);
  return raw + before;
}

// The largest integers that rows of k elements may be rounded to: no sum of their products with
// weights of 8 bits leaves 32 bits.
float largest_integer(int64_t k) { return float(least(32767, INT32_MAX / (127 * k))); }

// x as integers, with a scale for each row; false where there is no memory.
bool quantise_rows(Context* context, LinearTask* task, const void* x, int64_t stride, int64_t m,
                   int64_t k, int32_t dtype) {
  int64_t width = divide_up(k, 2) * 2;
  if (!grow(&context->shared, &context->shared_bytes, m * (width * 2 + 4))) return false;
  float* scales = static_cast<float*>(context->shared);
  int16_t* integers = reinterpret_cast<int16_t*>(scales + m);
  share(context, m, m * k / 4, [&](int64_t row, int) {
    const char* from = static_cast<const char*>(x) + row * stride * size_of(dtype);
    scales[row] = context->kernels->quantise(from, dtype, integers + row * width, k,
                                             largest_integer(k));
  });
  task->xq = integers;
  task->x_scales = scales;
  task->x_stride = width;
  return true;
}

// x as the kernels read it; false where there is no memory.
bool prepare_rows(Context* context, LinearTask* task, const void* x, int64_t stride, int64_t m,
                  int64_t k, int32_t dtype) {
  task->x_stride = stride;
  task->x = static_cast<const float*>(x);
  if (dtype == DTYPE_F32) return true;
  if (!grow(&context->shared, &context->shared_bytes, m * k * 4)) return false;
  float* wide = static_cast<float*>(context->shared);
  share(context, m, m * k / 8, [&](int64_t row, int) {
    const char* from = static_cast<const char*>(x) + row * stride * 2;
    context->kernels->widen(from, dtype, wide + row * k, k);
  });
  task->x = wide;
  task->x_stride = k;
  return true;
}

// Splits m rows times `units` panels into tasks, with the rows of one part of the
// weight next to each other.
template <class F>
void share_linear(Context* context, LinearTask task, int64_t m, int64_t units, int64_t step,
                  int64_t work, F&& f) {
  const Kernels* kernels = context->kernels;
  int64_t row_parts = divide_up(m, ROW_CHUNK);
  int64_t rows = divide_up(divide_up(m, row_parts), kernels->row_step) * kernels->row_step;
  row_parts = divide_up(m, rows);
  int64_t parts = most(1, 8 * context->pool.size() / row_parts);
  int64_t per_part = divide_up(divide_up(units, parts), step) * step;
  parts = divide_up(units, per_part);
  share(context, parts * row_parts, work, [&](int64_t index, int thread) {
    LinearTask own = task;
    own.first = index / row_parts * per_part;
    own.last = least(units, own.first + per_part);
    own.first_row = index % row_parts * rows;
    own.last_row = least(m, own.first_row + rows);
    f(own, thread);
  });
}

// Checks and prepares x, and calls f(task, thread) for the parts of the product.
template <class F>
int32_t run_linear(Context* context, const Weights* weights, LinearTask task, const void* x,
                   int64_t x_stride, int64_t m, int32_t dtype, F&& f) {
  const PackedView& view = weights->view;
  const Kernels* kernels = context->kernels;
  bool integers = view.dtype == DTYPE_I8;
  if (weights->kernels != kernels || (!integers && dtype != view.dtype)) return STATUS_INVALID;
  if (!is_matrix(x, dtype, m, view.k, x_stride)) return STATUS_INVALID;
  if (m == 0) return STATUS_OK;
  if (integers) {
    if (!quantise_rows(context, &task, x, x_stride, m, view.k, dtype)) return STATUS_NO_MEMORY;
  } else if (kernels->takes_bfloat16 && dtype == DTYPE_BF16) {
    task.x16 = static_cast<const uint16_t*>(x);
    task.x_stride = x_stride;
  } else if (!prepare_rows(context, &task, x, x_stride, m, view.k, dtype)) {
    return STATUS_NO_MEMORY;
  }
  task.dtype = dtype;
  int64_t panels = divide_up(view.n, kernels->panel);
  share_linear(context, task, m, panels, m == 1 ? 4 : m <= 3 ? 2 : 1, m * view.n * view.k, f);
  return STATUS_OK;
}

float* pad(const float* values, int64_t count, int64_t padded) {
  float* out = static_cast<float*>(allocate(padded * 4));
  if (!out) return nullptr;
  memcpy(out, values, count * 4);
  memset(out + count, 0, (padded - count) * 4);
  return out;
}

}  // namespace

API const char* asyncllm_sources(void) { return ASYNCLLM_SOURCES; }
API const char* asyncllm_best_isa(void) { return find_kernels(nullptr)->name; }
API const char* asyncllm_isa(const Context* context) { return context->kernels->name; }

API Context* asyncllm_create(int32_t num_threads, const char* isa) {
  const Kernels* kernels = find_kernels(isa);
  if (!kernels || num_threads < 1 || num_threads > 1024) return nullptr;
  pthread_once(&watch_forks, [] { pthread_atfork(nullptr, nullptr, [] { ++forks; }); });
  Context* context = new (std::nothrow) Context();
  if (!context) return nullptr;
  context->kernels = kernels;
  context->process = forks;
  context->scratch = static_cast<void**>(calloc(num_threads, sizeof(void*)));
  if (!context->scratch || !context->pool.start(num_threads)) {
    free(context->scratch);
    delete context;
    return nullptr;
  }
  return context;
}

API void asyncllm_close(Context* context) {
  if (!is_open(context)) return;
  int threads = context->pool.size();
  context->queue.stop();
  context->pool.stop();
  for (int i = 0; i < threads; ++i) free(context->scratch[i]);
  free(context->scratch);
  free(context->shared);
  delete context;
}

API Weights* asyncllm_pack(Context* context, const void* values, int32_t dtype, int64_t n,
                           int64_t k, int64_t row_stride, const float* scales,
                           const float* bias) {
  if (!is_open(context) || n < 1 || k < 1 || !values || (n > 1 && row_stride < k)) return nullptr;
  if (dtype == DTYPE_I8 ? !scales || largest_integer(k) < 1
                        : scales || !is_matrix(values, dtype, n, k, row_stride))
    return nullptr;
  const Kernels* kernels = context->kernels;
  Weights* weights = static_cast<Weights*>(calloc(1, sizeof(Weights)));
  if (!weights) return nullptr;
  int64_t panels = divide_up(n, kernels->panel), elements = kernels->panel_elements(k, dtype);
  weights->kernels = kernels;
  weights->bytes = panels * elements * size_of(dtype);
  void* data = map_weights(weights->bytes, &weights->mapped);
  const float* own_scales = scales ? pad(scales, n, panels * kernels->panel) : nullptr;
  const float* own_bias = bias ? pad(bias, n, panels * kernels->panel) : nullptr;
  weights->view = {data, own_scales, own_bias, n, k, elements, dtype};
  if (!data || (scales && !own_scales) || (bias && !own_bias)) {
    asyncllm_free_weights(weights);
    return nullptr;
  }
  PlainView plain = {values, n, k, row_stride, dtype};
  share(context, panels, n * k,
        [&](int64_t panel, int) { kernels->pack(plain, data, panel, panel + 1); });
  return weights;
}

API void asyncllm_free_weights(Weights* weights) {
  if (!weights) return;
  void* data = const_cast<void*>(weights->view.data);
  if (data && weights->mapped)
    munmap(data, divide_up(weights->bytes, HUGE_PAGE) * HUGE_PAGE);
  else
    free(data);
  free(const_cast<float*>(weights->view.scales));
  free(const_cast<float*>(weights->view.bias));
  free(weights);
}

API int64_t asyncllm_weights_bytes(const Weights* weights) { return weights->bytes; }

API int32_t asyncllm_linear(Context* context, const Weights* weights, const void* x,
                            int64_t x_stride, void* y, int64_t y_stride, int64_t m,
                            int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  const PackedView& view = weights->view;
  if (!is_matrix(y, dtype, m, view.n, y_stride)) return STATUS_INVALID;
  LinearTask task = {};
  task.y = y;
  task.y_stride = y_stride;
  return run_linear(context, weights, task, x, x_stride, m, dtype,
                    [&](const LinearTask& own, int) { context->kernels->linear(view, own); });
}

API int32_t asyncllm_linear_argmax(Context* context, const Weights* weights, const void* x,
                                   int64_t x_stride, int64_t* out, int64_t m, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (m < 0 || (m && !out)) return STATUS_INVALID;
  if (!grow_scratch(context, m * sizeof(Largest))) return STATUS_NO_MEMORY;
  int threads = context->pool.size();
  auto of = [&](int thread) { return static_cast<Largest*>(context->scratch[thread]); };
  for (int thread = 0; thread < threads; ++thread)
    for (int64_t row = 0; row < m; ++row) of(thread)[row] = {-INFINITY, {}, 0};
  int32_t status = run_linear(context, weights, {}, x, x_stride, m, dtype,
                              [&](const LinearTask& task, int thread) {
                                LinearTask own = task;
                                own.largest = of(thread);
                                context->kernels->linear(weights->view, own);
                              });
  if (status) return status;
  for (int64_t row = 0; row < m; ++row) {
    Largest best = of(0)[row];
    float broken = 0;
    for (int thread = 0; thread < threads; ++thread) {
      const Largest& own = of(thread)[row];
      if (own.value > best.value || (own.value == best.value && own.output < best.output))
        best = own;
      for (float lane : own.broken) broken += lane;
    }
    out[row] = best.value == -INFINITY ? int64_t(NO_TOKEN_LEFT) : best.output;
    if (broken != 0) out[row] = NOT_FINITE;
  }
  return STATUS_OK;
}

API int32_t asyncllm_gather(Context* context, const Weights* weights, const int64_t* ids,
                            int64_t count, void* out, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  const PackedView& view = weights->view;
  if (weights->kernels != context->kernels || (count && !ids) ||
      !is_matrix(out, dtype, count, view.k, view.k))
    return STATUS_INVALID;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= view.n) return STATUS_INDEX;
  int64_t size = size_of(dtype) * view.k;
  share(context, count, count * view.k * 8, [&](int64_t i, int) {
    context->kernels->gather(view, ids[i], static_cast<char*>(out) + i * size, dtype);
  });
  return STATUS_OK;
}

API int32_t asyncllm_select(Context* context, const void* x, int64_t x_stride, int64_t x_rows,
                            const int64_t* ids, int64_t count, void* out, int64_t width,
                            int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (!is_matrix(x, dtype, x_rows, width, x_stride) ||
      !is_matrix(out, dtype, count, width, width) || (count && !ids))
    return STATUS_INVALID;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= x_rows) return STATUS_INDEX;
  int64_t size = size_of(dtype);
  share(context, count, count * width, [&](int64_t i, int) {
    memcpy(static_cast<char*>(out) + i * width * size,
           static_cast<const char*>(x) + ids[i] * x_stride * size, width * size);
  });
  return STATUS_OK;
}

API int32_t asyncllm_rms_norm(Context* context, const void* x, int64_t x_stride, void* residual,
                              int64_t residual_stride, const void* weight, float eps, void* out,
                              int64_t rows, int64_t width, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (!is_matrix(x, dtype, rows, width, x_stride) || !is_matrix(out, dtype, rows, width, width) ||
      !is_matrix(weight, dtype, 1, width, width) ||
      (residual && !is_matrix(residual, dtype, rows, width, residual_stride)))
    return STATUS_INVALID;
  int64_t size = size_of(dtype);
  share(context, rows, rows * width * 2, [&](int64_t row, int) {
    char* sum = static_cast<char*>(residual);
    if (sum) sum += row * residual_stride * size;
    context->kernels->rms_norm(static_cast<const char*>(x) + row * x_stride * size, sum, weight,
                               eps, static_cast<char*>(out) + row * width * size, width, dtype);
  });
  return STATUS_OK;
}

API int32_t asyncllm_silu_mul(Context* context, const void* gate_up, int64_t stride, void* out,
                              int64_t rows, int64_t width, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (width < 1 || !is_matrix(gate_up, dtype, rows, 2 * width, stride) ||
      !is_matrix(out, dtype, rows, width, width))
    return STATUS_INVALID;
  int64_t size = size_of(dtype);
  share(context, rows, rows * width * 8, [&](int64_t row, int) {
    context->kernels->silu_mul(static_cast<const char*>(gate_up) + row * stride * size,
                               static_cast<char*>(out) + row * width * size, width, dtype);
  });
  return STATUS_OK;
}
