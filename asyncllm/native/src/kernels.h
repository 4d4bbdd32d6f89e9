// Kernels: a table of functions for one instruction set.
//
// Each table is a translation unit of its own, compiled with its instruction set's flags. Such a
// unit must not define anything that another unit could link against by accident. So everything but
// the table is in an anonymous namespace, and no C++ header is included: the linker would merge the
// header's inline functions across units.
#pragma once
#include "interface.h"

// Version of the bytes that `pack` and `pack_grouped` write, for any instruction set. Files hold
// such bytes, so raise it with every change of them.
enum { LAYOUT = 1 };

// A block type of GGUF: a weight is scale * (code - offset) - minimum. Scale and minimum are in
// float16 for each block; or they are such a number times one byte for each span, or half a span.
struct BlockForm {
  int32_t elements, bytes;  // of a block; 0 for a type that is none of GGUF's
  int32_t bits;             // of a code
  int32_t byte_scales;      // number of byte scales of a span
  bool has_minimum;
  int32_t offset;
};

static constexpr BlockForm block_form(int32_t dtype) {
  switch (dtype) {
    case DTYPE_Q4_1: return {32, 20, 4, 0, true, 0};
    case DTYPE_Q5_0: return {32, 22, 5, 0, false, 16};
    case DTYPE_Q5_1: return {32, 24, 5, 0, true, 0};
    case DTYPE_Q4_K: return {256, 144, 4, 1, true, 0};
    case DTYPE_Q5_K: return {256, 176, 5, 1, true, 0};
    case DTYPE_Q6_K: return {256, 210, 6, 2, false, 32};
    // A code is an index of IQ4_NL_VALUES, which are 128 above the type's own.
    case DTYPE_IQ4_NL: return {32, 18, 4, 0, false, 128};
  }
  return {};
}

// Bytes of an output's span in a panel: the low 4 bits of its codes, their higher bits, its byte
// scales, and its byte minima.
static constexpr int64_t block_span_bytes(BlockForm form) {
  return SPAN / 2 + (form.bits - 4) * SPAN / 8 + form.byte_scales +
         (form.byte_scales && form.has_minimum);
}

// Packed weights [n, k], in panels of `panel` outputs, padded with zeros: [n / panel][k][panel],
// or, in pairs of inputs, [n / panel][k / 2][panel][2]. grouped.h has the layout of weights whose
// inputs are rounded in spans.
struct PackedView {
  const void* data;
  const float* scales;  // [n padded to panels] of DTYPE_I8, or null
  const float* bias;    // of the same shape, or null
  int64_t n, k, panel_elements;
  int32_t dtype;
  // The fields below are for DTYPE_U4 and DTYPE_U8, and for blocks of GGUF. For all these
  // panel_elements is a number of bytes.
  int32_t scale_dtype;
  int64_t group, groups;
  const void* group_scales;  // [n / panel][groups][panel]; with minima [n / panel][groups][2][panel]
  const uint8_t* zeros;      // [n / panel][groups][panel], or null
};

// Scale of SPAN inputs of a row that are rounded to 8-bit integers, their sum, and that of their
// first half. For int8 weights with a scale per output, all are multiplied by constants (grouped.h).
struct Span {
  float scale;
  int32_t sum, half;
};

// The largest output of a row so far; `broken` contains NaN if an output was NaN or infinity.
struct Largest {
  float value;
  float broken[16];
  int64_t output;
};

struct LinearTask {
  const float* x;       // [rows, k], contiguous in k
  const uint16_t* x16;  // x in bfloat16 if takes_bfloat16, else null
  const int16_t* xq;    // x rounded to integers of scale x_scales[row], k padded to even; or null
  const float* x_scales;
  const int8_t* x8;  // x rounded to integers in `spans` [rows, k / SPAN], k padded to SPAN; or null
  const Span* spans;
  int64_t x_stride;
  void* y;
  int64_t y_stride;
  Largest* largest;  // [rows]; if not null, no y is written
  int32_t dtype;     // type of y
  int64_t first_row, last_row, first, last;  // rows [first_row, last_row), panels [first, last)
};

// The weighted sum of a token's experts.
struct SumTask {
  const float* rows;      // [.., width], outputs of experts
  const int64_t* places;  // [count], indices of this token's rows
  const float* weights;   // [count]
  int64_t count, width;
  const void* shared;  // [width] or null
  const void* gate;    // [1], a logit, or null
  void* out;
  int32_t dtype;
};

struct PlainView {
  const void* values;
  int64_t n, k, row_stride;
  int32_t dtype;
};

// A row of logits, with a factor that kernels multiply them by.
struct LogitsRow {
  const void* values;
  int64_t count;
  float factor;
  int32_t dtype;
};

// Number of adjacent logits that sampling reduces together (gumbel.CHUNK).
enum { CHUNK = 256 };

// Attention of tokens [first_token, last_token) of a sequence and query heads [first_head,
// last_head), all of one key/value head, over keys [first_key, last_key).
struct AttentionTask {
  const AttentionArgs* args;
  int64_t row, first_token, last_token, kv_head, first_head, last_head, first_key, last_key;
  float* partial;  // where to write the partial result of a split; null: write the output
};

// Scores are computed in blocks of KEYS keys and accumulated in splits of SPLIT keys. Both start at
// multiples of their sizes, so that a query's sums do not depend on other queries. A tile has at
// most TILE query rows.
enum { KEYS = 32, SPLIT = 512, TILE = 96 };

