// A mixture of experts: rows are sorted by expert, and each expert's rows are multiplied together.
#include "weights.h"

namespace {

// Maximum bytes for the rows of a pass over some of the tokens.
constexpr int64_t PASS_BYTES = int64_t(64) << 20;

// Places adjacent arrays in the memory at `base`; if `base` is null, only counts their bytes.
struct Arena {
  char* base;
  int64_t used;
  template <class T> T* take(int64_t count) {
    T* at = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += divide_up(count * int64_t(sizeof(T)), CACHE_LINE) * CACHE_LINE;
    return at;
  }
};

// Rows of k elements in the type that the kernels of linear layers read.
struct Operand {
  int64_t k, stride;
  int32_t dtype;  // of the weights
  float *wide, *scales;
  int16_t* integers;
  int8_t* codes;  // rounded to 8-bit integers in spans
  Span* spans;
  char* paired;  // in the model's own type, for weights in pairs of bfloat16

  void lay_out(Arena& arena, const PackedView& view, int64_t rows, const Kernels* kernels) {
    k = view.k, stride = k, dtype = view.dtype;
    wide = scales = nullptr, integers = nullptr, codes = nullptr, spans = nullptr, paired = nullptr;
    if (kernels->takes_spans(dtype)) {
      stride = divide_up(k, SPAN) * SPAN;
      codes = arena.take<int8_t>(rows * stride);
      spans = arena.take<Span>(rows * (stride / SPAN));
    } else if (dtype == DTYPE_I8) {
      stride = divide_up(k, 2) * 2;
      integers = arena.take<int16_t>(rows * stride);
      scales = arena.take<float>(rows);
    } else if (kernels->takes_bfloat16 && dtype == DTYPE_BF16) {
      paired = arena.take<char>(rows * k * 2);
    } else {
      wide = arena.take<float>(rows * k);
    }
  }

  void put(const Kernels* kernels, int64_t row, const void* from, int32_t x_dtype) const {
    if (codes)
      kernels->quantise_spans(from, x_dtype, codes + row * stride, spans + row * (stride / SPAN), k,
                              dtype);
    else if (integers)
      scales[row] = kernels->quantise(from, x_dtype, integers + row * stride, k, largest_integer(k));
    else if (paired)
      __builtin_memcpy(paired + row * k * 2, from, k * 2);
    else
      kernels->widen(from, x_dtype, wide + row * k, k);
  }

  LinearTask task(void* y, int64_t y_stride, int32_t y_dtype) const {
    LinearTask task = {};
    task.x = wide, task.x16 = reinterpret_cast<const uint16_t*>(paired);
    task.x8 = codes, task.spans = spans;
    task.xq = integers, task.x_scales = scales, task.x_stride = stride;
    task.y = y, task.y_stride = y_stride, task.dtype = y_dtype;
    return task;
  }
};

// Rows of one expert that are multiplied in one pass over the expert's panels.
struct Unit {
  int64_t expert, first_row, last_row;
};

// A pass over some tokens: pairs of token and expert, sorted by expert, with a row for each.
struct Pass {
  Context* context;
  const ExpertsArgs& args;
  int64_t first, tokens, pairs;
  int64_t *starts, *tokens_of, *places;
  Unit* units;
  int64_t num_units = 0;
  Operand in, middle;
  char *gate_up, *inner;
  float* results;

  Pass(Context* context, const ExpertsArgs& args, int64_t first, int64_t tokens)
      : context(context), args(args), first(first), tokens(tokens), pairs(tokens * args.top_k) {}

  void lay_out(Arena& arena) {
    int64_t size = size_of(args.dtype);
    starts = arena.take<int64_t>(args.num_experts + 1);
    tokens_of = arena.take<int64_t>(pairs);
    places = arena.take<int64_t>(pairs);
    units = arena.take<Unit>(pairs + pairs / ROW_CHUNK + 1);
    in.lay_out(arena, args.gate_up[0]->view, pairs, context->kernels);
    gate_up = arena.take<char>(pairs * 2 * args.inner * size);
    inner = arena.take<char>(pairs * args.inner * size);
    middle.lay_out(arena, args.down[0]->view, pairs, context->kernels);
    results = arena.take<float>(pairs * args.width);
  }

  // Sorts the pairs by expert, by a counting sort, which keeps an expert's tokens in order.
  void sort() {
    const int32_t* ids = args.ids + first * args.top_k;
    for (int64_t i = 0; i <= args.num_experts; ++i) starts[i] = 0;
    for (int64_t i = 0; i < pairs; ++i) ++starts[ids[i] + 1];
    for (int64_t i = 0; i < args.num_experts; ++i) starts[i + 1] += starts[i];
    for (int64_t i = 0; i < pairs; ++i) {
      int64_t place = starts[ids[i]]++;
      places[i] = place;
      tokens_of[place] = first + i / args.top_k;
    }
    // The loop above has advanced starts[expert] to the end of the expert's rows.
    for (int64_t expert = 0, row = 0; expert < args.num_experts; ++expert)
      for (int64_t end = starts[expert]; row < end; row = units[num_units++].last_row)
        units[num_units] = {expert, row, least(end, row + ROW_CHUNK)};
  }

