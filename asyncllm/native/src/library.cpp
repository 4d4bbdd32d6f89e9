// The entry points: they check what they are given, share out the work, and call the kernels.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <new>

#include "kernels.h"
#include "pool.h"

#define API extern "C" __attribute__((visibility("default")))

struct Context {
  Pool pool;
  const Kernels* kernels;
  int64_t process;         // forks that this process is away from the first
  void** scratch;          // per thread
  int64_t scratch_bytes;   // of each
  void* shared;
  int64_t shared_bytes;
};

struct Weights {
  PackedView view;
  const Kernels* kernels;
  int64_t bytes;
  bool mapped;
};

namespace {

constexpr int64_t CACHE_LINE = 64, HUGE_PAGE = int64_t(2) << 20;
// Multiplications below which a call is not worth waking another thread for.
constexpr int64_t SERIAL_WORK = 150000;
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
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("f16c");
#endif
  (void)kernels;
  return true;
}

const Kernels* find_kernels(const char* isa) {
  for (const Kernels* kernels : ALL)
    if ((!isa || !strcmp(isa, kernels->name)) && supported(kernels)) return kernels;
  return nullptr;
}

int64_t forks = 0;
pthread_once_t watch_forks = PTHREAD_ONCE_INIT;

bool is_open(const Context* context) { return context && context->process == forks; }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

bool is_dtype(int32_t dtype) { return dtype >= DTYPE_F32 && dtype <= DTYPE_F16; }
int64_t size_of(int32_t dtype) { return dtype == DTYPE_F32 ? 4 : 2; }
bool aligned(const void* p, int64_t size) { return reinterpret_cast<uintptr_t>(p) % size == 0; }
// Whether `rows` rows of `width` elements at p can be read or written.
bool is_matrix(const void* p, int32_t dtype, int64_t rows, int64_t width, int64_t stride) {
  if (!is_dtype(dtype) || rows < 0 || width < 1) return false;
  return rows == 0 || (p && aligned(p, size_of(dtype)) && (rows == 1 || stride >= width));
}

void* allocate(int64_t bytes) {
  void* p = nullptr;
  return posix_memalign(&p, CACHE_LINE, most(bytes, CACHE_LINE)) ? nullptr : p;
}

bool grow(void** p, int64_t* held, int64_t bytes) {
  if (bytes <= *held) return true;
  free(*p);
  *p = allocate(bytes);
  *held = *p ? bytes : 0;
  return *p;
}

bool grow_scratch(Context* context, int64_t bytes) {
  if (bytes <= context->scratch_bytes) return true;
  context->scratch_bytes = 0;
  for (int i = 0; i < context->pool.size(); ++i) {
    free(context->scratch[i]);
    context->scratch[i] = allocate(bytes);
    if (!context->scratch[i]) return false;
  }
  context->scratch_bytes = bytes;
  return true;
}

// Runs f(task) for each, on all threads where the work is worth it.
template <class F> void share(Context* context, int64_t tasks, int64_t work, F&& f) {
  if (work < SERIAL_WORK) {
    for (int64_t task = 0; task < tasks; ++task) f(task, 0);
    return;
  }
  context->pool.each(tasks, f);
}

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

// x as the kernels read it; null where there is no memory.
bool prepare_rows(Context* context, LinearTask* task, const void* x, int64_t stride, int64_t m,
                  int64_t k, int32_t dtype) {
  task->x16 = nullptr;
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

// Splits m rows times `units` panels or outputs into tasks, with the rows of one part of the
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
  share(context, parts * row_parts, work, [&](int64_t index, int) {
    LinearTask own = task;
    own.first = index / row_parts * per_part;
    own.last = least(units, own.first + per_part);
    own.first_row = index % row_parts * rows;
    own.last_row = least(m, own.first_row + rows);
    f(own);
  });
}

}  // namespace

API int32_t asyncllm_abi(void) { return ASYNCLLM_ABI; }
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
  context->pool.stop();
  for (int i = 0; i < threads; ++i) free(context->scratch[i]);
  free(context->scratch);
  free(context->shared);
  delete context;
}

