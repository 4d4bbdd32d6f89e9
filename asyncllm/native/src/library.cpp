// Contexts and ops on rows. An op checks its arguments, divides the work and calls the kernels.
#include <math.h>
#include <string.h>

#include <new>

#include "context.h"
#if defined(__x86_64__)
#include "processor.h"
#endif
#include "weights.h"

int64_t forks = 0;

namespace {

// From the best to the worst.
const Kernels* const ALL[] = {
#ifdef ASYNCLLM_AVX512BF16
    &kernels_avx512bf16,
#endif
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
  InstructionSets has = ask_processor();
  if (!strcmp(kernels->name, "avx2")) return has.avx2;
  if (!strcmp(kernels->name, "avx512")) return has.avx512;
  if (!strcmp(kernels->name, "avx512bf16")) return has.avx512bf16;
#endif
  (void)kernels;
  return true;
}

const Kernels* find_kernels(const char* isa) {
  for (const Kernels* kernels : ALL)
    if ((!isa || !strcmp(isa, kernels->name)) && supported(kernels)) return kernels;
  return nullptr;
}

// Made when the library is loaded.
const bool watched = (watch_forks([] { ++forks; }), true);

void destroy(Context* context) {
  free(context->scratch);
  context->~Context();
  free_aligned(context);
}

// Rounds x to integers with a scale per row; false if memory cannot be allocated.
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

// Rounds x to 8-bit integers in spans; false if memory cannot be allocated.
bool quantise_spans(Context* context, LinearTask* task, const void* x, int64_t stride, int64_t m,
                    int64_t k, int32_t dtype, int32_t weights_dtype) {
  int64_t spans = divide_up(k, SPAN), width = spans * SPAN;
  if (!grow(&context->shared, &context->shared_bytes, m * (width + spans * sizeof(Span))))
    return false;
  int8_t* integers = static_cast<int8_t*>(context->shared);
  Span* scales = reinterpret_cast<Span*>(integers + m * width);
  share(context, m, m * k * 4, [&](int64_t row, int) {
    const char* from = static_cast<const char*>(x) + row * stride * size_of(dtype);
    context->kernels->quantise_spans(from, dtype, integers + row * width, scales + row * spans, k,
                                     weights_dtype);
  });
  task->x8 = integers;
  task->spans = scales;
  return true;
}

// Converts x to the type that the kernels read; false if memory cannot be allocated.
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

// Divides the product of m rows and `units` units of panels into tasks. Tasks that read the same
// part of the weight are adjacent.
template <class F>
void share_linear(Context* context, LinearTask task, int64_t m, int64_t units, int64_t step,
                  int64_t work, F&& f) {
  const Kernels* kernels = context->kernels;
  // Kernels divide inputs of 8 bits themselves.
  int64_t row_parts = divide_up(m, task.x8 ? 4 * ROW_CHUNK : ROW_CHUNK);
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

// Checks and converts x, and calls f(task, thread) for each part of the product.
template <class F>
int32_t run_linear(Context* context, const Weights* weights, LinearTask task, const void* x,
                   int64_t x_stride, int64_t m, int32_t dtype, F&& f) {
  const PackedView& view = weights->view;
  const Kernels* kernels = context->kernels;
  bool integers = view.dtype == DTYPE_I8, wide = view.dtype == DTYPE_F32;
  bool spans = kernels->takes_spans(view.dtype);
  if (weights->kernels != kernels || (!integers && !wide && !spans && dtype != view.dtype))
    return STATUS_INVALID;
  if (!is_matrix(x, dtype, m, view.k, x_stride)) return STATUS_INVALID;
  if (m == 0) return STATUS_OK;
  if (spans) {
    if (!quantise_spans(context, &task, x, x_stride, m, view.k, dtype, view.dtype))
      return STATUS_NO_MEMORY;
  } else if (integers) {
    if (!quantise_rows(context, &task, x, x_stride, m, view.k, dtype)) return STATUS_NO_MEMORY;
  } else if (kernels->takes_bfloat16 && view.dtype == DTYPE_BF16) {
    task.x16 = static_cast<const uint16_t*>(x);
    task.x_stride = x_stride;
  } else if (!prepare_rows(context, &task, x, x_stride, m, view.k, dtype)) {
    return STATUS_NO_MEMORY;
  }
  task.dtype = wide ? int32_t(DTYPE_F32) : dtype;
  int64_t panels = divide_up(view.n, kernels->panel);
  share_linear(context, task, m, panels, m == 1 ? 4 : m <= 3 ? 2 : 1, m * view.n * view.k, f);
  return STATUS_OK;
}

}  // namespace

API const char* asyncllm_sources(void) { return ASYNCLLM_SOURCES; }
API const char* asyncllm_best_isa(void) { return find_kernels(nullptr)->name; }
API const char* asyncllm_isa(const Context* context) { return context->kernels->name; }

API void asyncllm_lengthen_slice(void) { lengthen_slice(); }

API Context* asyncllm_create(int32_t num_threads, const char* isa) {
  const Kernels* kernels = find_kernels(isa);
  if (!kernels || num_threads < 1 || num_threads > 1024) return nullptr;
  void* room = allocate(sizeof(Context));
  if (!room) return nullptr;
  Context* context = new (room) Context();
  context->kernels = kernels;
  context->process = forks;
  context->scratch = static_cast<void**>(calloc(num_threads, sizeof(void*)));
  if (!context->scratch || !context->pool.start(num_threads)) {
    destroy(context);
    return nullptr;
  }
  return context;
}

API void asyncllm_close(Context* context) {
  if (!is_open(context)) return;
  int threads = context->pool.size();
  context->queue.stop();
  context->pool.stop();
  for (int i = 0; i < threads; ++i) free_aligned(context->scratch[i]);
  free_aligned(context->shared);
  destroy(context);
}

API int32_t asyncllm_linear(Context* context, const Weights* weights, const void* x,
                            int64_t x_stride, void* y, int64_t y_stride, int64_t m,
                            int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  const PackedView& view = weights->view;
  int32_t y_dtype = view.dtype == DTYPE_F32 ? int32_t(DTYPE_F32) : dtype;
  if (!is_matrix(y, y_dtype, m, view.n, y_stride)) return STATUS_INVALID;
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
                            int64_t count, void* out, float scale, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  const PackedView& view = weights->view;
  if (weights->kernels != context->kernels || (count && !ids) ||
      !is_matrix(out, dtype, count, view.k, view.k))
    return STATUS_INVALID;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= view.n) return STATUS_INDEX;
  int64_t size = size_of(dtype) * view.k;
  share(context, count, count * view.k * 8, [&](int64_t i, int) {
    char* row = static_cast<char*>(out) + i * size;
    context->kernels->gather(view, ids[i], row, dtype);
    if (scale != 1.0f) context->kernels->scale(row, scale, view.k, dtype);
  });
  return STATUS_OK;
}

