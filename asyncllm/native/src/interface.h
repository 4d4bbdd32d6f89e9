// The C interface of the native library: raw pointers, strides in elements, status codes.
//
// A Context is a thread pool, scratch memory and the kernels of one instruction set. Only one
// thread at a time may call functions with a context; contexts are independent of one another.
//
// `lines` are request indices: line i is row i of the tables that have a row per request.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum Status {
  STATUS_OK = 0,
  STATUS_INVALID = 1,    // no kernel supports the shapes, strides or alignment
  STATUS_NO_MEMORY = 2,  // scratch memory or packed weights could not be allocated
  STATUS_CLOSED = 3,     // the context is null, or belongs to the parent of this forked process
  STATUS_INDEX = 4,      // a slot, block, position, token or line is beyond its table
};

// Activation of a gated linear unit: SiLU, x / (1 + e^-x), or the tanh approximation of GELU.
enum Activation { ACTIVATION_SILU = 0, ACTIVATION_GELU_TANH = 1 };

// Tensors are of the first three types. Weights of a linear layer may also be of DTYPE_I8, with a
// scale per output, of DTYPE_U4 or DTYPE_U8, with a scale per output and group of inputs, or in
// blocks of a type of GGUF, from DTYPE_Q4_1 on.
enum DType {
  DTYPE_F32 = 0, DTYPE_BF16 = 1, DTYPE_F16 = 2, DTYPE_I8 = 3, DTYPE_U4 = 4, DTYPE_U8 = 5,
  DTYPE_Q4_1 = 6, DTYPE_Q5_0 = 7, DTYPE_Q5_1 = 8, DTYPE_Q4_K = 9, DTYPE_Q5_K = 10,
  DTYPE_Q6_K = 11, DTYPE_IQ4_NL = 12
};

typedef struct Context Context;
typedef struct Weights Weights;

// Paged attention. Tensors are [token, head, dim] with the given strides; dim is contiguous.
typedef struct AttentionArgs {
  const void* q;
  int64_t q_token_stride, q_head_stride;
  const void* cache;  // [2, num_blocks, block_size, kv_heads, head_dim]
  int64_t kv_stride, block_stride, slot_stride, head_stride;
  void* out;  // [num_tokens, heads * head_dim]
  const int32_t* block_table;
  int64_t table_stride, table_width;
  const int64_t* query_start;  // [rows + 1]
  const int32_t* seq_lens;     // [rows]
  const int64_t* lines;        // [rows], the row's line in the block table; null: its own index
  int64_t table_lines;
  int64_t rows, num_tokens, heads, kv_heads, head_dim, num_blocks, block_size;
  int64_t window;  // number of keys that a query sees, its own included; 0 is all
  float scale, softcap;  // softcap 0: no soft cap
  const float* sinks;    // [heads], an extra logit in the softmax of each head; may be null
  int32_t dtype;
} AttentionArgs;

// Norms and rotates q and k in place, norms v, and writes k and v to their slots of the cache. With
// kv_heads 0, qkv is q alone, and slots and cache are null.
typedef struct RopeArgs {
  void* qkv;
  int64_t token_stride;
  // [table_rows, table_width]: the cosines and then the sines of head_dim / 2 angles. A table of
  // width 2 * head_dim has such a row for queries and one for keys.
  const void* table;
  int64_t table_rows, table_width;
  const int64_t* positions;
  const void* q_norm;  // [head_dim], or [heads * head_dim] over all heads together; may be null
  const void* k_norm;  // [head_dim], or [kv_heads * head_dim]; may be null
  const void* v_norm;  // [head_dim]; may be null
  float eps;
  void* cache;
  int64_t kv_stride, block_stride, slot_stride, head_stride;
  const int64_t* slots;
  int64_t num_tokens, heads, kv_heads, head_dim, num_blocks, block_size;
  int32_t dtype, norm_dtype, whole_norms;
} RopeArgs;

// Results instead of a token, for a row with NaN or infinity and for a row whose logits are all
// minus infinity.
enum { NOT_FINITE = -1, NO_TOKEN_LEFT = -2 };

// Rows of logits and their sampling parameters. `lines` is the number of request indices, with the
// one for padded rows.
typedef struct SampleArgs {
  const void* logits;  // [rows, vocab_size]
  int64_t row_stride, rows, vocab_size;
  const int64_t* req_indices;  // [rows], the rows' lines; rows with a negative one are skipped
  const int64_t* positions;    // [rows], of the token before the sampled one
  // Scalars [lines], in the order of DRAW in gpu/batch/sampling_table.py.
  const int64_t* states;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  int64_t lines;
  int64_t* last_sampled;  // [lines], written: the sampled token, or 0 for none
  int64_t* out;           // [rows]
  int32_t dtype;
} SampleArgs;

