// Paged attention with an online softmax in float32.
//
// A query's sums are computed block of keys by block and split by split. Blocks and splits start at
// multiples of their sizes, and a block without visible keys changes nothing. So a query's result
// has the same bits in a decode step, in any chunk of its prompt, and beside any other queries.
enum { COLUMNS = 4 };

// head_dim, padded so that loads of whole vectors stay within the scratch memory.
INLINE int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Queries, scores and sums of a tile. With few rows q is [rows, stride] and scores are [rows, KEYS];
// with many both are transposed, [dim, TILE] and [KEYS, TILE], so that a vector holds rows.
struct Tile {
  float *q, *scores, *sums, *maxima, *totals, *alphas;  // state of the current split
  float *out, *out_maxima, *out_totals;                 // merged result of the splits so far
  float *keys, *values;                                 // a block of keys in float32
  int64_t stride, rows;
  bool few() const { return rows <= 2 * ROWS; }
};

static int64_t attention_scratch(int64_t head_dim) {
  int64_t stride = padded_dim(head_dim);
  return (3 * TILE * stride + 2 * KEYS * stride + TILE * KEYS + 5 * TILE) * (int64_t)sizeof(float);
}

INLINE Tile tile_in(void* scratch, int64_t head_dim, int64_t rows) {
  Tile tile;
  tile.stride = padded_dim(head_dim);
  tile.rows = rows;
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
static void score(const Tile& tile, const T* const* keys, int64_t count, int64_t dim) {
  int64_t row = 0;
  for (; row + ROWS <= tile.rows; row += ROWS) score_rows<T, ROWS>(tile, row, keys, count, dim);
  for (; row + 2 <= tile.rows; row += 2) score_rows<T, 2>(tile, row, keys, count, dim);
  for (; row < tile.rows; ++row) score_rows<T, 1>(tile, row, keys, count, dim);
}

INLINE vf cap(vf score, float softcap) {
  if (softcap == 0.0f) return score;
  return mul(hyperbolic_tangent(div(score, set1(softcap))), set1(softcap));
}

// Turns a row's scores into weights, for keys [first, last) of a block; other keys get weight 0.
INLINE void weigh(const Tile& tile, int64_t row, int64_t first, int64_t last, float softcap) {
  float* scores = tile.scores + row * KEYS;
  if (first >= last) {
    zero_floats(scores, KEYS);
    tile.alphas[row] = 1.0f;
    return;
  }
  for (int i = 0; i < KEYS; i += W) store(scores + i, cap(load(scores + i), softcap));
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

// Sum of a vector's lanes, where lane(j) returns lane j of many vectors; has the bits of hsum.
template <int FIRST = 0, int COUNT = W == 16 ? 8 : W, class F> INLINE auto sum_lanes(F&& lane) {
  if constexpr (COUNT > 1)
    return add(sum_lanes<FIRST, COUNT / 2>(lane), sum_lanes<FIRST + COUNT / 2, COUNT / 2>(lane));
  else if constexpr (W == 16)
    return add(lane(FIRST), lane(FIRST + 8));
  else
    return lane(FIRST);
}

// Scores of M keys for R vectors of rows.
template <int M, int R> struct Scores { vf at[M][R]; };
template <int M, int R> INLINE Scores<M, R> add(const Scores<M, R>& a, const Scores<M, R>& b) {
  Scores<M, R> sum;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum.at[m][r] = add(a.at[m][r], b.at[m][r]);
  return sum;
}

template <int M, int R>
INLINE void score_keys(const Tile& tile, int64_t row, const float* const* keys, int64_t key,
                       int64_t dim, float softcap) {
  const float* own[M];
  for (int m = 0; m < M; ++m) own[m] = keys[key + m];
  Scores<M, R> scores = sum_lanes([&](int lane) {
    Scores<M, R> sums;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums.at[m][r] = zero();
    for (int64_t i = lane; i < dim; i += W) {
      vf queries[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) queries[r] = load(tile.q + i * TILE + row + r * W);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        vf value = set1(own[m][i]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums.at[m][r] = fma(queries[r], value, sums.at[m][r]);
      }
    }
    return sums;
  });
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r)
      store(tile.scores + (key + m) * TILE + row + r * W, cap(scores.at[m][r], softcap));
}

template <int M, int R>
static void score_vectors(const Tile& tile, int64_t row, const float* const* keys, int64_t count,
                          int64_t dim, float softcap) {
  int64_t key = 0;
  for (; key + M <= count; key += M) score_keys<M, R>(tile, row, keys, key, dim, softcap);
  for (; key < count; ++key) score_keys<1, R>(tile, row, keys, key, dim, softcap);
}

// The scores of `score` for many rows.
static void score_columns(const Tile& tile, const float* const* keys, int64_t count, int64_t dim,
                          float softcap) {
  enum { R = 3 };
  int64_t row = 0;
  for (; row + (R - 1) * W < tile.rows; row += R * W)
    score_vectors<4, R>(tile, row, keys, count, dim, softcap);
  for (; row < tile.rows; row += W) score_vectors<8, 1>(tile, row, keys, count, dim, softcap);
}

// Hides a row's keys outside of [first, last) from `weigh_columns`.
INLINE void hide(const Tile& tile, int64_t row, int64_t first, int64_t last) {
  for (int64_t key = 0; key < least(first, KEYS); ++key)
    tile.scores[key * TILE + row] = -__builtin_inff();
  for (int64_t key = most(last, 0); key < KEYS; ++key)
    tile.scores[key * TILE + row] = -__builtin_inff();
}

// The weights of `weigh` for many rows, whose hidden keys have the score minus infinity.
static void weigh_columns(const Tile& tile) {
  for (int64_t row = 0; row < tile.rows; row += W) {
    float* scores = tile.scores + row;
    vf before = load(tile.maxima + row), maximum = before;
    // Maxima of four keys at a time: a chain of 32 would wait for each one before.
    for (int key = 0; key < KEYS; key += 4) {
      const float* four = scores + key * TILE;
      vf low = vmax(load(four), load(four + TILE));
      vf high = vmax(load(four + 2 * TILE), load(four + 3 * TILE));
      maximum = vmax(maximum, vmax(low, high));
    }
    vf total = sum_lanes([&](int lane) {
      vf sum = zero();
      for (int key = lane; key < KEYS; key += W) {
        vf weight = bounded_exponential(sub(load(scores + key * TILE), maximum));
        store(scores + key * TILE, weight);
        sum = add(sum, weight);
      }
      return sum;
    });
    vf alpha = exponential(sub(before, maximum));
    store(tile.alphas + row, alpha);
    store(tile.maxima + row, maximum);
    store(tile.totals + row, add(mul(load(tile.totals + row), alpha), total));
  }
}

template <class T, int M, int C, bool FEW>
INLINE void accumulate_columns(const Tile& tile, int64_t row, int64_t column,
                               const T* const* values, int64_t first, int64_t last,
                               int64_t width) {
  const float* weight = tile.scores + row * (FEW ? KEYS : 1);
  vf sums[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    vf alpha = set1(tile.alphas[row + m]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      sums[m][c] = mul(load(tile.sums + (row + m) * tile.stride + column + c * W), alpha);
  }
  for (int64_t key = first; key < last; ++key) {
    const T* own = values[key] + column;
    vf weights[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
      weights[m] = set1(FEW ? weight[m * KEYS + key] : weight[key * TILE + m]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      // The barrier keeps GCC from loading all values of the key first, which would spill a sum.
      asm volatile("" ::: "memory");
      vf value = C == 1 ? load_up_to(own, width) : load(own + c * W);
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

template <class T, int M, bool FEW>
INLINE void accumulate_rows(const Tile& tile, int64_t row, const T* const* values, int64_t first,
                            int64_t last, int64_t dim) {
  int64_t column = 0;
  for (; column + COLUMNS * W <= dim; column += COLUMNS * W)
    accumulate_columns<T, M, COLUMNS, FEW>(tile, row, column, values, first, last, W);
  for (; column < dim; column += W)
    accumulate_columns<T, M, 1, FEW>(tile, row, column, values, first, last, dim - column);
}

// sums = sums * alpha + weights * values, over keys [first, last).
template <bool FEW, class T>
static void accumulate(const Tile& tile, const T* const* values, int64_t first, int64_t last,
                       int64_t dim) {
  int64_t row = 0;
  for (; row + ROWS <= tile.rows; row += ROWS)
    accumulate_rows<T, ROWS, FEW>(tile, row, values, first, last, dim);
  for (; row + 2 <= tile.rows; row += 2)
    accumulate_rows<T, 2, FEW>(tile, row, values, first, last, dim);
  for (; row < tile.rows; ++row)
    accumulate_rows<T, 1, FEW>(tile, row, values, first, last, dim);
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

// Prefetches to the first cache, or with LOCALITY 2 to the second.
template <int LOCALITY = 3, class T>
INLINE void prefetch_rows(const T* const* rows, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < dim; j += 64 / (int64_t)sizeof(T))
      __builtin_prefetch(rows[i] + j, 0, LOCALITY);
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
                         int64_t first, int64_t last) {
  const AttentionArgs& args = *task.args;
  const T *keys[KEYS], *values[KEYS];
  // The block starts at a multiple of KEYS, which may be before the window's first key.
  int64_t start = first / KEYS * KEYS, skip = first - start, count = last - start;
  find_block(args, task, first, last - first, keys + skip, values + skip);
  for (int64_t i = 0; i < skip; ++i) keys[i] = keys[skip];
  const T *next_keys[KEYS], *next_values[KEYS];
  int64_t next = least(KEYS, task.last_key - last);
  find_block(args, task, last, next, next_keys, next_values);
  auto first_of = [&](int64_t row) { return most(sight.first(row) - start, 0); };
  auto last_of = [&](int64_t row) { return least(sight.last(row) - start, count); };
  if (tile.few()) {
    // Few rows finish a block before the next has come from memory: prefetch it.
    prefetch_rows(values + skip, count - skip, args.head_dim);
    prefetch_rows(next_keys, next, args.head_dim);
    prefetch_rows(next_values, next, args.head_dim);
    score(tile, keys, count, args.head_dim);
    for (int64_t row = 0; row < tile.rows; ++row)
      weigh(tile, row, first_of(row), last_of(row), args.softcap);
    accumulate<true>(tile, values, skip, count, args.head_dim);
    return;
  }
  // The first cache is full of the current block's copy, so the next block goes to the second.
  prefetch_rows<2>(next_keys, next, args.head_dim);
  prefetch_rows<2>(next_values, next, args.head_dim);
  // Many rows read a block many times: copy it, because slots a multiple of 4 KiB apart evict one
  // another from the cache.
  const float *wide_keys[KEYS], *wide_values[KEYS];
  widen_block(tile.keys, tile.stride, keys, wide_keys, count, args.head_dim);
  score_columns(tile, wide_keys, count, args.head_dim, args.softcap);
  if (first_of(tile.rows - 1) > 0 || last_of(0) < KEYS)
    for (int64_t row = 0; row < tile.rows; ++row) hide(tile, row, first_of(row), last_of(row));
  weigh_columns(tile);
  widen_block(tile.values, tile.stride, values + skip, wide_values + skip, count - skip,
              args.head_dim);
  accumulate<false>(tile, wide_values, skip, count, args.head_dim);
}

template <class T> INLINE void load_queries(const AttentionTask& task, const Tile& tile) {
  const AttentionArgs& args = *task.args;
  int64_t row = 0;
  for (int64_t token = task.first_token; token < task.last_token; ++token)
    for (int64_t head = task.first_head; head < task.last_head; ++head, ++row) {
      const T* q = (const T*)args.q + token * args.q_token_stride + head * args.q_head_stride;
      if (!tile.few()) {
        for (int64_t i = 0; i < args.head_dim; ++i) tile.q[i * TILE + row] = widen(q[i]) * args.scale;
        continue;
      }
      float* to = tile.q + row * tile.stride;
      for (int64_t i = 0; i < tile.stride; i += W) {
        int64_t left = args.head_dim - i;
        store(to + i, left > 0 ? mul(load_up_to(q + i, left), set1(args.scale)) : zero());
      }
    }
}

template <class T> static void attend(const AttentionTask& task, void* scratch) {
  const AttentionArgs& args = *task.args;
  int64_t group = task.last_head - task.first_head;
  int64_t rows = (task.last_token - task.first_token) * group;
  Tile tile = tile_in(scratch, args.head_dim, rows);
  int64_t start = args.seq_lens[task.row] - args.query_start[task.row + 1];
  Sight sight = {start + task.first_token, group, args.window};
  if (!tile.few()) zero_floats(tile.q, TILE * args.head_dim);
  load_queries<T>(task, tile);
  zero_floats(tile.out, rows * tile.stride);
  for (int64_t row = 0; row < rows; ++row) tile.out_maxima[row] = UNSEEN, tile.out_totals[row] = 0;
  int64_t first = task.first_key;
  while (first < task.last_key) {
    int64_t end = least((first / SPLIT + 1) * SPLIT, task.last_key);
    zero_floats(tile.sums, rows * tile.stride);
    for (int64_t row = 0; row < TILE; ++row) tile.maxima[row] = UNSEEN, tile.totals[row] = 0;
    while (first < end) {
      int64_t last = least((first / KEYS + 1) * KEYS, end);
      attend_block<T>(task, tile, sight, first, last);
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
  int64_t group = task.last_head - task.first_head;
  Tile tile = tile_in(scratch, args.head_dim, group);
  int64_t size = tile.stride + 2;
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
