// Layers with a state of each sequence: rows against plain recurrences in double, and slots and
// tokens that are wrong.

// Rows of a step, each in a slot of its own.
struct Rows {
  int64_t slots = draw(1, 5), tokens = 0;
  std::vector<int64_t> lines, starts, query_start{0};

  Rows() {
    for (int64_t slot = 0; slot < slots; ++slot) lines.push_back(slot);
    std::shuffle(lines.begin(), lines.end(), engine);
    lines.resize(draw(0, slots));
    for (size_t row = 0; row < lines.size(); ++row) {
      starts.push_back(draw(0, 1) ? draw(1, 9) : 0);
      tokens += draw(0, 1) ? 1 : draw(1, 12);
      query_start.push_back(tokens);
    }
  }
  StateRows args() {
    return {lines.data(), starts.data(), query_start.data(), int64_t(lines.size()), tokens, slots};
  }
  // Calls f with rows of which one thing is wrong, and expects what it is.
  template <class F> void damage(F&& f, const char* op) {
    if (lines.empty()) return;
    size_t row = size_t(draw(0, int64_t(lines.size()) - 1));
    auto wrong = [&](int64_t* at, int64_t value, int32_t status) {
      std::swap(*at, value);
      if (f(args()) != status) fail(std::string(op) + ": wrong rows");
      std::swap(*at, value);
    };
    wrong(&lines[row], draw(0, 1) ? slots : -1, STATUS_INDEX);
    wrong(&starts[row], -1, STATUS_INDEX);
    wrong(&query_start[row + 1], tokens + 1, STATUS_INVALID);
    wrong(&query_start[0], 1, STATUS_INVALID);
    wrong(&tokens, tokens + 1, STATUS_INVALID);
  }
};

inline double silu(double x) { return x / (1 + exp(-x)); }

void causal_conv(Context* context, int32_t dtype) {
  Rows rows;
  int64_t channels = draw(1, 1200), width = draw(2, 5), stride = channels + draw(0, 3);
  Array x(dtype, rows.tokens ? (rows.tokens - 1) * stride + channels : 0);
  Array state(dtype, rows.slots * (width - 1) * channels), out(dtype, rows.tokens * channels);
  std::unique_ptr<float[]> weight(new float[width * channels]);
  for (int64_t i = 0; i < width * channels; ++i) weight[i] = float(normal());
  std::vector<double> before;
  for (int64_t i = 0; i < state.count; ++i) before.push_back(state.get(i));
  ConvArgs args = {rows.args(), x.at(), stride, weight.get(), state.at(),
                   out.at(),    channels, width, dtype};
  expect_ok(asyncllm_causal_conv(context, &args), "causal_conv");
  for (size_t row = 0; row < rows.lines.size(); ++row) {
    int64_t first = rows.query_start[row], count = rows.query_start[row + 1] - first;
    int64_t own = rows.lines[row] * (width - 1) * channels;
    auto input = [&](int64_t token, int64_t channel) {
      if (token >= 0) return x.get((first + token) * stride + channel);
      return rows.starts[row] ? before[own + (width - 1 + token) * channels + channel] : 0.0;
    };
    for (int64_t channel = 0; channel < channels; ++channel) {
      for (int64_t token = 0; token < count; ++token) {
        double sum = 0;
        for (int64_t i = 0; i < width; ++i)
          sum += input(token - width + 1 + i, channel) * weight[i * channels + channel];
        expect(out, (first + token) * channels + channel, silu(sum), "causal_conv",
               dtype == DTYPE_F32 ? 1e-5 : 0.05);
      }
      for (int64_t i = 0; i < width - 1; ++i)
        if (state.get(own + i * channels + channel) != input(count - width + 1 + i, channel))
          fail("causal_conv: state");
    }
  }
  rows.damage([&](StateRows wrong) {
    args.rows = wrong;
    return asyncllm_causal_conv(context, &args);
  }, "causal_conv");
}