// Rows of logits and the rules of their requests, see SamplingRows and LogitsTables in
// gpu/batch/sampling_inputs.py. Arrays that only a skipped stage reads may be null.
typedef struct LogitsArgs {
  const void* logits;  // [rows, vocab_size]
  int64_t row_stride, rows, vocab_size;
  float* out;                     // [rows, vocab_size]; undefined in skipped rows
  const int64_t* req_indices;     // [rows], the rows' lines; rows with a negative one are skipped
  const int64_t* positions;       // [rows], of the token before the sampled one
  const int64_t* host_token_ids;  // [rows], that token's id; negative: it is in last_sampled
  const int64_t* last_sampled;    // [lines]
  int64_t lines, words;           // numbers of lines, and of 32-bit words of a mask of all tokens
  const int64_t* mask_slots;      // [rows], index of a row's mask; negative for no mask
  const int32_t* mask_words;      // [num_masks, words]
  int64_t num_masks;
  const int32_t* restricted;  // [lines], as are all arrays below without a comment
  const int32_t* num_bias;
  const int32_t* num_stop_ids;
  const int64_t* min_end;
  const int32_t* allowed;    // [lines, words]
  const int32_t* bias_ids;   // [lines, max_bias]
  const float* bias_values;
  const int32_t* stop_ids;   // [lines, max_stop_ids]
  int64_t max_bias, max_stop_ids;
  const int64_t* counted_from;
  const float* repetition;
  const float* frequency;
  const float* presence;
  int32_t* counts;           // [lines, vocab_size], written
  const int32_t* in_prompt;  // [lines, words]
  const int64_t* bad_words;  // addresses of BadWords in logits.cpp, or 0; may be null
  const int32_t* token_ids;  // [lines, max_tokens], of prompt and output; read for bad words
  int64_t max_tokens;
  const int64_t* num_prompt_tokens;
  int32_t dtype, rules, penalties;  // whether the stages RULES and PENALTIES run
} LogitsArgs;

// Looks up a step's tokens. Row i computes counts[i] tokens, from position starts[i] on, of the
// sequence in line lines[i] of the table.
typedef struct TokensArgs {
  const int64_t *lines, *starts, *counts;
  const int32_t* table;  // [table_lines, table_width], token ids by position
  int64_t table_lines, table_width;
  int64_t *token_ids, *positions;  // [tokens]
  int64_t* query_start;            // [rows + 1]
  int32_t* seq_lens;               // [rows]
} TokensArgs;

// Computes the KV slots of a step's tokens, from the block table.
typedef struct SlotsArgs {
  const int64_t *lines, *starts, *counts;
  const int32_t* table;  // [table_lines, table_width]
  int64_t table_lines, table_width, block_size;
  int64_t* slots;  // [tokens]
} SlotsArgs;

// Quantised weights [n, k]. An element is (value - zero) * scale, with a scale and a zero point per
// output and group of inputs. The size of a group is a multiple of SPAN; the last may be shorter.
//
// Rows in blocks of GGUF hold all that they need: scales and zeros are null, and a group is a block.
enum { SPAN = 32 };
typedef struct GroupedArgs {
  const void* values;  // [n] rows; a byte has two of DTYPE_U4, the even input's in the low bits
  int64_t n, k, row_bytes, group;
  const void* scales;    // [n, ceil(k / group)]
  const uint8_t* zeros;  // of the same shape; null: 8 for DTYPE_U4, 128 for DTYPE_U8
  const float* bias;     // [n], or null
  int32_t dtype, scale_dtype;
} GroupedArgs;

// Form of packed weights. The kernels of a context compute the offsets of all parts from it.
typedef struct PanelArgs {
  int64_t n, k, group;  // group: as in GroupedArgs; 0 for weights without groups
  int32_t dtype, scale_dtype, has_zeros;
} PanelArgs;

// Rounds weights [n, k] of `dtype` to integers, as gpu/ops/quantise.py does: to 8 bits with a scale
// per output; or to 4 bits in groups of SPAN inputs, if k is even.
typedef struct RoundArgs {
  const void* values;
  int64_t n, k, row_stride;
  void* values_out;  // [n, k] int8; for 4 bits [n, k / 2], the even input in the low bits
  void* scales;      // [n] float32; for 4 bits [n, ceil(k / SPAN)] bfloat16
  uint8_t* zeros;    // for 4 bits [n, ceil(k / SPAN)]; else null
  int32_t dtype, bits;
} RoundArgs;

