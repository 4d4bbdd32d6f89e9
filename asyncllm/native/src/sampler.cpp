// Samples a token per row, as gpu/ops/gumbel.py does, without a sort of the vocabulary.
#include "candidates.h"
#include "noise.h"

namespace {

// A row's parameters and the statistics of its chunks.
struct Draw {
  Extremes extremes;
  const float* sums;
  float largest;
  uint64_t key;
  int64_t top_k;
  float top_p, min_p;
};

constexpr float MIN_TEMPERATURE = 1e-5f;
// Number of chunks of a row that one task reduces.
constexpr int64_t TASK_CHUNKS = 64;

// Whether top_k, top_p or min_p of request index `line` may exclude a token.
bool truncates(const SampleArgs& args, int64_t line) {
  return (args.top_k[line] > 0 && args.top_k[line] < args.vocab_size) || args.top_p[line] < 1 ||
         args.min_p[line] > 0;
}

// Races the chunks by their mass, then the tokens of the winning chunk.
int64_t race_in_rounds(const Draw& draw) {
  int64_t won = 0;
  float best = -INFINITY;
  for (int64_t chunk = 0; chunk < draw.extremes.chunks(); ++chunk) {
    float top = draw.extremes.maxima[chunk];
    if (top == -INFINITY) continue;
    float score = top - draw.largest + logf(draw.sums[chunk]) - chunk_noise(draw.key, chunk);
    if (score > best) {
      best = score;
      won = chunk;
    }
  }
  float logits[CHUNK];
  draw.extremes.kernels->read_chunk(draw.extremes.row, won, logits);
  int64_t token = 0;
  best = -INFINITY;
  for (int64_t i = 0; i < CHUNK; ++i) {
    if (logits[i] == -INFINITY) continue;
    float score = logits[i] - token_noise(draw.key, won * CHUNK + i, CHUNK);
    if (score > best) {
      best = score;
      token = won * CHUNK + i;
    }
  }
  return token;
}

// Number of candidates that survive truncation; -1 if top_p may keep tokens that are no candidates.
// The largest logit has mass 1.
int64_t count_kept(const Draw& draw, const Candidates& candidates, int64_t limit, double total) {
  int64_t count = least(candidates.count(), limit);
  if (draw.top_p >= 1) return count;
  auto mass_of = [&](int64_t i) { return exp(double(candidates.value(i)) - draw.largest); };
  if (total == INFINITY) {
    total = 0;
    for (int64_t i = 0; i < count; ++i) total += mass_of(i);
  }
  double allowed = double(draw.top_p) * total, sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    double mass = mass_of(i);
    sum += mass;
    if (!(sum - mass < allowed)) return i;
  }
  return sum >= allowed || count == limit ? count : -1;
}

// Races the tokens that survive truncation. With top_p alone, candidates are collected until they
// have top_p of the mass of all tokens.
int64_t race_truncated(const Draw& draw, void* scratch) {
  Candidates candidates(draw.extremes, scratch);
  bool limited = draw.top_k > 0 && draw.top_k < draw.extremes.row.count;
  int64_t limit = limited ? draw.top_k : INT32_MAX;
  float lowest = fmaxf(draw.largest + logf(draw.min_p), -FLT_MAX);
  double total = limited || draw.min_p > 0 ? INFINITY : draw.extremes.mass(draw.sums, draw.largest);
  Descent descent(draw.largest, lowest);
  int64_t kept = -1;
  while (kept < 0) {
    float bound = total < INFINITY ? descent.next() : lowest;
    if (limited) {
      bound = limit <= draw.extremes.chunks() ? fmaxf(candidates.bound_of(limit), lowest)
                                              : descent.next();
    }
    candidates.take(bound);
    if (limited && candidates.count() < limit && bound > lowest) continue;
    kept = count_kept(draw, candidates, limit, total);
    if (kept < 0 && bound <= lowest) kept = candidates.count();
  }
  int64_t token = candidates.token(0);
  float best = -INFINITY;
  for (int64_t i = 0; i < kept; ++i) {
    float score = candidates.value(i) - token_noise(draw.key, candidates.token(i), CHUNK);
    if (score > best) {
      best = score;
      token = candidates.token(i);
    }
  }
  return token;
}

