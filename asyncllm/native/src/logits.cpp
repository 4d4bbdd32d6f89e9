// The functions of gpu/ops/logits.py. process_logits gives the same bits; log-probabilities differ
// from torch's in the last bits.
#include <math.h>
#include <string.h>

#include "candidates.h"

namespace {

constexpr int64_t WORD = 32;

// The rows of the tables for one request index.
struct Line {
  const LogitsArgs& a;
  int64_t line;

  bool masks(int64_t row) const { return a.mask_slots && a.mask_slots[row] >= 0; }
  const int32_t* bias_ids() const { return a.bias_ids + line * a.max_bias; }
  const int32_t* stop_ids() const { return a.stop_ids + line * a.max_stop_ids; }
  bool suppresses(int64_t row) const { return a.positions[row] + 1 < a.min_end[line]; }
  bool penalised() const {
    return a.penalties &&
           (a.repetition[line] != 1 || a.frequency[line] != 0 || a.presence[line] != 0);
  }
};

bool in_vocabulary(const int32_t* ids, int64_t count, int64_t vocab_size) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= vocab_size) return false;
  return true;
}

// Sets the logits of tokens whose bit in `words` is not set to minus infinity.
void keep_allowed(float* logits, int64_t count, const int32_t* words) {
  for (int64_t first = 0; first < count; first += WORD) {
    uint32_t word = uint32_t(words[first / WORD]);
    if (word == ~uint32_t(0)) continue;
    int64_t last = least(WORD, count - first);
    if (!word && last == WORD) {
      for (int64_t i = 0; i < WORD; ++i) logits[first + i] = -INFINITY;
      continue;
    }
    uint32_t hidden = ~word;
    if (last < WORD) hidden &= (uint32_t(1) << last) - 1;
    for (; hidden; hidden &= hidden - 1) logits[first + __builtin_ctz(hidden)] = -INFINITY;
  }
}

void apply_rules(const Line& own, int64_t row, float* logits) {
  const LogitsArgs& a = own.a;
  const float* values = a.bias_values + own.line * a.max_bias;
  for (int64_t i = 0; i < a.num_bias[own.line]; ++i) logits[own.bias_ids()[i]] += values[i];
  if (a.restricted[own.line])
    keep_allowed(logits, a.vocab_size, a.allowed + own.line * a.words);
  if (!own.suppresses(row)) return;
  for (int64_t i = 0; i < a.num_stop_ids[own.line]; ++i) {
    float& logit = logits[own.stop_ids()[i]];
    if (logit == logit) logit = -INFINITY;
  }
}

// BadWords of core/token_rules.py, packed: words of several tokens, sorted by all tokens but the
// last, in reverse order and compared as bytes.
struct BadWords {
  const int32_t* packed;

  int64_t count() const { return packed[0]; }
  const int32_t* starts() const { return packed + 1; }
  const int32_t* last_starts() const { return starts() + count() + 1; }
  const int32_t* shorter() const { return last_starts() + count() + 1; }
  const int32_t* tokens() const { return shorter() + count(); }
  const int32_t* last_tokens() const { return tokens() + starts()[count()]; }

  // Compares a beginning with the end of an output of `length` tokens: 0 if the output ends with
  // it, else the sign of their difference.
  int compare(int64_t index, const int32_t* end, int64_t length) const {
    const int32_t* own = tokens() + starts()[index];
    int64_t size = starts()[index + 1] - starts()[index];
    for (int64_t i = 0; i < size; ++i) {
      if (i == length) return 1;
      if (int difference = memcmp(own + i, end - 1 - i, sizeof(int32_t))) return difference;
    }
    return 0;
  }
  // The longest beginning with which the output ends, or -1.
  int64_t find(const int32_t* end, int64_t length) const {
    int64_t first = 0, last = count();
    while (first < last) {
      int64_t middle = (first + last) / 2;
      if (compare(middle, end, length) > 0)
        last = middle;
      else
        first = middle + 1;
    }
    // In sorted order, all beginnings from one with which the output ends are compared as less.
    int64_t index = first - 1;
    while (index >= 0 && compare(index, end, length)) index = shorter()[index];
    return index;
  }
};