// Arguments of an op in a program, for functions below that take single arguments.
typedef struct LinearArgs {
  const Weights* weights;
  const void* x;
  int64_t x_stride;
  void* y;
  int64_t y_stride;
  int32_t dtype;
} LinearArgs;
typedef struct GatherArgs {
  const Weights* weights;
  const int64_t* ids;
  void* out;
  float scale;
  int32_t dtype;
} GatherArgs;
typedef struct SelectArgs {
  const void* x;
  int64_t x_stride, x_rows;
  const int64_t* ids;
  void* out;
  int64_t width;
  float scale;
  int32_t dtype;
} SelectArgs;
typedef struct NormArgs {
  const void* x;
  int64_t x_stride;
  void* residual;
  int64_t residual_stride;
  const void* weight;
  void* out;
  int64_t width;
  int64_t parts;  // number of adjacent parts of a row, each of which is normed by itself
  float eps, multiplier, scale;
  int32_t dtype, weight_dtype;
} NormArgs;
typedef struct AddArgs {
  const void* x;
  int64_t x_stride;
  void* residual;
  int64_t residual_stride, width;
  float multiplier, scale;
  int32_t dtype;
} AddArgs;
typedef struct SoftcapArgs {
  void* x;
  int64_t stride, width;
  float cap;
  int32_t dtype;
} SoftcapArgs;
// Index of an output head's largest output, for the GREEDY rows of x, which follow the SAMPLED
// ones.
typedef struct ArgmaxArgs {
  const Weights* weights;
  const void* x;
  int64_t x_stride;
  int64_t* out;
  int32_t dtype;
} ArgmaxArgs;
typedef struct GatedArgs {
  const void* gate;
  int64_t gate_stride;
  const void* up;
  int64_t up_stride;
  void* out;
  int64_t width;
  int32_t dtype, activation;
} GatedArgs;

// Chooses the experts of each token and their weights, by the router's logits.
typedef struct RoutingArgs {
  const void* logits;  // [rows, num_experts]
  int64_t stride, num_experts, top_k;
  // Only experts of the top_groups best of num_groups equally large groups are chosen.
  int64_t num_groups, top_groups;
  const float* correction;  // [num_experts], added to scores for the choice alone; may be null
  float scale, least_sum;   // factor on weights; lower bound of the divisor of `renormalise`
  const float* expert_scale;  // [num_experts], factors on weights; may be null
  // Whether scores are sigmoids and not a softmax; whether weights are divided by their sum.
  int32_t sigmoid, renormalise;
  int32_t* ids;                  // [rows, top_k], by descending score, then by ascending id
  float* weights;                // [rows, top_k]
  int32_t dtype;
} RoutingArgs;

// The gated MLPs of a mixture of experts, top_k for each token, and their weighted sum.
typedef struct ExpertsArgs {
  const Weights* const* gate_up;  // [num_experts] of [2 * inner, width], gate rows first
  const Weights* const* down;     // [num_experts] of [width, inner]
  const void* x;                  // [rows, width]
  int64_t x_stride;
  const int32_t* ids;    // [rows, top_k]
  const float* weights;  // [rows, top_k]
  const void* shared;    // [rows, width], added to the sum; may be null
  int64_t shared_stride;
  const void* gate;      // [rows], logits whose sigmoid is a factor on `shared`; may be null
  int64_t gate_stride;
  void* out;  // [rows, width]
  int64_t num_experts, top_k, width, inner;
  float alpha, limit;  // of the clamped SwiGLU; limit 0: activation(gate) * up instead
  int32_t dtype, activation;
} ExpertsArgs;

// A step's rows for ops of recurrent layers. No two rows have the same slot.
typedef struct StateRows {
  const int64_t* lines;        // [rows], the slot of each row's states
  const int64_t* starts;       // [rows], position of the first token; 0: states start from zeros
  const int64_t* query_start;  // [rows + 1], index of the row's first token in the step
  int64_t rows, num_tokens, num_slots;
} StateRows;

