// The ops of recurrent layers. An op checks every row and slot, divides the work among threads and
// calls the kernels.
#include <math.h>

#include "context.h"

namespace {

// Number of channels of the convolution per task.
constexpr int64_t CHANNELS = 512;
// Epsilon in the normalisation of queries and keys to length 1.
constexpr float LENGTH_EPS = 1e-6f;

// Checks that the rows cover the step's tokens and name valid slots.
int32_t check_rows(const StateRows& rows) {
  if (rows.rows < 0 || rows.num_tokens < 0 || rows.num_slots < 1) return STATUS_INVALID;
  if (!rows.rows) return rows.num_tokens ? STATUS_INVALID : STATUS_OK;
  if (!rows.lines || !rows.starts || !rows.query_start || rows.query_start[0] != 0 ||
      rows.query_start[rows.rows] != rows.num_tokens)
    return STATUS_INVALID;
  for (int64_t row = 0; row < rows.rows; ++row) {
    if (rows.query_start[row + 1] < rows.query_start[row]) return STATUS_INVALID;
    if (rows.starts[row] < 0 || rows.lines[row] < 0 || rows.lines[row] >= rows.num_slots)
      return STATUS_INDEX;
  }
  return STATUS_OK;
}

// A token's inputs of the gated delta rule in float32: beta and decay of each value head, q and k.
struct TokenInputs {
  const DeltaArgs& args;
  int64_t keys = args.key_heads * args.key_dim;
  int64_t stride = 2 * args.value_heads + 2 * keys;

  void fill(Context* context, int64_t token, float* out) const {
    int64_t size = size_of(args.dtype), heads = args.value_heads;
    const char* gates = static_cast<const char*>(args.gates) + token * args.gates_stride * size;
    const char* q = static_cast<const char*>(args.qkv) + token * args.qkv_stride * size;
    context->kernels->widen(gates, args.dtype, out, 2 * heads);
    for (int64_t head = 0; head < heads; ++head) {
      out[head] = 1.0f / (1.0f + expf(-out[head]));
      float x = out[heads + head] + args.dt_bias[head];
      float softplus = x > 20.0f ? x : log1pf(expf(x));
      out[heads + head] = expf(-expf(args.log_rate[head]) * softplus);
    }
    out += 2 * heads;
    context->kernels->normalise_heads(q, args.dtype, out, args.key_heads, args.key_dim, LENGTH_EPS,
                                      1.0f / sqrtf(float(args.key_dim)));
    context->kernels->normalise_heads(q + keys * size, args.dtype, out + keys, args.key_heads,
                                      args.key_dim, LENGTH_EPS, 1.0f);
  }
};

// Makes the task for columns [first, last) of a value head's state, over a row's tokens.
DeltaTask delta_task(const DeltaArgs& a, const TokenInputs& tokens, const float* inputs,
                     int64_t row, int64_t head, int64_t first, int64_t last) {
  int64_t begin = a.rows.query_start[row], size = size_of(a.dtype);
  int64_t key_head = head / (a.value_heads / a.key_heads), column = head * a.value_dim + first;
  const float* at = inputs + begin * tokens.stride;
  const float* query = at + 2 * a.value_heads + key_head * a.key_dim;
  int64_t matrix = a.rows.lines[row] * a.value_heads + head;
  return {query,
          query + tokens.keys,
          at + head,
          at + a.value_heads + head,
          tokens.stride,
          a.rows.query_start[row + 1] - begin,
          static_cast<const char*>(a.qkv) + (begin * a.qkv_stride + 2 * tokens.keys + column) * size,
          a.qkv_stride,
          a.state + matrix * a.key_dim * a.value_dim + first,
          a.value_dim,
          static_cast<char*>(a.out) + (begin * a.value_heads * a.value_dim + column) * size,
          a.value_heads * a.value_dim,
          a.key_dim,
          last - first,
          a.rows.starts[row] == 0,
          a.dtype};
}

bool is_valid(const DeltaArgs& a) {
  if (a.key_heads < 1 || a.key_dim < 1 || a.value_dim < 1 || a.value_heads < a.key_heads ||
      a.value_heads % a.key_heads)
    return false;
  int64_t tokens = a.rows.num_tokens, values = a.value_heads * a.value_dim;
  return is_matrix(a.qkv, a.dtype, tokens, 2 * a.key_heads * a.key_dim + values, a.qkv_stride) &&
         is_matrix(a.gates, a.dtype, tokens, 2 * a.value_heads, a.gates_stride) &&
         is_matrix(a.out, a.dtype, tokens, values, values) && a.dt_bias && a.log_rate &&
         is_matrix(a.state, DTYPE_F32, 1, 1, 1);
}

}  // namespace

