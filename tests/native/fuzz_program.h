// Runs programs of one layer: rows together and alone, whose results are the same bits, and with
// an index or a size that is wrong, which is an error.

struct Layer {
  int64_t kv_heads = draw(1, 2), heads = kv_heads * draw(1, 3), dim = 2 * draw(1, 12);
  int64_t hidden = draw(1, 40), inner = draw(1, 50), vocab = draw(2, 70);
  int64_t most_rows = draw(1, 4), most_tokens = draw(most_rows, 30), lines = most_rows + 1;
  int64_t length = draw(1, 40), width = (heads + 2 * kv_heads) * dim;
  int32_t dtype;
  Cache cache;
  bool tied = draw(0, 1), normed = draw(0, 1);
  int64_t table_width = (length + cache.block_size - 1) / cache.block_size;
  Array table, rope, x, residual, normed_x, qkv, mixed, o, picked, rest, wide, mlp, last, logits;
  Array weight, q_norm, embedding;
  std::vector<int32_t> token_table, blocks;
  std::vector<int64_t> row_lines, starts, counts, wanted, ids, positions, slots, query_start;
  std::vector<int32_t> lens;
  std::vector<int64_t> largest;
  std::vector<Weights*> packed;
  std::vector<Op> ops;
  Program program = {};

  Layer(Context* context, int32_t dtype)
      : dtype(dtype), cache(dtype, kv_heads, dim), table(dtype, vocab * hidden),
        rope(dtype, length * dim), x(dtype, most_tokens * hidden),
        residual(dtype, most_tokens * hidden), normed_x(dtype, most_tokens * hidden),
        qkv(dtype, most_tokens * width), mixed(dtype, most_tokens * heads * dim),
        o(dtype, most_tokens * hidden), picked(dtype, most_tokens * heads * dim),
        rest(dtype, most_tokens * hidden), wide(dtype, most_tokens * 2 * inner),
        mlp(dtype, most_tokens * inner), last(dtype, most_tokens * hidden),
        logits(dtype, most_rows * vocab), weight(dtype, hidden), q_norm(dtype, dim),
        embedding(dtype, vocab * hidden), row_lines(most_rows), starts(most_rows),
        counts(most_rows), wanted(most_tokens), ids(most_tokens), positions(most_tokens),
        slots(most_tokens), query_start(most_rows + 1), lens(most_rows), largest(most_rows) {
    for (int64_t i = 0; i < lines * length; ++i)
      token_table.push_back(int32_t(draw(0, vocab - 1)));
    // A block has one owner; there may be fewer than the lines could take.
    for (int64_t i = 0; i < lines * table_width; ++i) blocks.push_back(int32_t(i % cache.blocks));
    for (auto [n, k] : {std::pair{vocab, hidden}, {width, hidden}, {hidden, heads * dim},
                        {2 * inner, hidden}, {hidden, inner}}) {
      Array values(dtype, n * k, 1 / sqrt(double(k)));
      packed.push_back(asyncllm_pack(context, values.at(), dtype, n, k, k, nullptr, nullptr));
      if (!packed.back()) fail("pack");
    }
    write();
  }
  ~Layer() {
    for (Weights* each : packed) asyncllm_free_weights(each);
  }

  Op& add(int32_t kind, int32_t size) {
    ops.push_back({});
    ops.back().kind = kind, ops.back().size = size, ops.back().x_size = -1;
    return ops.back();
  }
  void linear(int which, Array& from, int64_t k, Array& to, int64_t n, int32_t size) {
    add(OP_LINEAR, size).args.linear = {packed[which], from.at(), k, to.at(), n, dtype};
  }
  void norm(Array& from, Array* more, Array& to, int32_t size) {
    add(OP_RMS_NORM, size).args.norm = {from.at(), hidden, more ? more->at() : nullptr, hidden,
                                        weight.at(), to.at(), hidden, 1, 1e-5f, 1, 1, dtype,
                                        dtype};
  }
  void select(Array& from, int64_t columns, Array& to) {
    Op& op = add(OP_SELECT, SIZE_WANTED);
    op.x_size = SIZE_TOKENS;
    op.args.select = {from.at(), columns, 0, wanted.data(), to.at(), columns, 1, dtype};
  }