// A causal depthwise convolution, followed by SiLU.
typedef struct ConvArgs {
  StateRows rows;
  const void* x;  // [tokens, channels]
  int64_t x_stride;
  const float* weight;  // [width, channels], the oldest input's weight first
  void* state;          // [num_slots, width - 1, channels], the last inputs; updated
  void* out;            // [tokens, channels]
  int64_t channels, width;
  int32_t dtype;
} ConvArgs;

// The gated delta rule, see gpu/ops/gated_delta.py.
typedef struct DeltaArgs {
  StateRows rows;
  const void* qkv;  // [tokens, 2 * key_heads * key_dim + value_heads * value_dim]
  int64_t qkv_stride;
  const void* gates;  // [tokens, 2 * value_heads], logits of beta, then of the decay
  int64_t gates_stride;
  const float *dt_bias, *log_rate;  // [value_heads]
  float* state;                     // [num_slots, value_heads, key_dim, value_dim]; updated
  void* out;                        // [tokens, value_heads * value_dim]
  int64_t key_heads, value_heads, key_dim, value_dim;
  int32_t dtype;
} DeltaArgs;

// The per-head norm, times SiLU of the gate.
typedef struct GatedNormArgs {
  const void* x;  // [rows, heads * head_size]
  int64_t x_stride;
  const void* gate;  // [rows, heads * head_size]
  int64_t gate_stride;
  const void* weight;  // [head_size]
  void* out;           // [rows, heads * head_size]
  int64_t heads, head_size;
  float eps;
  int32_t dtype;
} GatedNormArgs;

typedef struct SigmoidMulArgs {
  const void* x;  // [rows, width]
  int64_t x_stride;
  const void* gate;  // [rows, width]
  int64_t gate_stride;
  void* out;  // [rows, width]
  int64_t width;
  int32_t dtype;
} SigmoidMulArgs;

// A step's sizes, which are arguments of a run of a program. WANTED is the number of tokens that
// ops after the last write to the KV cache compute. Of these, the first SAMPLED tokens get logits,
// and the next GREEDY tokens only the index of the largest logit.
enum Size {
  SIZE_ROWS = 0,
  SIZE_TOKENS = 1,
  SIZE_WANTED = 2,
  SIZE_SAMPLED = 3,
  SIZE_GREEDY = 4,
  NUM_SIZES = 5,
};

enum OpKind {
  OP_TOKENS = 0,
  OP_SLOTS = 1,
  OP_GATHER = 2,
  OP_SELECT = 3,
  OP_LINEAR = 4,
  OP_RMS_NORM = 5,
  OP_ROPE_AND_CACHE = 6,
  OP_ATTENTION = 7,
  OP_GATED_MUL = 8,
  OP_ADD = 9,
  OP_SOFTCAP = 10,
  OP_ROUTING = 11,
  OP_EXPERTS = 12,
  OP_ARGMAX = 13,
  OP_CAUSAL_CONV = 14,
  OP_GATED_DELTA = 15,
  OP_GATED_NORM = 16,
  OP_SIGMOID_MUL = 17,
};

typedef struct Op {
  int32_t kind;
  int32_t size;    // the Size of the output's first dimension
  int32_t x_size;  // for OP_SELECT: the Size of x's rows; negative if x_rows is fixed
  union {
    TokensArgs tokens;
    SlotsArgs slots;
    GatherArgs gather;
    SelectArgs select;
    LinearArgs linear;
    NormArgs norm;
    RopeArgs rope;
    AttentionArgs attention;
    GatedArgs gated;
    AddArgs add;
    SoftcapArgs softcap;
    RoutingArgs routing;
    ExpertsArgs experts;
    ArgmaxArgs argmax;
    ConvArgs conv;
    DeltaArgs delta;
    GatedNormArgs gated_norm;
    SigmoidMulArgs sigmoid_mul;
  } args;
} Op;

// Ops that run one after the other, on buffers that are large enough for the largest step.
typedef struct Program {
  const Op* ops;
  int64_t num_ops, op_bytes;
  int64_t num_writing_ops;       // number of leading ops, after which no op writes a KV cache or
                                 // states: a step without WANTED tokens runs only these
  int64_t capacity[NUM_SIZES];  // number of rows of the buffers of each Size
} Program;