API Weights* asyncllm_pack(Context* context, const void* values, int32_t dtype, int64_t n,
                           int64_t k, int64_t row_stride, const void* bias) {
  if (!is_open(context) || n < 1 || !is_matrix(values, dtype, n, k, row_stride))
    return nullptr;
  if (bias && !aligned(bias, size_of(dtype))) return nullptr;
  const Kernels* kernels = context->kernels;
  Weights* weights = static_cast<Weights*>(calloc(1, sizeof(Weights)));
  if (!weights) return nullptr;
  int64_t panels = divide_up(n, kernels->panel), elements = kernels->panel_elements(k, dtype);
  weights->kernels = kernels;
  weights->bytes = panels * elements * size_of(dtype);
  void* data = map_weights(weights->bytes, &weights->mapped);
  float* own_bias = nullptr;
  if (bias) own_bias = static_cast<float*>(allocate(panels * kernels->panel * 4));
  weights->view = {data, own_bias, n, k, elements, dtype};
  if (!data || (bias && !own_bias)) {
    asyncllm_free_weights(weights);
    return nullptr;
  }
  if (bias) {
    memset(own_bias, 0, panels * kernels->panel * 4);
    kernels->widen(bias, dtype, own_bias, n);
  }
  PlainView plain = {values, nullptr, n, k, row_stride, dtype};
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
  free(const_cast<float*>(weights->view.bias));
  free(weights);
}

API int64_t asyncllm_weights_bytes(const Weights* weights) { return weights->bytes; }

API int32_t asyncllm_linear(Context* context, const Weights* weights, const void* x,
                            int64_t x_stride, void* y, int64_t y_stride, int64_t m,
                            int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  const PackedView& view = weights->view;
  const Kernels* kernels = context->kernels;
  if (weights->kernels != kernels || dtype != view.dtype) return STATUS_INVALID;
  if (!is_matrix(x, dtype, m, view.k, x_stride) || !is_matrix(y, dtype, m, view.n, y_stride))
    return STATUS_INVALID;
  if (m == 0) return STATUS_OK;
  LinearTask task = {};
  if (kernels->takes_bfloat16 && dtype == DTYPE_BF16) {
    task.x16 = static_cast<const uint16_t*>(x);
    task.x_stride = x_stride;
  } else if (!prepare_rows(context, &task, x, x_stride, m, view.k, dtype)) {
    return STATUS_NO_MEMORY;
  }
  task.y = y;
  task.y_stride = y_stride;
  task.dtype = dtype;
  int64_t panels = divide_up(view.n, kernels->panel);
  share_linear(context, task, m, panels, m == 1 ? 4 : m <= 3 ? 2 : 1, m * view.n * view.k,
               [&](const LinearTask& own) { kernels->linear(view, own); });
  return STATUS_OK;
}

API int32_t asyncllm_linear_plain(Context* context, const void* values, int32_t values_dtype,
                                  int64_t n, int64_t k, int64_t row_stride, const void* bias,
                                  const void* x, int64_t x_stride, void* y, int64_t y_stride,
                                  int64_t m, int32_t dtype) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (n < 1 || !is_matrix(values, values_dtype, n, k, row_stride)) return STATUS_INVALID;
  if (bias && !aligned(bias, size_of(values_dtype))) return STATUS_INVALID;
  if (!is_matrix(x, dtype, m, k, x_stride) || !is_matrix(y, dtype, m, n, y_stride))
    return STATUS_INVALID;
  if (m == 0) return STATUS_OK;
  LinearTask task = {};
  if (!prepare_rows(context, &task, x, x_stride, m, k, dtype)) return STATUS_NO_MEMORY;
  task.y = y;
  task.y_stride = y_stride;
  task.dtype = dtype;
  PlainView view = {values, bias, n, k, row_stride, values_dtype};
  share_linear(context, task, m, n, 4, m * n * k,
               [&](const LinearTask& own) { context->kernels->linear_plain(view, own); });
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

namespace {

bool is_cache(const void* cache, int32_t dtype, int64_t num_blocks, int64_t block_size,
              int64_t kv_heads, int64_t head_dim) {
  return is_dtype(dtype) && cache && aligned(cache, size_of(dtype)) && num_blocks > 0 &&
         block_size > 0 && kv_heads > 0 && head_dim > 0;
}

// One token, or a tile of several, of a sequence; all key/value heads of it have this shape.
struct Piece {
  int64_t row, first_token, last_token, first_key, last_key, partial;
};

class AttentionPlan {
 public:
  explicit AttentionPlan(const AttentionArgs& args) : args_(args) {
    group_ = args.heads / args.kv_heads;
    parts_ = divide_up(group_, TILE);
    heads_ = divide_up(group_, parts_);
    tokens_ = most(1, TILE / heads_);
  }
  ~AttentionPlan() { free(pieces_); }