  void write() {
    add(OP_TOKENS, SIZE_TOKENS).args.tokens = {
        row_lines.data(), starts.data(), counts.data(), token_table.data(), lines, length,
        ids.data(), positions.data(), query_start.data(), lens.data()};
    add(OP_SLOTS, SIZE_TOKENS).args.slots = {row_lines.data(), starts.data(), counts.data(),
                                             blocks.data(), lines, table_width, cache.block_size,
                                             slots.data()};
    if (tied)
      add(OP_GATHER, SIZE_TOKENS).args.gather = {packed[0], ids.data(), residual.at(), 1, dtype};
    else
      add(OP_SELECT, SIZE_TOKENS).args.select = {table.at(),    hidden, vocab, ids.data(),
                                                 residual.at(), hidden, 1, dtype};
    norm(residual, nullptr, normed_x, SIZE_TOKENS);
    linear(1, normed_x, hidden, qkv, width, SIZE_TOKENS);
    RopeArgs& turn = add(OP_ROPE_AND_CACHE, SIZE_TOKENS).args.rope;
    turn.qkv = qkv.at(), turn.token_stride = width, turn.table = rope.at();
    turn.table_rows = length, turn.positions = positions.data(), turn.slots = slots.data();
    turn.q_norm = turn.k_norm = normed ? q_norm.at() : nullptr, turn.eps = 1e-5f;
    turn.cache = cache.values.at(), turn.kv_stride = cache.kv_stride;
    turn.block_stride = cache.block_stride, turn.slot_stride = cache.slot_stride;
    turn.head_stride = cache.head_stride, turn.heads = heads, turn.kv_heads = kv_heads;
    turn.head_dim = dim, turn.num_blocks = cache.blocks, turn.block_size = cache.block_size;
    turn.dtype = turn.norm_dtype = dtype, turn.table_width = dim;
    program.num_writing_ops = int64_t(ops.size());
    AttentionArgs& see = add(OP_ATTENTION, SIZE_TOKENS).args.attention;
    see.q = qkv.at(), see.q_token_stride = width, see.q_head_stride = dim;
    see.cache = cache.values.at(), see.kv_stride = cache.kv_stride;
    see.block_stride = cache.block_stride, see.slot_stride = cache.slot_stride;
    see.head_stride = cache.head_stride, see.out = mixed.at(), see.block_table = blocks.data();
    see.table_stride = see.table_width = table_width, see.query_start = query_start.data();
    see.seq_lens = lens.data(), see.lines = row_lines.data(), see.table_lines = lines;
    see.heads = heads, see.kv_heads = kv_heads, see.head_dim = dim;
    see.num_blocks = cache.blocks, see.block_size = cache.block_size;
    see.window = draw(0, 1) ? draw(1, 20) : 0, see.scale = 1 / sqrtf(float(dim)), see.dtype = dtype;
    select(mixed, heads * dim, picked);
    select(residual, hidden, rest);
    linear(2, picked, heads * dim, o, hidden, SIZE_WANTED);
    norm(o, &rest, normed_x, SIZE_WANTED);
    linear(3, normed_x, hidden, wide, 2 * inner, SIZE_WANTED);
    add(OP_GATED_MUL, SIZE_WANTED).args.gated = {
        wide.at(), 2 * inner, wide.at(inner), 2 * inner, mlp.at(), inner, dtype,
        int32_t(draw(0, 1))};
    linear(4, mlp, inner, o, hidden, SIZE_WANTED);
    norm(o, &rest, last, SIZE_WANTED);
    linear(0, last, hidden, logits, vocab, SIZE_SAMPLED);
    add(OP_ARGMAX, SIZE_GREEDY).args.argmax = {packed[0], last.at(), hidden, largest.data(), dtype};
    program.ops = ops.data(), program.num_ops = int64_t(ops.size()), program.op_bytes = sizeof(Op);
    int64_t rooms[] = {most_rows, most_tokens, most_tokens, most_rows, most_rows};
    for (int i = 0; i < NUM_SIZES; ++i) program.capacity[i] = rooms[i];
  }

  int32_t run(Context* context, int64_t rows, int64_t tokens, int64_t sampled, int64_t* failed) {
    int64_t sizes[NUM_SIZES] = {rows, tokens, sampled, sampled, 0};
    return asyncllm_run(context, &program, sizes, failed);
  }
};