// A whole step: the program, its inputs, and its tokens. Everything to which a job
// points must stay unchanged until asyncllm_wait has returned for it.
typedef struct Job {
  const Program* program;  // null: only the sampling, from the logits of the job before
  int64_t sizes[NUM_SIZES];
  void* to;  // the program's inputs, into which `bytes` of `from` are copied before it runs
  const void* from;
  int64_t bytes;
  // Blocks of the KV cache to copy before the program runs, one after the other.
  const int64_t* block_copies;  // [num_block_copies, 2], source and target
  int64_t num_block_copies;
  // [num_block_arrays, 3]: address of block 0, distance between blocks and size of a block, in bytes
  const int64_t* block_arrays;
  int64_t num_block_arrays;
  // The sampling from the logits; nothing is sampled if it has no rows.
  SampleArgs draw;
  // The processing of the logits of the first process.rows of these rows, in turns of
  // rows_per_turn, for which process.out has room.
  LogitsArgs process;
  int64_t rows_per_turn;
  int64_t* previous_tokens;  // [process.rows], written: process.host_token_ids, from the table
  // The log-probabilities of the first top_rows of these rows, as by asyncllm_top_logprobs.
  int64_t top_rows, top;
  float* top_values;
  int64_t* top_ids;
  // [SIZE_GREEDY], indices of the largest outputs, written by the program.
  const int64_t* greedy;
  // The step's tokens: the sampled ones, then `greedy`; num_tokens is 0 if the caller samples.
  // Written: table[lines[i]][positions[i] + 1] = tokens[i], or 0 for a row without a token.
  int64_t num_tokens;
  int64_t* tokens;
  const int64_t *lines, *positions;
  int32_t* table;  // [table_lines, table_width]
  int64_t table_lines, table_width;
  // Written: the job's status, and the index of the op that failed, as by asyncllm_run.
  int64_t failed;
  int64_t number;
  int32_t status;
} Job;

// Digest of the sources from which the library was built, see build.py.
const char* asyncllm_sources(void);
// The best instruction set that the library contains and the processor supports.
const char* asyncllm_best_isa(void);

// Asks for long time slices for the calling thread, which is to call ops; see threads.h.
void asyncllm_lengthen_slice(void);

// `isa` is the name of an instruction set, or null for the best. Returns null if it is unavailable
// or the threads cannot be started.
Context* asyncllm_create(int32_t num_threads, const char* isa);
// Ends the threads. Does nothing in a forked child, whose parent has the threads.
void asyncllm_close(Context*);
const char* asyncllm_isa(const Context*);

// Copies values [n, k] into the layout of the context's kernels, padded with zeros. A weight of
// DTYPE_I8 is its value times the scale of its row. Returns null if memory cannot be allocated.
Weights* asyncllm_pack(Context*, const void* values, int32_t dtype, int64_t n, int64_t k,
                       int64_t row_stride, const float* scales, const float* bias);
Weights* asyncllm_pack_grouped(Context*, const GroupedArgs*);
int32_t asyncllm_round(Context*, const RoundArgs*);
void asyncllm_free_weights(Weights*);
int64_t asyncllm_weights_bytes(const Weights*);

// Version of the layouts of packed weights, of all instruction sets together. Panels of the same
// version and instruction set are interchangeable.
int32_t asyncllm_layout(void);
// Writes the form of packed weights. Returns their address; asyncllm_weights_bytes bytes from there
// are all of them but the bias.
const void* asyncllm_describe_weights(const Weights*, PanelArgs*);
// Makes weights of the bytes that asyncllm_describe_weights returned for weights of this form. They
// are read in place, and have to stay until the weights are freed. Returns null if memory cannot be
// allocated, `data` is not aligned to 64 bytes, or `bytes` is not the size of such weights.
Weights* asyncllm_view_weights(Context*, const PanelArgs*, const void* data, int64_t bytes,
                               const float* bias);

// y [m, n] = x [m, k] W^T + bias. A row's result depends on that row alone. With weights in
// groups, x is rounded to 8-bit integers with a scale per SPAN inputs; with DTYPE_I8 weights it is
// as well on AVX-512, and on other instruction sets rounded to 16-bit integers with a scale per
// row. With float32 weights, x may be of any type and y is float32; otherwise y has the type of x.
int32_t asyncllm_linear(Context*, const Weights*, const void* x, int64_t x_stride, void* y,
                        int64_t y_stride, int64_t m, int32_t dtype);
// out [m] = index of each row's largest output, the first of equal ones, or NOT_FINITE, or
// NO_TOKEN_LEFT. Outputs are those of asyncllm_linear, rounded to `dtype`.
int32_t asyncllm_linear_argmax(Context*, const Weights*, const void* x, int64_t x_stride,
                               int64_t* out, int64_t m, int32_t dtype);
