// Paged attention with an online softmax in float32.
//
// A query's sums are computed block of keys by block and split by split. Blocks and splits start at
// multiples of their sizes, and a block without visible keys changes nothing. So a query's result
// has the same bits in a decode step, in any chunk of its prompt, and beside any other queries.
enum { COLUMNS = 4 };

// head_dim, padded so that loads of whole vectors stay within the scratch memory.
INLINE int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

struct Tile {
  float *q, *scores, *sums, *maxima, *totals, *alphas;  // state of the current split
  float *out, *out_maxima, *out_totals;                 // merged result of the splits so far
  float *keys, *values;                                 // a block of keys in float32
  int64_t stride;
};

static int64_t attention_scratch(int64_t head_dim) {
  int64_t stride = padded_dim(head_dim);
  return (3 * TILE * stride + 2 * KEYS * stride + TILE * KEYS + 5 * TILE) * (int64_t)sizeof(float);
}

INLINE Tile tile_in(void* scratch, int64_t head_dim) {
  Tile tile;
  tile.stride = padded_dim(head_dim);
  float* p = (float*)scratch;
  auto take = [&](int64_t count) { float* at = p; p += count; return at; };
  tile.q = take(TILE * tile.stride);
  tile.sums = take(TILE * tile.stride);
  tile.out = take(TILE * tile.stride);
  tile.keys = take(KEYS * tile.stride);
  tile.values = take(KEYS * tile.stride);
  tile.scores = take(TILE * KEYS);
  tile.maxima = take(TILE);
  tile.totals = take(TILE);
  tile.alphas = take(TILE);
  tile.out_maxima = take(TILE);
  tile.out_totals = take(TILE);
  return tile;
}

// Maximum of a row that has seen no key. It is the least finite float, because the difference of
// two minus infinities is NaN.
static const float UNSEEN = -3.402823466e38f;

template <class T, int M>
INLINE void score_rows(const Tile& tile, int64_t row, const T* const* keys, int64_t count,
                       int64_t dim) {
  for (int64_t key = 0; key < count; key += 4) {
    const T* four[4];
    for (int64_t j = 0; j < 4; ++j) four[j] = keys[least(key + j, count - 1)];
    float out[M][4];
    dot_tile<T, M>(tile.q + row * tile.stride, tile.stride, four, dim, out);
    for (int m = 0; m < M; ++m)
      __builtin_memcpy(tile.scores + (row + m) * KEYS + key, out[m], sizeof(out[m]));
  }
}

template <class T>
static void score(const Tile& tile, int64_t rows, const T* const* keys, int64_t count,
                  int64_t dim) {
  int64_t row = 0;
  for (; row + ROWS <= rows; row += ROWS) score_rows<T, ROWS>(tile, row, keys, count, dim);
  for (; row + 2 <= rows; row += 2) score_rows<T, 2>(tile, row, keys, count, dim);
  for (; row < rows; ++row) score_rows<T, 1>(tile, row, keys, count, dim);
}

// Turns a row's scores into weights, for keys [first, last) of a block; other keys get weight 0.
INLINE void weigh(const Tile& tile, int64_t row, int64_t first, int64_t last, float softcap) {
  float* scores = tile.scores + row * KEYS;
  if (first >= last) {
    zero_floats(scores, KEYS);
    tile.alphas[row] = 1.0f;
    return;
  }
  if (softcap != 0.0f)
    for (int i = 0; i < KEYS; i += W) {
      vf capped = hyperbolic_tangent(div(load(scores + i), set1(softcap)));
      store(scores + i, mul(capped, set1(softcap)));
    }
  for (int64_t i = 0; i < first; ++i) scores[i] = -__builtin_inff();
  for (int64_t i = last; i < KEYS; ++i) scores[i] = -__builtin_inff();
  vf top = set1(UNSEEN);
  for (int i = 0; i < KEYS; i += W) top = vmax(top, load(scores + i));
  float before = tile.maxima[row], maximum = hmax(top);
  if (before > maximum) maximum = before;
  vf total = zero();
  for (int i = 0; i < KEYS; i += W) {
    vf weight = exponential(sub(load(scores + i), set1(maximum)));
    store(scores + i, weight);
    total = add(total, weight);
  }
  float alpha = before == maximum ? 1.0f : exponential(before - maximum);
  tile.alphas[row] = alpha;
  tile.maxima[row] = maximum;
  tile.totals[row] = tile.totals[row] * alpha + hsum(total);
}