// The same rows as a job that takes the largest of `logits` [rows, vocab], and leaves each where the
// next step would read it, if there is room.
void job(Context* context, Layer& layer, int64_t rows, int64_t tokens,
         const std::vector<double>& logits) {
  std::vector<int64_t> counts = layer.counts, found(rows), positions(rows);
  std::vector<int32_t> before = layer.token_table;
  bool fits = true;
  for (int64_t row = 0; row < rows; ++row) {
    positions[row] = layer.starts[row] + counts[row] - 1;
    fits &= positions[row] + 1 < layer.length;
  }
  Job job = {};
  job.program = &layer.program;
  int64_t sizes[NUM_SIZES] = {rows, tokens, rows, 0, rows};
  for (int i = 0; i < NUM_SIZES; ++i) job.sizes[i] = sizes[i];
  layer.counts.assign(counts.size(), -1);
  job.to = layer.counts.data(), job.from = counts.data();
  job.bytes = rows * int64_t(sizeof(int64_t));
  job.greedy = layer.largest.data(), job.num_tokens = rows, job.tokens = found.data();
  job.lines = layer.row_lines.data(), job.positions = positions.data();
  job.table = layer.token_table.data(), job.table_lines = layer.lines;
  job.table_width = layer.length;
  expect_ok(asyncllm_submit(context, &job), "submit");
  int32_t status = asyncllm_wait(context, &job);
  layer.counts = counts;
  if (status != (fits ? STATUS_OK : STATUS_INDEX)) fail("status of a job");
  for (int64_t row = 0; row < rows && fits; ++row) {
    int64_t best = 0;
    for (int64_t i = 1; i < layer.vocab; ++i)
      if (logits[row * layer.vocab + i] > logits[row * layer.vocab + best]) best = i;
    if (found[row] != best) fail("a job's token");
    int64_t at = layer.row_lines[row] * layer.length + positions[row] + 1;
    if (layer.token_table[at] != best) fail("where a job's token lies");
  }
  layer.token_table.assign(before.begin(), before.end());
  job.num_tokens = -1;
  if (asyncllm_submit(context, &job) != STATUS_INVALID) fail("a wrong job is not noticed");
}

// What is wrong with a step, if its rows have tokens.
void spoil(Layer& layer, int64_t rows, int64_t* tokens, int64_t* sampled) {
  int64_t row = draw(0, rows - 1), huge = draw(0, 1) ? INT64_MAX : INT64_MIN;
  int64_t line = layer.row_lines[row], at = layer.starts[row];
  switch (draw(0, 9)) {
    case 0: layer.row_lines[row] = draw(0, 1) ? layer.lines : -1; break;
    case 1: layer.starts[row] = draw(0, 1) ? layer.length : -1; break;
    case 2: layer.starts[row] = huge; break;
    case 3: layer.counts[row] = huge; break;
    case 4:
      layer.token_table[line * layer.length + at] = int32_t(draw(0, 1) ? layer.vocab : -1);
      break;
    case 5:
      layer.blocks[line * layer.table_width + at / layer.cache.block_size] =
          draw(0, 1) ? int32_t(layer.cache.blocks) : INT32_MIN;
      break;
    case 6: *tokens += draw(0, 1) ? 1 : -1; break;
    case 7: *sampled = 1, layer.wanted[0] = draw(0, 1) ? *tokens : -1; break;
    case 8: *sampled = *tokens + 1; break;
    case 9: *tokens = huge; break;
  }
}

void program(Context* context, int32_t dtype) {
  Layer layer(context, dtype);
  int64_t rows = draw(1, layer.most_rows), left = layer.most_tokens, tokens = 0, failed;
  // Rows own their blocks, or are one.
  if (layer.lines * layer.table_width > layer.cache.blocks) rows = 1;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t most = left - (rows - row - 1);
    int64_t count = draw(1, most < layer.length ? most : layer.length);
    layer.row_lines[row] = row + draw(0, 1) * (row == rows - 1), layer.counts[row] = count;
    layer.starts[row] = draw(0, layer.length - count), left -= count, tokens += count;
    layer.wanted[row] = tokens - 1;
  }
  layer.cache.values.fill_nan();
  for (int64_t i = 0; i < layer.cache.values.count; ++i) layer.cache.values.set(i, 0.25);
  expect_ok(layer.run(context, rows, tokens, rows, &failed), "program");
  std::vector<double> together;
  for (int64_t i = 0; i < rows * layer.vocab; ++i) together.push_back(layer.logits.get(i));
  job(context, layer, rows, tokens, together);
  std::vector<int64_t> all[] = {layer.row_lines, layer.starts, layer.counts};
  for (int64_t row = 0; row < rows; ++row) {
    layer.row_lines[0] = all[0][row], layer.starts[0] = all[1][row], layer.counts[0] = all[2][row];
    layer.wanted[0] = all[2][row] - 1;
    expect_ok(layer.run(context, 1, all[2][row], 0, &failed), "program without samples");
    expect_ok(layer.run(context, 1, all[2][row], 1, &failed), "program of a row");
    for (int64_t i = 0; i < layer.vocab; ++i)
      if (layer.logits.get(i) != together[row * layer.vocab + i]) fail("a row depends on company");
  }
  layer.row_lines = all[0], layer.starts = all[1], layer.counts = all[2];
  int64_t sampled = draw(0, 1);
  spoil(layer, rows, &tokens, &sampled);
  if (!layer.run(context, rows, tokens, sampled, &failed)) fail("a wrong step is not noticed");
  layer.program.op_bytes -= 8;
  if (layer.run(context, 1, 1, 0, &failed) != STATUS_INVALID) fail("another layout of ops");
}