// Excludes the tokens that would complete a bad word.
void exclude_bad_words(const Line& own, int64_t row, float* logits) {
  const LogitsArgs& a = own.a;
  BadWords words = {reinterpret_cast<const int32_t*>(a.bad_words[own.line])};
  int64_t length = a.positions[row] + 1 - a.num_prompt_tokens[own.line];
  const int32_t* end = a.token_ids + own.line * a.max_tokens + a.positions[row] + 1;
  for (int64_t index = words.find(end, length); index >= 0; index = words.shorter()[index])
    for (int64_t i = words.last_starts()[index]; i < words.last_starts()[index + 1]; ++i) {
      float& logit = logits[words.last_tokens()[i]];
      if (logit == logit) logit = -INFINITY;
    }
}

// Whether any of 32 counts is not zero.
bool any_of(const int32_t* counts) {
  int32_t found = 0;
  for (int64_t i = 0; i < WORD; ++i) found |= counts[i];
  return found;
}

void penalise(const Line& own, float* logits) {
  const LogitsArgs& a = own.a;
  const int32_t* counts = a.counts + own.line * a.vocab_size;
  const int32_t* in_prompt = a.in_prompt + own.line * a.words;
  float repetition = a.repetition[own.line], frequency = a.frequency[own.line];
  float presence = a.presence[own.line];
  for (int64_t first = 0; first < a.vocab_size; first += WORD) {
    int64_t last = least(WORD, a.vocab_size - first);
    uint32_t prompt = uint32_t(in_prompt[first / WORD]);
    if (!prompt && last == WORD && !any_of(counts + first)) continue;
    for (int64_t i = 0; i < last; ++i) {
      int32_t count = counts[first + i];
      if (count <= 0 && !(prompt >> i & 1)) continue;
      float logit = logits[first + i];
      logit = logit > 0 ? logit / repetition : logit * repetition;
      logit = logit - frequency * float(count);
      logits[first + i] = logit - presence * float(count > 0);
    }
  }
}

// Asks for huge pages for large memory, which malloc maps anew in each call: page faults of small
// pages would take longer than writing the memory.
void expect_writes(void* p, int64_t bytes) {
  constexpr int64_t MAPPED = int64_t(32) << 20;
  if (bytes < MAPPED) return;
  int64_t before = -reinterpret_cast<uintptr_t>(p) & (PAGE - 1);
  prefer_huge_pages(static_cast<char*>(p) + before, (bytes - before) / PAGE * PAGE);
}

// The token before the sampled one.
int64_t last_token(const LogitsArgs& a, int64_t row) {
  int64_t host = a.host_token_ids[row];
  return most(0, host < 0 ? a.last_sampled[a.req_indices[row]] : host);
}

int32_t check(const LogitsArgs& a) {
  if (!is_matrix(a.logits, a.dtype, a.rows, a.vocab_size, a.row_stride) ||
      !is_matrix(a.out, DTYPE_F32, a.rows, a.vocab_size, a.vocab_size) ||
      a.words != divide_up(a.vocab_size, WORD) || a.max_bias < 0 || a.max_stop_ids < 0 ||
      (a.bad_words && (!a.token_ids || !a.num_prompt_tokens)))
    return STATUS_INVALID;
  for (int64_t row = 0; row < a.rows; ++row) {
    Line own = {a, a.req_indices[row]};
    if (own.line >= a.lines || (own.masks(row) && a.mask_slots[row] >= a.num_masks))
      return STATUS_INDEX;
    if (own.line < 0) continue;
    if (a.bad_words && a.positions[row] >= a.max_tokens) return STATUS_INDEX;
    if (a.rules &&
        (a.num_bias[own.line] > a.max_bias || a.num_stop_ids[own.line] > a.max_stop_ids ||
         !in_vocabulary(own.bias_ids(), a.num_bias[own.line], a.vocab_size) ||
         (own.suppresses(row) &&
          !in_vocabulary(own.stop_ids(), a.num_stop_ids[own.line], a.vocab_size))))
      return STATUS_INDEX;
    if (a.penalties && a.positions[row] >= a.counted_from[own.line] &&
        last_token(a, row) >= a.vocab_size)
      return STATUS_INDEX;
  }
  return STATUS_OK;
}

}  // namespace

