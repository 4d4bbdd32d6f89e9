// The ops on a KV cache. An op checks every index, divides the work and calls the kernels.
#include "context.h"

namespace {

bool is_cache(const void* cache, int32_t dtype, int64_t num_blocks, int64_t block_size,
              int64_t kv_heads, int64_t head_dim) {
  return is_dtype(dtype) && cache && aligned(cache, size_of(dtype)) && num_blocks > 0 &&
         block_size > 0 && kv_heads > 0 && head_dim > 0;
}

// A unit of attention work: a tile of a sequence's tokens and a range of keys, for all heads.
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

  // Checks lengths and block tables, and makes the pieces.
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

  // Makes a piece's task for a key/value head, or for a part of that head's query heads.
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
      if (args_.lines && (args_.lines[row] < 0 || args_.lines[row] >= args_.table_lines))
        return STATUS_INDEX;
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

  // Checks the ids of a row's blocks, except of blocks before its window, which may be freed.
  int32_t check_table(int64_t row, int64_t length, int64_t tokens) {
    const int32_t* table = block_table_of(args_, row);
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
  // Partial results of a token are ordered by head group, then by split.
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
    // Start with the last tiles of a prompt, which see the most keys.
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
  bool writes = a.kv_heads != 0;
  if (writes && !is_cache(a.cache, a.dtype, a.num_blocks, a.block_size, a.kv_heads, a.head_dim))
    return STATUS_INVALID;
  if (a.heads < 1 || a.head_dim < 1 || a.head_dim % 2 ||
      !is_matrix(a.qkv, a.dtype, a.num_tokens, width, a.token_stride) ||
      !is_matrix(a.table, a.dtype, 1, a.head_dim, a.head_dim) || a.table_width < a.head_dim ||
      (writes && !a.q_norm != !a.k_norm) || (a.v_norm && !(a.q_norm && writes)) ||
      (a.norm_dtype != a.dtype && a.norm_dtype != DTYPE_F32))
    return STATUS_INVALID;
  int64_t size = size_of(a.norm_dtype);
  if (!aligned(a.q_norm, size) || !aligned(a.k_norm, size) || !aligned(a.v_norm, size) ||
      (a.num_tokens && (!a.positions || (writes && !a.slots))))
    return STATUS_INVALID;
  for (int64_t token = 0; token < a.num_tokens; ++token)
    if (a.positions[token] < 0 || a.positions[token] >= a.table_rows ||
        (writes && (a.slots[token] < 0 || a.slots[token] >= a.num_blocks * a.block_size)))
      return STATUS_INDEX;
  share(context, a.num_tokens, a.num_tokens * width * 4,
        [&](int64_t token, int) { context->kernels->rope(a, token); });
  return STATUS_OK;
}