  // Checks lengths and block tables, and counts pieces or, once there is memory, makes them.
  int32_t make() {
    int64_t count = 0;
    int32_t status = walk(&count);
    if (status) return status;
    pieces_ = static_cast<Piece*>(malloc(most(count, 1) * sizeof(Piece)));
    if (!pieces_) return STATUS_NO_MEMORY;
    count_ = partials_ = work_ = 0;
    return walk(&count_);
  }

  int64_t tasks() const { return count_ * args_.kv_heads * parts_; }
  int64_t work() const { return work_; }
  int64_t partial_rows() const { return partials_; }
  const Piece* pieces() const { return pieces_; }
  int64_t count() const { return count_; }
  int64_t head_parts() const { return args_.kv_heads * parts_; }

  // The part of a piece that falls to a key/value head, or a part of its query heads.
  AttentionTask task(const Piece& piece, int64_t part) const {
    int64_t kv_head = part / parts_, first = part % parts_ * heads_;
    int64_t last = least(group_, first + heads_);
    return {&args_,
            piece.row,
            piece.first_token,
            piece.last_token,
            kv_head,
            kv_head * group_ + first,
            kv_head * group_ + last,
            piece.first_key,
            piece.last_key,
            nullptr};
  }

 private:
  int32_t walk(int64_t* count) {
    int64_t capacity = args_.table_width * args_.block_size;
    if (args_.query_start[0] != 0) return STATUS_INVALID;
    for (int64_t row = 0; row < args_.rows; ++row) {
      int64_t first = args_.query_start[row], last = args_.query_start[row + 1];
      int64_t length = args_.seq_lens[row];
      if (last < first || last > args_.num_tokens || length < 0) return STATUS_INVALID;
      if (length > capacity) return STATUS_INDEX;
      if (length > 0 && last - first > length) return STATUS_INVALID;
      int32_t status = pieces_ ? int32_t(STATUS_OK) : check_table(row, length, last - first);
      if (status) return status;
      if (last - first == 1)
        add_decode(row, first, length, count);
      else
        for (int64_t token = first; token < last; token += tokens_)
          add_tile(row, token, least(last, token + tokens_), length - last, count);
    }
    return STATUS_OK;
  }

  int64_t first_key(int64_t position) const {
    return args_.window ? most(0, position + 1 - args_.window) : 0;
  }

  // Blocks that only keys outside a window lie in may have been given back.
  int32_t check_table(int64_t row, int64_t length, int64_t tokens) {
    const int32_t* table = args_.block_table + row * args_.table_stride;
    int64_t start = first_key(length - tokens) / args_.block_size;
    for (int64_t i = start; i < divide_up(length, args_.block_size); ++i)
      if (table[i] < 0 || table[i] >= args_.num_blocks) return STATUS_INDEX;
    return STATUS_OK;
  }

  void add(const Piece& piece, int64_t* count) {
    if (pieces_) pieces_[*count] = piece;
    ++*count;
    work_ += (piece.last_token - piece.first_token) * (piece.last_key - piece.first_key + 1) *
             args_.heads * args_.head_dim * 2;
  }

  void add_decode(int64_t row, int64_t token, int64_t length, int64_t* count) {
    int64_t first = first_key(length - 1);
    int64_t splits = divide_up(length, SPLIT) - first / SPLIT;
    if (splits <= 1) return add({row, token, token + 1, first, length, -1}, count);
    while (first < length) {
      int64_t last = least(length, (first / SPLIT + 1) * SPLIT);
      add({row, token, token + 1, first, last, partials_++}, count);
      first = last;
    }
  }

  void add_tile(int64_t row, int64_t first, int64_t last, int64_t shift, int64_t* count) {
    int64_t start = shift + first, end = most(0, shift + last);
    add({row, first, last, least(first_key(most(0, start)), end), end, -1}, count);
  }

  const AttentionArgs& args_;
  int64_t group_, parts_, heads_, tokens_;
  Piece* pieces_ = nullptr;
  int64_t count_ = 0, partials_ = 0, work_ = 0;
};

}  // namespace

