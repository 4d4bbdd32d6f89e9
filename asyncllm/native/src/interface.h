// The C interface: raw pointers, strides in elements and status codes, without torch.
//
// A Context is a thread pool, its scratch memory and the kernels of one instruction set. One thread
// at a time may call functions with a context; contexts are independent of one another.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum Status {
  STATUS_OK = 0,
  STATUS_INVALID = 1,    // shapes, strides or alignment that no kernel takes
  STATUS_NO_MEMORY = 2,  // scratch or packed weights could not be allocated
  STATUS_CLOSED = 3,     // no context, or a forked child has its parent's
  STATUS_INDEX = 4,      // a slot, block, position, token or row is beyond its table
};

// Activation of a gated linear unit: SiLU, x / (1 + e^-x), or GELU by tanh.
enum Activation { ACTIVATION_SILU = 0, ACTIVATION_GELU_TANH = 1 };

// Tensors have the first three types. Weights of a linear layer may also be DTYPE_I8, with a scale
// per output, or DTYPE_U4 and DTYPE_U8, with scales per group.
enum DType {
  DTYPE_F32 = 0, DTYPE_BF16 = 1, DTYPE_F16 = 2, DTYPE_I8 = 3, DTYPE_U4 = 4, DTYPE_U8 = 5
};

typedef struct Context Context;
typedef struct Weights Weights;

// Tensors are [token, head, dim] with the given strides; dim is contiguous.
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
  const int64_t* lines;        // [rows], row of the block table; null is the row's own index
  int64_t table_lines;
  int64_t rows, num_tokens, heads, kv_heads, head_dim, num_blocks, block_size;
  int64_t window;  // keys that a query sees, its own included; 0 is all
  float scale, softcap;  // softcap 0 is none
  const float* sinks;    // [heads], a logit per head that takes part in the softmax; may be null
  int32_t dtype;
} AttentionArgs;