API int32_t asyncllm_process_logits(Context* context, const LogitsArgs* args) {
  if (!is_open(context)) return STATUS_CLOSED;
  const LogitsArgs& a = *args;
  int32_t status = check(a);
  if (status) return status;
  // Count tokens before the rows are divided among threads: two rows may have one request index.
  for (int64_t row = 0; a.penalties && row < a.rows; ++row) {
    int64_t line = a.req_indices[row];
    if (line >= 0 && a.positions[row] >= a.counted_from[line])
      ++a.counts[line * a.vocab_size + last_token(a, row)];
  }
  expect_writes(a.out, a.rows * a.vocab_size * 4);
  share(context, a.rows, a.rows * a.vocab_size * 8, [&](int64_t row, int) {
    Line own = {a, a.req_indices[row]};
    float* logits = a.out + row * a.vocab_size;
    const char* values = static_cast<const char*>(a.logits);
    context->kernels->widen(values + row * a.row_stride * size_of(a.dtype), a.dtype, logits,
                            a.vocab_size);
    if (own.masks(row))
      keep_allowed(logits, a.vocab_size, a.mask_words + a.mask_slots[row] * a.words);
    if (own.line < 0) return;
    if (a.rules) apply_rules(own, row, logits);
    if (a.bad_words && a.bad_words[own.line]) exclude_bad_words(own, row, logits);
    if (own.penalised()) penalise(own, logits);
  });
  return STATUS_OK;
}

API int32_t asyncllm_top_logprobs(Context* context, const void* logits, int64_t row_stride,
                                  int64_t rows, int64_t vocab_size, int32_t dtype,
                                  const int64_t* tokens, int64_t top, float* values,
                                  int64_t* ids) {
  if (!is_open(context)) return STATUS_CLOSED;
  if (!is_matrix(logits, dtype, rows, vocab_size, row_stride) || vocab_size > INT32_MAX ||
      top < 0 || top > vocab_size || (rows && (!tokens || !values || !ids)))
    return STATUS_INVALID;
  for (int64_t row = 0; row < rows; ++row)
    if (tokens[row] >= vocab_size) return STATUS_INDEX;
  int64_t chunks = num_chunks(vocab_size);
  if (!grow(&context->shared, &context->shared_bytes, rows * chunks * 8) ||
      !grow_scratch(context, Candidates::scratch(vocab_size)))
    return STATUS_NO_MEMORY;
  float* maxima = static_cast<float*>(context->shared);
  float* sums = maxima + rows * chunks;
  share(context, rows, rows * vocab_size * 16, [&](int64_t row, int thread) {
    const char* from = static_cast<const char*>(logits) + row * row_stride * size_of(dtype);
    float *own = maxima + row * chunks, *masses = sums + row * chunks;
    Extremes extremes = {context->kernels, {from, vocab_size, 1.0f, dtype}, own};
    context->kernels->reduce_chunks(extremes.row, 0, chunks, own, masses);
    float* value = values + row * (top + 1);
    int64_t* id = ids + row * (top + 1);
    Candidates candidates(extremes, context->scratch[thread]);
    float largest = extremes.largest();
    float total = float(largest + log(extremes.mass(masses, largest)));
    if (top) candidates.take_top(top, largest);
    for (int64_t i = 0; i < top; ++i) {
      bool there = i < candidates.count();
      value[i] = there ? candidates.value(i) - total : NAN;
      id[i] = there ? candidates.token(i) : 0;
    }
    float sampled = extremes.value_of(most(tokens[row], 0));
    value[top] = sampled - total;
    id[top] = extremes.count_above(sampled) + 1;
  });
  return STATUS_OK;
}