// out [count, k] = rows `ids` of the weight, times `scale`: the embedding tied to an output head.
int32_t asyncllm_gather(Context*, const Weights*, const int64_t* ids, int64_t count, void* out,
                        float scale, int32_t dtype);
// out [count, width] = rows `ids` of x [x_rows, width], times `scale`.
int32_t asyncllm_select(Context*, const void* x, int64_t x_stride, int64_t x_rows,
                        const int64_t* ids, int64_t count, void* out, int64_t width, float scale,
                        int32_t dtype);
int32_t asyncllm_attention(Context*, const AttentionArgs*);
// Unless residual is null, first residual = scale * (residual + multiplier * x). Then out
// [rows, width] = norm(residual), or norm(x) if residual is null. Normed values are rounded before
// the multiplication by a weight of `dtype`, but after the multiplication by a float32 weight.
int32_t asyncllm_rms_norm(Context*, const void* x, int64_t x_stride, void* residual,
                          int64_t residual_stride, const void* weight, int32_t weight_dtype,
                          float eps, float multiplier, float scale, void* out, int64_t rows,
                          int64_t width, int32_t dtype);
// residual [rows, width] = scale * (residual + multiplier * x).
int32_t asyncllm_add(Context*, const void* x, int64_t x_stride, void* residual,
                     int64_t residual_stride, float multiplier, float scale, int64_t rows,
                     int64_t width, int32_t dtype);
// x [rows, width] = cap * tanh(x / cap).
int32_t asyncllm_softcap(Context*, void* x, int64_t stride, float cap, int64_t rows, int64_t width,
                         int32_t dtype);
int32_t asyncllm_rope_and_cache(Context*, const RopeArgs*);
// out [rows, width] = activation(gate) * up.
int32_t asyncllm_gated_mul(Context*, const void* gate, int64_t gate_stride, const void* up,
                           int64_t up_stride, void* out, int64_t rows, int64_t width,
                           int32_t activation, int32_t dtype);
int32_t asyncllm_routing(Context*, const RoutingArgs*, int64_t rows);
// A token's result depends on that token alone: its experts are summed in the order of its ids.
int32_t asyncllm_experts(Context*, const ExpertsArgs*, int64_t rows);
// A row's results depend on its tokens and its states alone. Those of the gated delta rule also do
// not depend, to the last bit, on how a sequence's tokens are divided among steps.
int32_t asyncllm_causal_conv(Context*, const ConvArgs*);
int32_t asyncllm_gated_delta(Context*, const DeltaArgs*);
int32_t asyncllm_gated_norm(Context*, const GatedNormArgs*, int64_t rows);
// out = x * sigmoid(gate).
int32_t asyncllm_sigmoid_mul(Context*, const SigmoidMulArgs*, int64_t rows);
// Runs a step. If it fails, *failed is the index of the failed op, or -1 if a size is invalid.
int32_t asyncllm_run(Context*, const Program*, const int64_t* sizes, int64_t* failed);

// Queues a job for the context's queue thread; the first job starts that thread. While a job is
// queued or runs, no op may be called with the context.
int32_t asyncllm_submit(Context*, Job*);
// Runs a job on the calling thread; no job may be queued.
int32_t asyncllm_run_job(Context*, Job*);
// Waits until a job has ended.
int32_t asyncllm_wait(Context*, const Job*);

// Sums 64-bit words, to measure how fast memory can be read; `bytes` is a multiple of 64.
int32_t asyncllm_read(Context*, const void* memory, int64_t bytes, uint64_t* sum);
// Computes a checksum of each of `count` pieces of memory. It changes with every single byte, and
// with the order of the bytes; it is no cryptographic hash.
int32_t asyncllm_checksums(Context*, const void* memory, const int64_t* offsets,
                           const int64_t* sizes, int64_t count, uint64_t* sums);
// Samples a token per row, see gpu/ops/gumbel.py. A row's token depends on that row alone.
int32_t asyncllm_sample(Context*, const SampleArgs*);
// Applies masks, rules and penalties to logits, with the same bits as gpu/ops/logits.py.
int32_t asyncllm_process_logits(Context*, const LogitsArgs*);
// Writes values and ids [rows, top + 1]: log-probabilities and ids of the `top` likeliest tokens,
// then the log-probability and the rank of tokens[row].
int32_t asyncllm_top_logprobs(Context*, const void* logits, int64_t row_stride, int64_t rows,
                              int64_t vocab_size, int32_t dtype, const int64_t* tokens,
                              int64_t top, float* values, int64_t* ids);

#ifdef __cplusplus
}
#endif