  // Multiplies each unit by its expert's weights.
  void multiply(const Weights* const* weights, const LinearTask& task) {
    const Kernels* kernels = context->kernels;
    const PackedView& view = weights[0]->view;
    int64_t panels = divide_up(view.n, kernels->panel);
    int64_t parts = least(divide_up(8 * context->pool.size(), num_units), divide_up(panels, 4));
    int64_t per_part = divide_up(divide_up(panels, parts), 4) * 4;
    parts = divide_up(panels, per_part);
    share(context, num_units * parts, pairs * view.n * view.k, [&](int64_t index, int) {
      const Unit& unit = units[index / parts];
      LinearTask own = task;
      own.first_row = unit.first_row, own.last_row = unit.last_row;
      own.first = index % parts * per_part;
      own.last = least(panels, own.first + per_part);
      kernels->linear(weights[unit.expert]->view, own);
    });
  }

  void activate(int64_t row) {
    int64_t size = size_of(args.dtype);
    const char* from = gate_up + row * 2 * args.inner * size;
    char* to = inner + row * args.inner * size;
    if (args.limit > 0)
      context->kernels->clamped_swiglu(from, to, args.inner, args.alpha, args.limit, args.dtype);
    else
      context->kernels->gated_mul(from, from + args.inner * size, to, args.inner, args.activation,
                                  args.dtype);
    middle.put(context->kernels, row, to, args.dtype);
  }

  void sum(int64_t index) {
    int64_t token = first + index, size = size_of(args.dtype);
    auto at = [&](const void* p, int64_t stride) {
      return p ? static_cast<const char*>(p) + token * stride * size : nullptr;
    };
    context->kernels->weighted_sum(
        {results, places + index * args.top_k, args.weights + token * args.top_k, args.top_k,
         args.width, at(args.shared, args.shared_stride), at(args.gate, args.gate_stride),
         static_cast<char*>(args.out) + token * args.width * size, args.dtype});
  }

  void run() {
    sort();
    share(context, pairs, pairs * args.width / 4, [&](int64_t row, int) {
      const char* x = static_cast<const char*>(args.x);
      in.put(context->kernels, row, x + tokens_of[row] * args.x_stride * size_of(args.dtype),
             args.dtype);
    });
    multiply(args.gate_up, in.task(gate_up, 2 * args.inner, args.dtype));
    share(context, pairs, pairs * args.inner * 8, [&](int64_t row, int) { activate(row); });
    multiply(args.down, middle.task(results, args.width, DTYPE_F32));
    share(context, tokens, pairs * args.width, [&](int64_t index, int) { sum(index); });
  }
};

bool is_layer(const Context* context, const Weights* const* weights, int64_t count, int64_t n,
              int64_t k, int32_t dtype) {
  if (!weights) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (!weights[i] || weights[i]->kernels != context->kernels) return false;
    const PackedView& view = weights[i]->view;
    if (view.n != n || view.k != k || view.dtype != weights[0]->view.dtype) return false;
    if (view.dtype != DTYPE_I8 && !is_grouped(view.dtype) && view.dtype != dtype) return false;
  }
  return true;
}

bool is_valid(const Context* context, const ExpertsArgs& a, int64_t rows) {
  return is_activation(a.activation) && a.num_experts >= 1 && a.top_k >= 1 && a.top_k <= a.num_experts && a.inner >= 1 &&
         is_matrix(a.x, a.dtype, rows, a.width, a.x_stride) &&
         is_matrix(a.out, a.dtype, rows, a.width, a.width) &&
         (!a.shared || is_matrix(a.shared, a.dtype, rows, a.width, a.shared_stride)) &&
         (!a.gate || (a.shared && is_matrix(a.gate, a.dtype, rows, 1, a.gate_stride))) &&
         is_layer(context, a.gate_up, a.num_experts, 2 * a.inner, a.width, a.dtype) &&
         is_layer(context, a.down, a.num_experts, a.width, a.inner, a.dtype) &&
         (!rows || (a.ids && a.weights));
}

}  // namespace

API int32_t asyncllm_experts(Context* context, const ExpertsArgs* args, int64_t rows) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (!is_valid(context, *args, rows)) return STATUS_INVALID;
  for (int64_t i = 0; i < rows * args->top_k; ++i)
    if (args->ids[i] < 0 || args->ids[i] >= args->num_experts) return STATUS_INDEX;
  Arena one = {};
  Pass(context, *args, 0, 1).lay_out(one);
  int64_t most_tokens = most(1, least(rows, PASS_BYTES / one.used));
  Arena whole = {};
  Pass(context, *args, 0, most_tokens).lay_out(whole);
  if (!grow(&context->shared, &context->shared_bytes, whole.used)) return STATUS_NO_MEMORY;
  for (int64_t first = 0; first < rows; first += most_tokens) {
    Pass pass(context, *args, first, least(most_tokens, rows - first));
    Arena arena = {static_cast<char*>(context->shared), 0};
    pass.lay_out(arena);
    pass.run();
  }
  return STATUS_OK;
}