// The gated delta rule on some columns of a head's state, over a row's tokens. The inputs of
// successive tokens are `stride` floats apart.
struct DeltaTask {
  const float *query, *key, *beta, *decay;
  int64_t stride, count;
  const void* v;
  int64_t v_stride;
  float* state;
  int64_t state_stride;
  void* out;
  int64_t out_stride;
  int64_t keys, columns;
  bool fresh;
  int32_t dtype;
};

// Whether weights have scales for groups of inputs.
static inline bool is_grouped(int32_t dtype) { return dtype >= DTYPE_U4; }

struct Kernels {
  const char* name;
  int64_t width;         // floats per vector
  int64_t panel;         // outputs per panel
  int64_t row_step;      // rows that one pass over a panel computes
  bool takes_bfloat16;   // whether `linear` with bfloat16 weights reads x in bfloat16
  bool spans_int8;       // whether `linear` with int8 weights reads x in spans
  int64_t (*panel_elements)(int64_t k, int32_t dtype);
  // Packs panels [first, last); values beyond n are zero.
  void (*pack)(const PlainView&, void* data, int64_t first, int64_t last);
  void (*widen)(const void* x, int32_t dtype, float* out, int64_t count);
  void (*linear)(const PackedView&, const LinearTask&);
  // Rounds x [k] to integers of magnitude at most `limit`, padded with a zero if k is odd. Returns
  // their scale, which is NaN if x is not finite. Null if `spans_int8`.
  float (*quantise)(const void* x, int32_t dtype, int16_t* out, int64_t k, float limit);
  // Rounds x [k] to 8-bit integers in spans of SPAN elements, padded with zeros, for weights of
  // weights_dtype.
  void (*quantise_spans)(const void* x, int32_t dtype, int8_t* out, Span* spans, int64_t k,
                         int32_t weights_dtype);
  int64_t (*span_bytes)(int32_t dtype);  // bytes of one span of inputs in a panel
  void (*pack_grouped)(const GroupedArgs&, const PackedView&, int64_t first, int64_t last);
  void (*round_row)(const RoundArgs&, int64_t row);
  void (*gather)(const PackedView&, int64_t row, void* out, int32_t dtype);
  int64_t (*attention_scratch)(int64_t head_dim);  // bytes of scratch memory per thread
  void (*attention)(const AttentionTask&, void* scratch);
  // Merges `splits` partial results of one token's heads into the output.
  void (*merge)(const AttentionTask&, const float* partials, int64_t splits, void* scratch);
  void (*rms_norm)(const void* x, void* residual, const void* weight, int32_t weight_dtype,
                   float eps, float multiplier, float scale, void* out, int64_t width,
                   int32_t dtype);
  void (*rope)(const RopeArgs&, int64_t token);
  void (*gated_mul)(const void* gate, const void* up, void* out, int64_t width, int32_t activation,
                    int32_t dtype);
  void (*add)(const void* x, void* residual, float multiplier, float scale, int64_t width,
              int32_t dtype);
  void (*scale)(void* x, float factor, int64_t width, int32_t dtype);
  void (*softcap)(void* x, float cap, int64_t width, int32_t dtype);
  // (up + 1) * gate * sigmoid(alpha * gate), with gate clamped to at most `limit` and up to
  // [-limit, limit].
  void (*clamped_swiglu)(const void* gate_up, void* out, int64_t width, float alpha, float limit,
                         int32_t dtype);
  void (*weighted_sum)(const SumTask&);
  void (*convolve)(const ConvArgs&, int64_t row, int64_t first, int64_t last);  // channels
  // Scales heads [heads, size] to length `factor`; eps is added to the sum of squares.
  void (*normalise_heads)(const void* x, int32_t dtype, float* out, int64_t heads, int64_t size,
                          float eps, float factor);
  void (*delta)(const DeltaTask&);
  void (*gated_norm)(const void* x, const void* gate, const void* weight, float eps, void* out,
                     int64_t heads, int64_t size, int32_t dtype);
  void (*sigmoid_mul)(const void* x, const void* gate, void* out, int64_t width, int32_t dtype);
  // Writes, for chunks [first, last), the largest logit, NaN for a chunk with NaN or infinity; and,
  // unless `sums` is null, the sum of the exponentials of the logits minus the largest.
  void (*reduce_chunks)(const LogitsRow&, int64_t first, int64_t last, float* maxima, float* sums);
  // Writes the logits of a chunk, times the factor, to out [CHUNK], padded with minus infinity.
  void (*read_chunk)(const LogitsRow&, int64_t chunk, float* out);

  // Whether `linear` with weights of this type reads x in spans.
  bool takes_spans(int32_t dtype) const {
    return is_grouped(dtype) || (spans_int8 && dtype == DTYPE_I8);
  }
};

// Number of floats of one query row's partial result: the accumulator, the maximum, the sum.
static inline int64_t partial_floats(int64_t head_dim) { return (head_dim + 15) / 16 * 16 + 2; }

// The block table of a row's sequence.
static inline const int32_t* block_table_of(const AttentionArgs& args, int64_t row) {
  return args.block_table + (args.lines ? args.lines[row] : row) * args.table_stride;
}

extern const Kernels kernels_baseline;
#ifdef ASYNCLLM_AVX2
extern const Kernels kernels_avx2;
#endif
#ifdef ASYNCLLM_AVX512
extern const Kernels kernels_avx512;
#endif
#ifdef ASYNCLLM_AVX512BF16
extern const Kernels kernels_avx512bf16;
#endif
#ifdef ASYNCLLM_NEON
extern const Kernels kernels_neon;
#endif