// Norms and rotates q and k in place, norms v, and writes k and v to their slots. With kv_heads 0
// there are only queries, and neither slots nor a cache.
typedef struct RopeArgs {
  void* qkv;
  int64_t token_stride;
  // [table_rows, table_width]: cosines, then sines, of half a head; first for queries, then for
  // keys. If table_width is head_dim, queries and keys share them.
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

// Written instead of a token: for a row with NaN or infinity, and for one that is all minus
// infinity.
enum { NOT_FINITE = -1, NO_TOKEN_LEFT = -2 };

// Rows of logits and their sampling parameters. `lines` is the number of request indices, a dummy
// one included; arrays [lines] have an element per request index.
typedef struct SampleArgs {
  const void* logits;  // [rows, vocab_size]
  int64_t row_stride, rows, vocab_size;
  const int64_t* req_indices;  // [rows]; negative for a row to leave out
  const int64_t* positions;    // [rows], of the token before the sampled one
  // Scalars [lines], in the order of DRAW in gpu/batch/sampling_table.py.
  const int64_t* states;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  int64_t lines;
  int64_t* last_sampled;  // [lines], written: the token, or 0
  int64_t* out;           // [rows]
  int32_t dtype;
} SampleArgs;

// Rows of logits and the rules of their requests, see SamplingRows and LogitsTables in
// gpu/batch/sampling_inputs.py. Arrays of a stage that does not run may be null.
typedef struct LogitsArgs {
  const void* logits;  // [rows, vocab_size]
  int64_t row_stride, rows, vocab_size;
  float* out;                     // [rows, vocab_size]; undefined in rows that are left out
  const int64_t* req_indices;     // [rows]; negative for a row to leave out
  const int64_t* positions;       // [rows], of the token before the sampled one
  const int64_t* host_token_ids;  // [rows], that token; negative where it is in last_sampled
  const int64_t* last_sampled;    // [lines]
  int64_t lines, words;           // request indices; 32-bit words of a bit mask over tokens
  const int64_t* mask_slots;      // [rows], negative for none; null where no row has a mask
  const int32_t* mask_words;      // [num_masks, words]
  int64_t num_masks;
  const int32_t* restricted;  // [lines], like the other scalars
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
  int32_t dtype, rules, penalties;  // rules, penalties: whether these stages run
} LogitsArgs;

// Derives a step's tokens from its rows. Row i computes counts[i] tokens, from position starts[i]
// on, of the sequence in row lines[i] of the table.
typedef struct TokensArgs {
  const int64_t *lines, *starts, *counts;
  const int32_t* table;  // [table_lines, table_width], token ids by position
  int64_t table_lines, table_width;
  int64_t *token_ids, *positions;  // [tokens]
  int64_t* query_start;            // [rows + 1]
  int32_t* seq_lens;               // [rows]
} TokensArgs;

// Derives the KV slots of a step's tokens, from the block table's rows of their sequences.
typedef struct SlotsArgs {
  const int64_t *lines, *starts, *counts;
  const int32_t* table;  // [table_lines, table_width]
  int64_t table_lines, table_width, block_size;
  int64_t* slots;  // [tokens]
} SlotsArgs;

// Weights [n, k]; an element is (code - zero) * scale, with a scale and a zero point per output and
// group of `group` inputs, a multiple of SPAN; the last group may be shorter.
enum { SPAN = 32 };
typedef struct GroupedArgs {
  const void* values;  // [n] rows of codes; DTYPE_U4 has two in a byte, the even input's lower
  int64_t n, k, row_bytes, group;
  const void* scales;    // [n, ceil(k / group)]
  const uint8_t* zeros;  // the same; null is 8 for DTYPE_U4, and 128 for DTYPE_U8
  const float* bias;     // [n], or null
  int32_t dtype, scale_dtype;
} GroupedArgs;

// Weights [n, k] of `dtype` to be rounded to integers, as in gpu/ops/quantise.py: to 8 bits with a
// scale per output, or to 4 bits in groups of SPAN inputs, for an even k.
typedef struct RoundArgs {
  const void* values;
  int64_t n, k, row_stride;
  void* values_out;  // [n, k] int8; for 4 bits [n, k / 2], the even input in the lower half
  void* scales;      // [n] float32; for 4 bits [n, ceil(k / SPAN)] bfloat16
  uint8_t* zeros;    // for 4 bits [n, ceil(k / SPAN)]; else null
  int32_t dtype, bits;
} RoundArgs;

// The arguments of the functions with the same names below.
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
  int64_t parts;  // adjacent parts of a row, each of which is normed
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
// Index of a head's largest output [m], for the rows of x after those whose logits are written.
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

// The experts of each token, from the router's logits.
typedef struct RoutingArgs {
  const void* logits;  // [rows, num_experts]
  int64_t stride, num_experts, top_k;
  int64_t num_groups, top_groups;  // experts come from the best of equal groups; 1 and 1 is all
  const float* correction;  // [num_experts], added to scores for the choice only; may be null
  float scale, least_sum;   // least_sum: lower bound of the sum by which weights are divided
  const float* expert_scale;  // [num_experts], a factor on their weights; may be null
  int32_t sigmoid, renormalise;  // 0: scores are a softmax; weights keep their sum
  int32_t* ids;                  // [rows, top_k], the best score first; of equal ones the first
  float* weights;                // [rows, top_k]
  int32_t dtype;
} RoutingArgs;

// The gated MLPs of a mixture of experts, top_k for each token, and their weighted sum.
typedef struct ExpertsArgs {
  const Weights* const* gate_up;  // [num_experts] of [2 * inner, width], gates before ups
  const Weights* const* down;     // [num_experts] of [width, inner]
  const void* x;                  // [rows, width]
  int64_t x_stride;
  const int32_t* ids;    // [rows, top_k]
  const float* weights;  // [rows, top_k]
  const void* shared;    // [rows, width], added to the sum; may be null
  int64_t shared_stride;
  const void* gate;      // [rows], a logit, whose sigmoid is a factor on `shared`; may be null
  int64_t gate_stride;
  void* out;  // [rows, width]
  int64_t num_experts, top_k, width, inner;
  float alpha, limit;  // of the clamped SwiGLU; limit 0 is activation(gate) * up
  int32_t dtype, activation;
} ExpertsArgs;

// A step's rows for ops of recurrent layers. No two rows have the same slot.
typedef struct StateRows {
  const int64_t* lines;        // [rows], the slot of each row's states
  const int64_t* starts;       // [rows], position of its first token; at 0 it starts from zeros
  const int64_t* query_start;  // [rows + 1], its first token in the step
  int64_t rows, num_tokens, num_slots;
} StateRows;

// A depthwise convolution, followed by SiLU.
typedef struct ConvArgs {
  StateRows rows;
  const void* x;  // [tokens, channels]
  int64_t x_stride;
  const float* weight;  // [width, channels], the oldest input's weight first
  void* state;          // [num_slots, width - 1, channels], the last inputs; written
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
  float* state;                     // [num_slots, value_heads, key_dim, value_dim]; written
  void* out;                        // [tokens, value_heads * value_dim]
  int64_t key_heads, value_heads, key_dim, value_dim;
  int32_t dtype;
} DeltaArgs;

// The norm of each head, times SiLU of its gate.
typedef struct GatedNormArgs {
  const void* x;  // [rows, heads * head_size]
  int64_t x_stride;
  const void* gate;  // the same
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
  const void* gate;  // the same
  int64_t gate_stride;
  void* out;  // [rows, width]
  int64_t width;
  int32_t dtype;
} SigmoidMulArgs;

// A step's sizes, which are arguments of a program's run. WANTED are the tokens that are computed
// beyond the last write to the KV cache. Of these the first, SAMPLED, get logits, and the next,
// GREEDY, only the index of the largest output.
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
  int32_t size;    // the Size of its output's first dimension
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

// Ops that run one after the other, on buffers with room for the largest step.
typedef struct Program {
  const Op* ops;
  int64_t num_ops, op_bytes;
  int64_t num_writing_ops;       // the first ops, which a step without WANTED tokens runs
  int64_t capacity[NUM_SIZES];  // rows that the buffers of each Size have
} Program;

// A step for the thread of a queue: the program, its inputs, and its tokens. Everything that it
// points at must stay unchanged until the job has been waited for.
typedef struct Job {
  const Program* program;
  int64_t sizes[NUM_SIZES];
  void* to;  // the program's inputs, to which `bytes` are copied before it runs
  const void* from;
  int64_t bytes;
  // The draw from the logits; nothing is drawn if it has no rows.
  SampleArgs draw;
  // [SIZE_GREEDY], indices of the largest outputs, written by the program.
  const int64_t* greedy;
  // The step's tokens: those of the draw, then `greedy`; 0 if the caller samples.
  // table[lines[i]][positions[i] + 1] = tokens[i], or 0 if there is no token.
  int64_t num_tokens;
  int64_t* tokens;
  const int64_t *lines, *positions;
  int32_t* table;  // [table_lines, table_width]
  int64_t table_lines, table_width;
  // Written: the status of the job, and the op that failed, as in asyncllm_run.
  int64_t failed;
  int64_t number;
  int32_t status;
} Job;

// The digest of the library's sources, see build.py.
const char* asyncllm_sources(void);
// The best instruction set that this library has and this processor runs.
const char* asyncllm_best_isa(void);

// Gives long time slices to the calling thread, which is going to call ops; see threads.h.
void asyncllm_lengthen_slice(void);

// isa: a name, or null for the best. Returns null if it is unavailable or threads cannot start.
Context* asyncllm_create(int32_t num_threads, const char* isa);
// Ends the threads. Does nothing in a forked child, because they are the parent's.
void asyncllm_close(Context*);
const char* asyncllm_isa(const Context*);

// Copies values [n, k] into the layout of the context's kernels, zero padded. A weight of type
// DTYPE_I8 is its value times the scale of its row. Returns null if out of memory.
Weights* asyncllm_pack(Context*, const void* values, int32_t dtype, int64_t n, int64_t k,
                       int64_t row_stride, const float* scales, const float* bias);
Weights* asyncllm_pack_grouped(Context*, const GroupedArgs*);
int32_t asyncllm_round(Context*, const RoundArgs*);
void asyncllm_free_weights(Weights*);
int64_t asyncllm_weights_bytes(const Weights*);

// y [m, n] = x [m, k] W^T + bias. A row's result depends on that row alone. For DTYPE_I8 weights,
// rows of x are rounded to integers with a scale per row, and the sums are exact. For weights in
// groups, they are rounded to 8-bit integers with a scale per SPAN inputs. Float32 weights take x
// of any type, and y is float32; otherwise y has the type of x.
int32_t asyncllm_linear(Context*, const Weights*, const void* x, int64_t x_stride, void* y,
                        int64_t y_stride, int64_t m, int32_t dtype);
// out [m] = index of each row's largest output of asyncllm_linear, rounded to `dtype`, the first of
// equal ones; or NOT_FINITE, or NO_TOKEN_LEFT.
int32_t asyncllm_linear_argmax(Context*, const Weights*, const void* x, int64_t x_stride,
                               int64_t* out, int64_t m, int32_t dtype);
// out [count, k] = the rows of the weight that ids name, times `scale`: the embedding of a tied
// head.
int32_t asyncllm_gather(Context*, const Weights*, const int64_t* ids, int64_t count, void* out,
                        float scale, int32_t dtype);
// out [count, width] = the rows of x [x_rows, width] that ids name, times `scale`.
int32_t asyncllm_select(Context*, const void* x, int64_t x_stride, int64_t x_rows,
                        const int64_t* ids, int64_t count, void* out, int64_t width, float scale,
                        int32_t dtype);
int32_t asyncllm_attention(Context*, const AttentionArgs*);
// First residual = scale * (residual + multiplier * x), unless residual is null; then out
// [rows, width] = norm(residual or x). The norm is rounded before a weight of `dtype`, but after a
// float32 weight.
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
// A row's results depend on its tokens and its states alone. Those of the gated delta rule do not
// depend on how tokens are divided among steps.
int32_t asyncllm_causal_conv(Context*, const ConvArgs*);
int32_t asyncllm_gated_delta(Context*, const DeltaArgs*);
int32_t asyncllm_gated_norm(Context*, const GatedNormArgs*, int64_t rows);
// out = x * sigmoid(gate).
int32_t asyncllm_sigmoid_mul(Context*, const SigmoidMulArgs*, int64_t rows);
// Runs a step of these sizes. If it fails, *failed is the index of the op, or -1 for the sizes.
int32_t asyncllm_run(Context*, const Program*, const int64_t* sizes, int64_t* failed);

// Queues a job for the context's queue thread, which the first job starts. While a job is queued or
// runs, no other op may be called with the context.
int32_t asyncllm_submit(Context*, Job*);
// Waits until a job has ended; its status says how.
int32_t asyncllm_wait(Context*, const Job*);

// Sums 64-bit words, to measure how long reading memory takes; bytes are a multiple of 64.
int32_t asyncllm_read(Context*, const void* memory, int64_t bytes, uint64_t* sum);
// Draws a token for each row, see ops/gumbel.py. A row's token depends on that row alone.
int32_t asyncllm_sample(Context*, const SampleArgs*);
// Applies the stages before temperature, with the same bits as gpu/ops/logits.py.
int32_t asyncllm_process_logits(Context*, const LogitsArgs*);
// values and ids [rows, top + 1]: log-probabilities and ids of the likeliest tokens, and last the
// log-probability and the rank of tokens[row].
int32_t asyncllm_top_logprobs(Context*, const void* logits, int64_t row_stride, int64_t rows,
                              int64_t vocab_size, int32_t dtype, const int64_t* tokens,
                              int64_t top, float* values, int64_t* ids);

#ifdef __cplusplus
}
#endif