void gated_delta(Context* context, int32_t dtype) {
  Rows rows;
  int64_t key_heads = draw(1, 3), group = draw(1, 3), heads = key_heads * group;
  int64_t keys = draw(1, 40), values = draw(1, 80), size = key_heads * keys;
  int64_t width = 2 * size + heads * values, stride = width + draw(0, 3);
  int64_t gates_stride = 2 * heads + draw(0, 3);
  auto needed = [&](int64_t columns, int64_t step) {
    return rows.tokens ? (rows.tokens - 1) * step + columns : 0;
  };
  Array qkv(dtype, needed(width, stride)), gates(dtype, needed(2 * heads, gates_stride));
  Array out(dtype, rows.tokens * heads * values);
  std::unique_ptr<float[]> biases(new float[heads]), rates(new float[heads]);
  for (int64_t i = 0; i < heads; ++i) biases[i] = float(normal()), rates[i] = float(normal());
  int64_t matrix = keys * values, held = rows.slots * heads * matrix;
  std::unique_ptr<float[]> state(new float[held]);
  std::vector<double> exact;
  for (int64_t i = 0; i < held; ++i) exact.push_back(state[i] = float(normal()));
  DeltaArgs args = {rows.args(), qkv.at(), stride, gates.at(), gates_stride, biases.get(),
                    rates.get(), state.get(), out.at(), key_heads, heads, keys, values, dtype};
  expect_ok(asyncllm_gated_delta(context, &args), "gated_delta");
  for (size_t row = 0; row < rows.lines.size(); ++row)
    for (int64_t head = 0; head < heads; ++head) {
      double* own = exact.data() + (rows.lines[row] * heads + head) * matrix;
      if (!rows.starts[row]) std::fill(own, own + matrix, 0.0);
      for (int64_t token = rows.query_start[row]; token < rows.query_start[row + 1]; ++token) {
        auto part = [&](int64_t at) {
          std::vector<double> found(keys);
          double squares = 1e-6;
          for (int64_t i = 0; i < keys; ++i) {
            found[i] = qkv.get(token * stride + at + head / group * keys + i);
            squares += found[i] * found[i];
          }
          for (double& each : found) each /= sqrt(squares);
          return found;
        };
        std::vector<double> q = part(0), k = part(size);
        double beta = 1 / (1 + exp(-gates.get(token * gates_stride + head)));
        double logit = gates.get(token * gates_stride + heads + head) + biases[head];
        double decay = exp(-exp(double(rates[head])) * log1p(exp(logit)));
        for (int64_t j = 0; j < values; ++j) {
          double known = 0, sum = 0;
          for (int64_t i = 0; i < keys; ++i) known += (own[i * values + j] *= decay) * k[i];
          double v = qkv.get(token * stride + 2 * size + head * values + j);
          for (int64_t i = 0; i < keys; ++i)
            sum += (own[i * values + j] += k[i] * (v - known) * beta) * q[i];
          expect(out, (token * heads + head) * values + j, sum / sqrt(double(keys)), "gated_delta",
                 1e-4);
        }
      }
    }
  for (int64_t i = 0; i < held; ++i) {
    note(state[i]);
    if (!(fabs(state[i] - exact[i]) <= 1e-4 * (1 + fabs(exact[i])))) fail("gated_delta: state");
  }
  rows.damage([&](StateRows wrong) {
    args.rows = wrong;
    return asyncllm_gated_delta(context, &args);
  }, "gated_delta");
}

void gates(Context* context, int32_t dtype) {
  int64_t heads = draw(1, 4), size = draw(1, 40), width = heads * size, rows = draw(0, 9);
  int64_t stride = width + draw(0, 3), last = rows ? (rows - 1) * stride + width : 0;
  Array x(dtype, last), gate(dtype, last), weight(dtype, size), out(dtype, rows * width);
  GatedNormArgs norm = {x.at(), stride, gate.at(), stride, weight.at(), out.at(),
                        heads, size, 1e-5f, dtype};
  expect_ok(asyncllm_gated_norm(context, &norm, rows), "gated_norm");
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < heads; ++head) {
      double squares = 0;
      for (int64_t i = 0; i < size; ++i)
        squares += pow(x.get(row * stride + head * size + i), 2) / double(size);
      for (int64_t i = 0; i < size; ++i) {
        int64_t at = row * stride + head * size + i;
        expect(out, row * width + head * size + i,
               x.get(at) / sqrt(squares + 1e-5) * weight.get(i) * silu(gate.get(at)), "gated_norm",
               dtype == DTYPE_F32 ? 1e-5 : 0.05);
      }
    }
  SigmoidMulArgs multiply = {x.at(), stride, gate.at(), stride, out.at(), width, dtype};
  expect_ok(asyncllm_sigmoid_mul(context, &multiply, rows), "sigmoid_mul");
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < width; ++i)
      expect(out, row * width + i,
             x.get(row * stride + i) / (1 + exp(-gate.get(row * stride + i))), "sigmoid_mul");
  if (!rows) return;
  multiply.x_stride = norm.gate_stride = width - 1;
  if (rows > 1 && (asyncllm_gated_norm(context, &norm, rows) != STATUS_INVALID ||
                   asyncllm_sigmoid_mul(context, &multiply, rows) != STATUS_INVALID))
    fail("gates: strides");
}