API int32_t asyncllm_causal_conv(Context* context, const ConvArgs* args) {
  if (!is_open(context)) return STATUS_CLOSED;
  const ConvArgs& a = *args;
  int32_t status = check_rows(a.rows);
  if (status) return status;
  int64_t tokens = a.rows.num_tokens, channels = a.channels;
  if (a.width < 2 || !is_matrix(a.x, a.dtype, tokens, channels, a.x_stride) ||
      !is_matrix(a.out, a.dtype, tokens, channels, channels) ||
      !is_matrix(a.state, a.dtype, 1, channels, channels) ||
      !is_matrix(a.weight, DTYPE_F32, 1, channels, channels))
    return STATUS_INVALID;
  int64_t parts = divide_up(channels, CHANNELS);
  share(context, a.rows.rows * parts, tokens * channels * 16, [&](int64_t index, int) {
    int64_t first = index % parts * CHANNELS;
    context->kernels->convolve(a, index / parts, first, least(channels, first + CHANNELS));
  });
  return STATUS_OK;
}

API int32_t asyncllm_gated_delta(Context* context, const DeltaArgs* args) {
  if (!is_open(context)) return STATUS_CLOSED;
  const DeltaArgs& a = *args;
  int32_t status = check_rows(a.rows);
  if (status) return status;
  if (!is_valid(a)) return STATUS_INVALID;
  TokenInputs tokens{a};
  int64_t count = a.rows.num_tokens;
  if (!grow(&context->shared, &context->shared_bytes, count * tokens.stride * 4))
    return STATUS_NO_MEMORY;
  float* inputs = static_cast<float*>(context->shared);
  share(context, count, count * tokens.stride * 4,
        [&](int64_t token, int) { tokens.fill(context, token, inputs + token * tokens.stride); });
  int64_t columns = 4 * context->kernels->width, parts = divide_up(a.value_dim, columns);
  int64_t per_row = a.value_heads * parts;
  share(context, a.rows.rows * per_row, count * a.value_heads * a.key_dim * a.value_dim * 3,
        [&](int64_t index, int) {
          int64_t row = index / per_row, first = index % parts * columns;
          if (a.rows.query_start[row] == a.rows.query_start[row + 1]) return;
          context->kernels->delta(delta_task(a, tokens, inputs, row, index % per_row / parts, first,
                                             least(a.value_dim, first + columns)));
        });
  return STATUS_OK;
}

API int32_t asyncllm_gated_norm(Context* context, const GatedNormArgs* args, int64_t rows) {
  if (!is_open(context)) return STATUS_CLOSED;
  const GatedNormArgs& a = *args;
  if (a.heads < 1 || a.head_size < 1) return STATUS_INVALID;
  int64_t width = a.heads * a.head_size, size = size_of(a.dtype);
  if (!is_matrix(a.x, a.dtype, rows, width, a.x_stride) ||
      !is_matrix(a.gate, a.dtype, rows, width, a.gate_stride) ||
      !is_matrix(a.out, a.dtype, rows, width, width) ||
      !is_matrix(a.weight, a.dtype, 1, a.head_size, a.head_size))
    return STATUS_INVALID;
  share(context, rows, rows * width * 10, [&](int64_t row, int) {
    context->kernels->gated_norm(static_cast<const char*>(a.x) + row * a.x_stride * size,
                                 static_cast<const char*>(a.gate) + row * a.gate_stride * size,
                                 a.weight, a.eps, static_cast<char*>(a.out) + row * width * size,
                                 a.heads, a.head_size, a.dtype);
  });
  return STATUS_OK;
}

API int32_t asyncllm_sigmoid_mul(Context* context, const SigmoidMulArgs* args, int64_t rows) {
  if (!is_open(context)) return STATUS_CLOSED;
  const SigmoidMulArgs& a = *args;
  if (!is_matrix(a.x, a.dtype, rows, a.width, a.x_stride) ||
      !is_matrix(a.gate, a.dtype, rows, a.width, a.gate_stride) ||
      !is_matrix(a.out, a.dtype, rows, a.width, a.width))
    return STATUS_INVALID;
  int64_t size = size_of(a.dtype);
  share(context, rows, rows * a.width * 8, [&](int64_t row, int) {
    context->kernels->sigmoid_mul(static_cast<const char*>(a.x) + row * a.x_stride * size,
                                  static_cast<const char*>(a.gate) + row * a.gate_stride * size,
                                  static_cast<char*>(a.out) + row * a.width * size, a.width,
                                  a.dtype);
  });
  return STATUS_OK;
}