template <class T, int M, int C>
INLINE void accumulate_columns(const Tile& tile, int64_t row, int64_t column,
                               const T* const* values, int64_t first, int64_t last,
                               int64_t width) {
  vf sums[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    vf alpha = set1(tile.alphas[row + m]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      sums[m][c] = mul(load(tile.sums + (row + m) * tile.stride + column + c * W), alpha);
  }
  for (int64_t key = first; key < last; ++key) {
    vf weights[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) weights[m] = set1(tile.scores[(row + m) * KEYS + key]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      // The barrier keeps GCC from loading all values of the key first, which would spill a sum.
      asm volatile("" ::: "memory");
      vf value = C == 1 ? load_up_to(values[key] + column, width)
                        : load(values[key] + column + c * W);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sums[m][c] = fma(weights[m], value, sums[m][c]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      store(tile.sums + (row + m) * tile.stride + column + c * W, sums[m][c]);
}

template <class T, int M>
INLINE void accumulate_rows(const Tile& tile, int64_t row, const T* const* values, int64_t first,
                            int64_t last, int64_t dim) {
  int64_t column = 0;
  for (; column + COLUMNS * W <= dim; column += COLUMNS * W)
    accumulate_columns<T, M, COLUMNS>(tile, row, column, values, first, last, W);
  for (; column < dim; column += W)
    accumulate_columns<T, M, 1>(tile, row, column, values, first, last, dim - column);
}

// sums = sums * alpha + weights * values, over keys [first, last).
template <class T>
static void accumulate(const Tile& tile, int64_t rows, const T* const* values, int64_t first,
                       int64_t last, int64_t dim) {
  int64_t row = 0;
  for (; row + ROWS <= rows; row += ROWS)
    accumulate_rows<T, ROWS>(tile, row, values, first, last, dim);
  for (; row + 2 <= rows; row += 2) accumulate_rows<T, 2>(tile, row, values, first, last, dim);
  for (; row < rows; ++row) accumulate_rows<T, 1>(tile, row, values, first, last, dim);
}

// out = out * e^(out_maximum - m) + sums * e^(maximum - m), where m is the greater maximum.
INLINE void fold_split(float* out, float* out_maximum, float* out_total, const float* sums,
                       float maximum, float total, int64_t stride) {
  float greater = *out_maximum > maximum ? *out_maximum : maximum;
  float old = *out_maximum == greater ? 1.0f : exponential(*out_maximum - greater);
  float own = maximum == greater ? 1.0f : exponential(maximum - greater);
  for (int64_t i = 0; i < stride; i += W)
    store(out + i, fma(load(out + i), set1(old), mul(load(sums + i), set1(own))));
  *out_total = *out_total * old + total * own;
  *out_maximum = greater;
}

template <class T>
static void write_output(const AttentionArgs& args, int64_t token, int64_t head, float* sums,
                         float maximum, float total) {
  T* out = (T*)args.out + (token * args.heads + head) * args.head_dim;
  float scale = 1.0f;
  if (args.sinks) {
    float sink = args.sinks[head], greater = sink > maximum ? sink : maximum;
    scale = exponential(maximum - greater);
    total = total * scale + exponential(sink - greater);
  }
  float factor = total == 0.0f ? 0.0f : scale / total;
  for (int64_t i = 0; i < args.head_dim; i += W)
    store_up_to(out + i, mul(load(sums + i), set1(factor)), args.head_dim - i);
}

template <class T>
INLINE void find_block(const AttentionArgs& args, const AttentionTask& task, int64_t first,
                       int64_t count, const T** keys, const T** values) {
  const int32_t* table = block_table_of(args, task.row);
  const T* base = (const T*)args.cache + task.kv_head * args.head_stride;
  // Keys of a KV block are slot_stride apart, so that one division per KV block is enough.
  int64_t block = first / args.block_size, slot = first % args.block_size;
  for (int64_t i = 0; i < count; ++block, slot = 0) {
    const T* key = base + table[block] * args.block_stride + slot * args.slot_stride;
    for (int64_t end = least(count, i + args.block_size - slot); i < end; ++i) {
      keys[i] = key;
      values[i] = key + args.kv_stride;
      key += args.slot_stride;
    }
  }
}

template <class T> INLINE void prefetch_rows(const T* const* rows, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < dim; j += 64 / (int64_t)sizeof(T)) __builtin_prefetch(rows[i] + j);
}

// Converts a block of keys or values to float32, once for all rows of a tile.
template <class T>
static void widen_block(float* to, int64_t stride, const T* const* from, const float** rows,
                        int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < dim; j += W)
      store(to + i * stride + j, load_up_to(from[i] + j, dim - j));
    rows[i] = to + i * stride;
  }
}

// The keys [first(row), last(row)) that each row of a tile sees.
struct Sight {
  int64_t position, group, window;
  int64_t last(int64_t row) const { return position + row / group + 1; }
  int64_t first(int64_t row) const { return window ? most(0, last(row) - window) : 0; }
};

// Adds keys [first, last) of one block to the current split.
template <class T>
static void attend_block(const AttentionTask& task, const Tile& tile, const Sight& sight,
                         int64_t rows, int64_t first, int64_t last) {
  const AttentionArgs& args = *task.args;
  // Few rows finish a block before the next has come from memory: prefetch it. Many rows read a
  // block many times: copy it, because slots a multiple of 4 KiB apart evict one another from the
  // cache.
  bool few = rows <= 2 * ROWS;
  const T *keys[KEYS], *values[KEYS];
  // The block starts at a multiple of KEYS, which may be before the window's first key.
  int64_t start = first / KEYS * KEYS, skip = first - start, count = last - start;
  find_block(args, task, first, last - first, keys + skip, values + skip);
  for (int64_t i = 0; i < skip; ++i) keys[i] = keys[skip];
  if (few) prefetch_rows(values + skip, count - skip, args.head_dim);
  const T *next_keys[KEYS], *next_values[KEYS];
  int64_t next = least(KEYS, task.last_key - last);
  find_block(args, task, last, next, next_keys, next_values);
  prefetch_rows(next_keys, next, args.head_dim);
  prefetch_rows(next_values, next, args.head_dim);
  const float *wide_keys[KEYS], *wide_values[KEYS];
  if (!few) {
    widen_block(tile.keys, tile.stride, keys, wide_keys, count, args.head_dim);
    score(tile, rows, wide_keys, count, args.head_dim);
  } else {
    score(tile, rows, keys, count, args.head_dim);
  }
  for (int64_t row = 0; row < rows; ++row)
    weigh(tile, row, most(sight.first(row) - start, 0), least(sight.last(row) - start, count),
          args.softcap);
  if (!few) {
    widen_block(tile.values, tile.stride, values + skip, wide_values + skip, count - skip,
                args.head_dim);
    accumulate(tile, rows, wide_values, skip, count, args.head_dim);
  } else {
    accumulate(tile, rows, values, skip, count, args.head_dim);
  }
}

template <class T> INLINE void load_queries(const AttentionTask& task, const Tile& tile) {
  const AttentionArgs& args = *task.args;
  int64_t row = 0;
  for (int64_t token = task.first_token; token < task.last_token; ++token)
    for (int64_t head = task.first_head; head < task.last_head; ++head, ++row) {
      const T* q = (const T*)args.q + token * args.q_token_stride + head * args.q_head_stride;
      float* to = tile.q + row * tile.stride;
      for (int64_t i = 0; i < tile.stride; i += W) {
        int64_t left = args.head_dim - i;
        store(to + i, left > 0 ? mul(load_up_to(q + i, left), set1(args.scale)) : zero());
      }
    }
}

template <class T> static void attend(const AttentionTask& task, void* scratch) {
  const AttentionArgs& args = *task.args;
  Tile tile = tile_in(scratch, args.head_dim);
  int64_t group = task.last_head - task.first_head;
  int64_t rows = (task.last_token - task.first_token) * group;
  int64_t start = args.seq_lens[task.row] - args.query_start[task.row + 1];
  Sight sight = {start + task.first_token, group, args.window};
  load_queries<T>(task, tile);
  zero_floats(tile.out, rows * tile.stride);
  for (int64_t row = 0; row < rows; ++row) tile.out_maxima[row] = UNSEEN, tile.out_totals[row] = 0;
  int64_t first = task.first_key;
  while (first < task.last_key) {
    int64_t end = least((first / SPLIT + 1) * SPLIT, task.last_key);
    zero_floats(tile.sums, rows * tile.stride);
    for (int64_t row = 0; row < rows; ++row) tile.maxima[row] = UNSEEN, tile.totals[row] = 0;
    while (first < end) {
      int64_t last = least((first / KEYS + 1) * KEYS, end);
      attend_block<T>(task, tile, sight, rows, first, last);
      first = last;
    }
    for (int64_t row = 0; row < rows; ++row)
      fold_split(tile.out + row * tile.stride, tile.out_maxima + row, tile.out_totals + row,
                 tile.sums + row * tile.stride, tile.maxima[row], tile.totals[row], tile.stride);
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* sums = tile.out + row * tile.stride;
    if (task.partial) {
      float* to = task.partial + row * (tile.stride + 2);
      __builtin_memcpy(to, sums, tile.stride * sizeof(float));
      to[tile.stride] = tile.out_maxima[row];
      to[tile.stride + 1] = tile.out_totals[row];
    } else {
      write_output<T>(args, task.first_token + row / group, task.first_head + row % group, sums,
                      tile.out_maxima[row], tile.out_totals[row]);
    }
  }
}

static void attention(const AttentionTask& task, void* scratch) {
  with_type(task.args->dtype, [&](auto* type) {
    attend<typename pointee<decltype(type)>::type>(task, scratch);
  });
}

static void merge(const AttentionTask& task, const float* partials, int64_t splits,
                  void* scratch) {
  const AttentionArgs& args = *task.args;
  Tile tile = tile_in(scratch, args.head_dim);
  int64_t group = task.last_head - task.first_head, size = tile.stride + 2;
  for (int64_t row = 0; row < group; ++row) {
    float maximum = UNSEEN, total = 0.0f;
    zero_floats(tile.out, tile.stride);
    for (int64_t split = 0; split < splits; ++split) {
      const float* from = partials + (split * group + row) * size;
      fold_split(tile.out, &maximum, &total, from, from[tile.stride], from[tile.stride + 1],
                 tile.stride);
    }
    with_type(args.dtype, [&](auto* type) {
      write_output<typename pointee<decltype(type)>::type>(
          args, task.first_token, task.first_head + row, tile.out, maximum, total);
    });
  }
}
