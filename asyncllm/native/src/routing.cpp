// Routing: the scores of experts, the best experts of each token, and their weights.
#include <math.h>

#include "context.h"

namespace {

// Chooses one row's experts. NaN scores never compare as greater, so that the chosen experts are
// always different. If an expert with a NaN score is chosen, its weight and the row's result are
// NaN.
struct Router {
  const RoutingArgs& args;
  float *scores, *choice, *groups;

  void score() {
    int64_t count = args.num_experts;
    float largest = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; ++i) largest = scores[i] > largest ? scores[i] : largest;
    for (int64_t i = 0; i < count; ++i) {
      scores[i] = args.sigmoid ? 1 / (1 + expf(-scores[i])) : expf(scores[i] - largest);
      total += scores[i];
    }
    if (!args.sigmoid)
      for (int64_t i = 0; i < count; ++i) scores[i] /= total;
    for (int64_t i = 0; i < count; ++i)
      choice[i] = scores[i] + (args.correction ? args.correction[i] : 0);
  }

  // Marks the greatest value that is not taken yet, the first of equal ones; returns its index.
  static int64_t take_best(float* values, bool* taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i)
      if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    taken[best] = true;
    return best;
  }

  // Marks the experts of all but the best groups as taken. A group's score is the sum of its two
  // best.
  void choose_groups(bool* taken) {
    int64_t size = args.num_experts / args.num_groups;
    bool* chosen = taken + args.num_experts;
    for (int64_t group = 0; group < args.num_groups; ++group) {
      float first = -INFINITY, second = -INFINITY;
      for (int64_t i = group * size; i < (group + 1) * size; ++i) {
        float value = choice[i];
        if (!(value <= first)) second = first, first = value;
        else if (!(value <= second)) second = value;
      }
      groups[group] = first + second;
      chosen[group] = false;
    }
    for (int64_t i = 0; i < args.top_groups; ++i) take_best(groups, chosen, args.num_groups);
    for (int64_t i = 0; i < args.num_experts; ++i) taken[i] = !chosen[i / size];
  }

  void choose(bool* taken, int32_t* ids, float* weights) {
    for (int64_t i = 0; i < args.num_experts; ++i) taken[i] = false;
    if (args.num_groups > 1) choose_groups(taken);
    float sum = 0;
    for (int64_t i = 0; i < args.top_k; ++i) {
      int64_t best = take_best(choice, taken, args.num_experts);
      ids[i] = int32_t(best);
      weights[i] = scores[best];
      sum += weights[i];
    }
    float divisor = sum < args.least_sum ? args.least_sum : sum;
    for (int64_t i = 0; i < args.top_k; ++i) {
      weights[i] = (args.renormalise ? weights[i] / divisor : weights[i]) * args.scale;
      if (args.expert_scale) weights[i] *= args.expert_scale[ids[i]];
    }
  }
};

bool is_valid(const RoutingArgs& a) {
  if (a.num_experts < 1 || a.num_groups < 1 || a.top_groups < 1 || a.top_groups > a.num_groups)
    return false;
  int64_t size = a.num_experts / a.num_groups;
  return size * a.num_groups == a.num_experts && a.top_k >= 1 && a.top_k <= size * a.top_groups;
}

}  // namespace

API int32_t asyncllm_routing(Context* context, const RoutingArgs* args, int64_t rows) {
  if (!is_open(context)) return STATUS_CLOSED;
  const RoutingArgs& a = *args;
  if (!is_valid(a) || !is_matrix(a.logits, a.dtype, rows, a.num_experts, a.stride) ||
      (rows && (!a.ids || !a.weights)))
    return STATUS_INVALID;
  int64_t floats = 2 * a.num_experts + a.num_groups;
  if (!grow_scratch(context, floats * 4 + a.num_experts + a.num_groups)) return STATUS_NO_MEMORY;
  share(context, rows, rows * a.num_experts * (16 + a.top_k), [&](int64_t row, int thread) {
    float* scores = static_cast<float*>(context->scratch[thread]);
    const char* from = static_cast<const char*>(a.logits) + row * a.stride * size_of(a.dtype);
    context->kernels->widen(from, a.dtype, scores, a.num_experts);
    Router router = {a, scores, scores + a.num_experts, scores + 2 * a.num_experts};
    router.score();
    router.choose(reinterpret_cast<bool*>(scores + floats), a.ids + row * a.top_k,
                  a.weights + row * a.top_k);
  });
  return STATUS_OK;
}