API int32_t asyncllm_select(Context* context, const void* x, int64_t x_stride, int64_t x_rows,
                            const int64_t* ids, int64_t count, void* out, int64_t width,
                            float scale, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (!is_matrix(x, dtype, x_rows, width, x_stride) ||
      !is_matrix(out, dtype, count, width, width) || (count && !ids))
    return STATUS_INVALID;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= x_rows) return STATUS_INDEX;
  int64_t size = size_of(dtype);
  share(context, count, count * width, [&](int64_t i, int) {
    char* row = static_cast<char*>(out) + i * width * size;
    memcpy(row, static_cast<const char*>(x) + ids[i] * x_stride * size, width * size);
    if (scale != 1.0f) context->kernels->scale(row, scale, width, dtype);
  });
  return STATUS_OK;
}

API int32_t asyncllm_rms_norm(Context* context, const void* x, int64_t x_stride, void* residual,
                              int64_t residual_stride, const void* weight,
                              int32_t weight_dtype, float eps, float multiplier, float scale,
                              void* out, int64_t rows, int64_t width, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (!is_matrix(x, dtype, rows, width, x_stride) || !is_matrix(out, dtype, rows, width, width) ||
      (weight_dtype != dtype && weight_dtype != DTYPE_F32) ||
      !is_matrix(weight, weight_dtype, 1, width, width) ||
      (residual && !is_matrix(residual, dtype, rows, width, residual_stride)))
    return STATUS_INVALID;
  int64_t size = size_of(dtype);
  share(context, rows, rows * width * 2, [&](int64_t row, int) {
    char* sum = static_cast<char*>(residual);
    if (sum) sum += row * residual_stride * size;
    context->kernels->rms_norm(static_cast<const char*>(x) + row * x_stride * size, sum, weight,
                               weight_dtype, eps, multiplier, scale,
                               static_cast<char*>(out) + row * width * size, width, dtype);
  });
  return STATUS_OK;
}

API int32_t asyncllm_add(Context* context, const void* x, int64_t x_stride, void* residual,
                         int64_t residual_stride, float multiplier, float scale, int64_t rows,
                         int64_t width, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (!is_matrix(x, dtype, rows, width, x_stride) ||
      !is_matrix(residual, dtype, rows, width, residual_stride))
    return STATUS_INVALID;
  int64_t size = size_of(dtype);
  share(context, rows, rows * width, [&](int64_t row, int) {
    context->kernels->add(static_cast<const char*>(x) + row * x_stride * size,
                          static_cast<char*>(residual) + row * residual_stride * size, multiplier,
                          scale, width, dtype);
  });
  return STATUS_OK;
}

API int32_t asyncllm_softcap(Context* context, void* x, int64_t stride, float cap, int64_t rows,
                             int64_t width, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (!is_matrix(x, dtype, rows, width, stride) || !(cap > 0.0f)) return STATUS_INVALID;
  int64_t size = size_of(dtype);
  share(context, rows, rows * width * 16, [&](int64_t row, int) {
    context->kernels->softcap(static_cast<char*>(x) + row * stride * size, cap, width, dtype);
  });
  return STATUS_OK;
}

API int32_t asyncllm_gated_mul(Context* context, const void* gate, int64_t gate_stride,
                               const void* up, int64_t up_stride, void* out, int64_t rows,
                               int64_t width, int32_t activation, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (!is_activation(activation) || !is_matrix(gate, dtype, rows, width, gate_stride) ||
      !is_matrix(up, dtype, rows, width, up_stride) || !is_matrix(out, dtype, rows, width, width))
    return STATUS_INVALID;
  int64_t size = size_of(dtype);
  share(context, rows, rows * width * 8, [&](int64_t row, int) {
    context->kernels->gated_mul(static_cast<const char*>(gate) + row * gate_stride * size,
                                static_cast<const char*>(up) + row * up_stride * size,
                                static_cast<char*>(out) + row * width * size, width, activation,
                                dtype);
  });
  return STATUS_OK;
}