API int32_t asyncllm_attention(Context* context, const AttentionArgs* args) {
  if (!is_open(context)) return STATUS_CLOSED;
  const AttentionArgs& a = *args;
  if (!is_cache(a.cache, a.dtype, a.num_blocks, a.block_size, a.kv_heads, a.head_dim) ||
      a.heads < a.kv_heads || a.heads % a.kv_heads || a.rows < 0 || a.num_tokens < 0 ||
      a.window < 0 || a.head_dim > 4096)
    return STATUS_INVALID;
  if (a.rows == 0 || a.num_tokens == 0) return STATUS_OK;
  int64_t size = size_of(a.dtype);
  if (!a.q || !a.out || !aligned(a.q, size) || !aligned(a.out, size) || !a.block_table ||
      !a.query_start || !a.seq_lens || a.table_width < 0)
    return STATUS_INVALID;
  AttentionPlan plan(a);
  int32_t status = plan.make();
  if (status) return status;
  const Kernels* kernels = context->kernels;
  int64_t row_floats = partial_floats(a.head_dim), heads = a.heads;
  if (!grow_scratch(context, kernels->attention_scratch(a.head_dim)) ||
      !grow(&context->shared, &context->shared_bytes, plan.partial_rows() * heads * row_floats * 4))
    return STATUS_NO_MEMORY;
  float* partials = static_cast<float*>(context->shared);
  int64_t parts = plan.head_parts();
  // Partial results lie by head, then by split.
  auto partial_at = [&](const AttentionTask& task, int64_t first, int64_t splits, int64_t split) {
    int64_t group = task.last_head - task.first_head;
    return partials + (first * heads + task.first_head * splits + split * group) * row_floats;
  };
  auto splits_of = [&](int64_t index, int64_t* first) {
    const Piece* pieces = plan.pieces();
    int64_t start = index, end = index + 1;
    while (start > 0 && pieces[start - 1].row == pieces[index].row) --start;
    while (end < plan.count() && pieces[end].row == pieces[index].row) ++end;
    *first = start;
    return end - start;
  };
  share(context, plan.tasks(), plan.work(), [&](int64_t at, int thread) {
    // The last tiles of a prompt see the most keys: they come first.
    int64_t index = plan.count() - 1 - at / parts;
    const Piece& piece = plan.pieces()[index];
    AttentionTask task = plan.task(piece, at % parts);
    if (piece.partial >= 0) {
      int64_t first, splits = splits_of(index, &first);
      task.partial = partial_at(task, plan.pieces()[first].partial, splits, index - first);
    }
    kernels->attention(task, context->scratch[thread]);
  });
  if (!plan.partial_rows()) return STATUS_OK;
  share(context, plan.tasks(), plan.work(), [&](int64_t at, int thread) {
    int64_t index = at / parts, first;
    const Piece& piece = plan.pieces()[index];
    if (piece.partial < 0) return;
    int64_t splits = splits_of(index, &first);
    if (first != index) return;
    AttentionTask task = plan.task(piece, at % parts);
    kernels->merge(task, partial_at(task, piece.partial, splits, 0), splits,
                   context->scratch[thread]);
  });
  return STATUS_OK;
}

API int32_t asyncllm_rope_and_cache(Context* context, const RopeArgs* args) {
  if (!is_open(context)) return STATUS_CLOSED;
  const RopeArgs& a = *args;
  int64_t width = (a.heads + 2 * a.kv_heads) * a.head_dim;
  if (!is_cache(a.cache, a.dtype, a.num_blocks, a.block_size, a.kv_heads, a.head_dim) ||
      a.heads < 1 || a.head_dim % 2 ||
      !is_matrix(a.qkv, a.dtype, a.num_tokens, width, a.token_stride) ||
      !is_matrix(a.table, a.dtype, 1, a.head_dim, a.head_dim) || !a.q_norm != !a.k_norm)
    return STATUS_INVALID;
  int64_t size = size_of(a.dtype);
  if ((a.q_norm && (!aligned(a.q_norm, size) || !aligned(a.k_norm, size))) ||
      (a.num_tokens && (!a.slots || !a.positions)))
    return STATUS_INVALID;
  for (int64_t token = 0; token < a.num_tokens; ++token)
    if (a.slots[token] < 0 || a.slots[token] >= a.num_blocks * a.block_size ||
        a.positions[token] < 0 || a.positions[token] >= a.table_rows)
      return STATUS_INDEX;
  share(context, a.num_tokens, a.num_tokens * width * 4,
        [&](int64_t token, int) { context->kernels->rope(a, token); });
  return STATUS_OK;
}