int64_t sample_row(const SampleArgs& args, const Draw& draw, int64_t line, void* scratch) {
  if (draw.largest == -INFINITY) return NO_TOKEN_LEFT;
  if (draw.largest != draw.largest) return NOT_FINITE;
  if (args.temperature[line] < MIN_TEMPERATURE) return draw.extremes.find(draw.largest);
  return truncates(args, line) ? race_truncated(draw, scratch) : race_in_rounds(draw);
}

bool is_valid(const SampleArgs& a) {
  return is_dtype(a.dtype) && a.rows >= 0 && a.vocab_size > 0 && a.vocab_size <= INT32_MAX &&
         a.row_stride >= 0 && a.lines > 0 &&
         (a.rows == 0 || (a.logits && aligned(a.logits, size_of(a.dtype)) && a.req_indices &&
                          a.positions && a.states && a.temperature && a.top_k && a.top_p &&
                          a.min_p && a.last_sampled && a.out));
}

}  // namespace

API int32_t asyncllm_sample(Context* context, const SampleArgs* args) {
  if (!is_open(context)) return STATUS_CLOSED;
  const SampleArgs& a = *args;
  if (!is_valid(a)) return STATUS_INVALID;
  int64_t chunks = num_chunks(a.vocab_size), parts = divide_up(chunks, TASK_CHUNKS), work = 0;
  bool searches = false;
  for (int64_t row = 0; row < a.rows; ++row) {
    int64_t line = a.req_indices[row];
    if (line >= a.lines) return STATUS_INDEX;
    if (line < 0) continue;
    bool drawn = a.temperature[line] >= MIN_TEMPERATURE;
    searches |= drawn && truncates(a, line);
    work += a.vocab_size * (drawn ? 16 : 4);
  }
  if (!grow(&context->shared, &context->shared_bytes, a.rows * chunks * 8) ||
      (searches && !grow_scratch(context, Candidates::scratch(a.vocab_size))))
    return STATUS_NO_MEMORY;
  float* maxima = static_cast<float*>(context->shared);
  float* sums = maxima + a.rows * chunks;
  auto view = [&](int64_t row, int64_t line) {
    float temperature = a.temperature[line];
    float factor = temperature < MIN_TEMPERATURE ? 1.0f : 1.0f / temperature;
    const char* values = static_cast<const char*>(a.logits);
    return LogitsRow{values + row * a.row_stride * size_of(a.dtype), a.vocab_size, factor,
                     a.dtype};
  };
  share(context, a.rows * parts, work, [&](int64_t task, int) {
    int64_t row = task / parts, line = a.req_indices[row], first = task % parts * TASK_CHUNKS;
    if (line < 0) return;
    // Only the race in rounds and top_p over all tokens need the masses.
    bool limited = (a.top_k[line] > 0 && a.top_k[line] < a.vocab_size) || a.min_p[line] > 0;
    bool weighs = a.temperature[line] >= MIN_TEMPERATURE && !limited;
    context->kernels->reduce_chunks(view(row, line), first, least(chunks, first + TASK_CHUNKS),
                                    maxima + row * chunks, weighs ? sums + row * chunks : nullptr);
  });
  share(context, a.rows, work, [&](int64_t row, int thread) {
    int64_t line = a.req_indices[row];
    a.out[row] = NOT_FINITE;
    if (line < 0) return;
    Draw draw = {{context->kernels, view(row, line), maxima + row * chunks},
                 sums + row * chunks,
                 0,
                 gumbel_key(uint64_t(a.states[line]), a.positions[row] + 1),
                 a.top_k[line],
                 a.top_p[line],
                 a.min_p[line]};
    draw.largest = draw.extremes.largest();
    a.out[row] = sample_row(a, draw, line, context->scratch[thread]);
    a.last_sampled[line] = most(a.out[row], 0);
  });
  return STATUS_OK;
}
