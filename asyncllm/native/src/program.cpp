// Runs a program: first the ops that look up the step's tokens and slots, then the model's ops, one
// after the other. The ops check their arguments; asyncllm_run checks that the sizes fit the
// buffers.
#include "context.h"

namespace {

// Checks that the rows' lines and positions are in the table, and that they have `tokens` tokens.
template <class Args>
int32_t check_rows(const Args& a, int64_t rows, int64_t tokens, int64_t positions) {
  if (!a.lines || !a.starts || !a.counts || !a.table || positions < 0) return STATUS_INVALID;
  int64_t left = tokens;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t start = a.starts[row], count = a.counts[row];
    if (count < 0 || count > left) return STATUS_INVALID;
    if (a.lines[row] < 0 || a.lines[row] >= a.table_lines || start < 0 ||
        start > positions - count)
      return STATUS_INDEX;
    left -= count;
  }
  return left ? STATUS_INVALID : STATUS_OK;
}

int32_t run_tokens(const TokensArgs& a, int64_t rows, int64_t tokens) {
  int32_t status = check_rows(a, rows, tokens, a.table_width);
  if (status) return status;
  int64_t at = 0;
  a.query_start[0] = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* ids = a.table + a.lines[row] * a.table_width;
    int64_t end = a.starts[row] + a.counts[row];
    for (int64_t position = a.starts[row]; position < end; ++position, ++at) {
      a.token_ids[at] = ids[position];
      a.positions[at] = position;
    }
    a.query_start[row + 1] = at;
    a.seq_lens[row] = int32_t(end);
  }
  return STATUS_OK;
}

int32_t run_slots(const SlotsArgs& a, int64_t rows, int64_t tokens) {
  if (a.block_size < 1) return STATUS_INVALID;
  int32_t status = check_rows(a, rows, tokens, a.table_width * a.block_size);
  if (status) return status;
  int64_t at = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* blocks = a.table + a.lines[row] * a.table_width;
    int64_t end = a.starts[row] + a.counts[row];
    for (int64_t position = a.starts[row]; position < end; ++position)
      a.slots[at++] = blocks[position / a.block_size] * a.block_size + position % a.block_size;
  }
  return STATUS_OK;
}

int32_t run_op(Context* context, const Op& op, const int64_t* sizes) {
  if (op.size < 0 || op.size >= NUM_SIZES || op.x_size >= NUM_SIZES) return STATUS_INVALID;
  int64_t size = sizes[op.size];
  switch (op.kind) {
    case OP_TOKENS: return run_tokens(op.args.tokens, sizes[SIZE_ROWS], size);
    case OP_SLOTS: return run_slots(op.args.slots, sizes[SIZE_ROWS], size);
    case OP_GATHER: {
      const GatherArgs& a = op.args.gather;
      return asyncllm_gather(context, a.weights, a.ids, size, a.out, a.scale, a.dtype);
    }
    case OP_SELECT: {
      const SelectArgs& a = op.args.select;
      int64_t x_rows = op.x_size < 0 ? a.x_rows : sizes[op.x_size];
      return asyncllm_select(context, a.x, a.x_stride, x_rows, a.ids, size, a.out, a.width,
                             a.scale, a.dtype);
    }
    case OP_LINEAR: {
      const LinearArgs& a = op.args.linear;
      return asyncllm_linear(context, a.weights, a.x, a.x_stride, a.y, a.y_stride, size, a.dtype);
    }
    case OP_RMS_NORM: {
      const NormArgs& a = op.args.norm;
      if (a.parts < 1) return STATUS_INVALID;
      return asyncllm_rms_norm(context, a.x, a.x_stride, a.residual, a.residual_stride, a.weight,
                               a.weight_dtype, a.eps, a.multiplier, a.scale, a.out, size * a.parts,
                               a.width, a.dtype);
    }
    case OP_ROPE_AND_CACHE: {
      RopeArgs args = op.args.rope;
      args.num_tokens = size;
      return asyncllm_rope_and_cache(context, &args);
    }
    case OP_ATTENTION: {
      AttentionArgs args = op.args.attention;
      args.rows = sizes[SIZE_ROWS];
      args.num_tokens = size;
      return asyncllm_attention(context, &args);
    }
    case OP_GATED_MUL: {
      const GatedArgs& a = op.args.gated;
      return asyncllm_gated_mul(context, a.gate, a.gate_stride, a.up, a.up_stride, a.out, size,
                                a.width, a.activation, a.dtype);
    }
    case OP_ADD: {
      const AddArgs& a = op.args.add;
      return asyncllm_add(context, a.x, a.x_stride, a.residual, a.residual_stride, a.multiplier,
                          a.scale, size, a.width, a.dtype);
    }
    case OP_SOFTCAP: {
      const SoftcapArgs& a = op.args.softcap;
      return asyncllm_softcap(context, a.x, a.stride, a.cap, size, a.width, a.dtype);
    }
    case OP_ROUTING: return asyncllm_routing(context, &op.args.routing, size);
    case OP_EXPERTS: return asyncllm_experts(context, &op.args.experts, size);
    case OP_CAUSAL_CONV: {
      ConvArgs args = op.args.conv;
      args.rows.rows = sizes[SIZE_ROWS];
      args.rows.num_tokens = size;
      return asyncllm_causal_conv(context, &args);
    }
    case OP_GATED_DELTA: {
      DeltaArgs args = op.args.delta;
      args.rows.rows = sizes[SIZE_ROWS];
      args.rows.num_tokens = size;
      return asyncllm_gated_delta(context, &args);
    }
    case OP_GATED_NORM: return asyncllm_gated_norm(context, &op.args.gated_norm, size);
    case OP_SIGMOID_MUL: return asyncllm_sigmoid_mul(context, &op.args.sigmoid_mul, size);
    case OP_ARGMAX: {
      const ArgmaxArgs& a = op.args.argmax;
      if (!size) return STATUS_OK;
      if (!is_dtype(a.dtype) || !a.x || a.x_stride < 0) return STATUS_INVALID;
      const char* x = static_cast<const char*>(a.x);
      x += sizes[SIZE_SAMPLED] * a.x_stride * size_of(a.dtype);
      return asyncllm_linear_argmax(context, a.weights, x, a.x_stride, a.out, size, a.dtype);
    }
  }
  return STATUS_INVALID;
}

bool fits(const Program& program, const int64_t* sizes) {
  for (int i = 0; i < NUM_SIZES; ++i)
    if (sizes[i] < 0 || sizes[i] > program.capacity[i]) return false;
  return sizes[SIZE_WANTED] <= sizes[SIZE_TOKENS] &&
         sizes[SIZE_SAMPLED] <= sizes[SIZE_WANTED] - sizes[SIZE_GREEDY];
}

}  // namespace

API int32_t asyncllm_run(Context* context, const Program* program, const int64_t* sizes,
                         int64_t* failed) {
  *failed = -1;
  if (!is_open(context)) return STATUS_CLOSED;
  if (program->op_bytes != int64_t(sizeof(Op)) || program->num_writing_ops > program->num_ops ||
      !fits(*program, sizes))
    return STATUS_INVALID;
  int64_t count = sizes[SIZE_WANTED] ? program->num_ops : program->num_writing_ops;
  for (int64_t i = 0; i < count; ++i) {
    int32_t status = run_op(context, program->ops[i], sizes);
    if (status) {
      *failed = i;
      return status;
    }
  }
  return STATUS_OK;
}
