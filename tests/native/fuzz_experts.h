// Routing against a plain one, experts against sums in double, and ids beyond the experts.

void routing(Context* context, int32_t dtype) {
  int64_t groups = draw(1, 4), size = draw(groups > 1 ? 2 : 1, 9), count = groups * size;
  int64_t rows = draw(0, 20), stride = count + draw(0, 3), top_groups = draw(1, groups);
  int64_t top_k = draw(1, size * top_groups);
  Array logits(dtype, rows ? (rows - 1) * stride + count : 0);
  std::unique_ptr<float[]> correction(new float[count]), weights(new float[rows * top_k]);
  std::unique_ptr<int32_t[]> ids(new int32_t[rows * top_k]);
  std::unique_ptr<float[]> factors(new float[count]);
  for (int64_t i = 0; i < count; ++i)
    correction[i] = float(normal()), factors[i] = float(draw(1, 9)) / 4;
  if (rows && draw(0, 3) == 0) logits.set(0, draw(0, 1) ? NAN : INFINITY);
  RoutingArgs args = {logits.at(), stride, count, top_k, groups, top_groups,
                      draw(0, 1) ? correction.get() : nullptr, 1.5f, 1e-20f,
                      draw(0, 1) ? factors.get() : nullptr,
                      int32_t(draw(0, 1)), int32_t(draw(0, 1)), ids.get(), weights.get(), dtype};
  expect_ok(asyncllm_routing(context, &args, rows), "routing");
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<double> scores(count);
    double largest = -INFINITY, total = 0, sum = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, logits.get(row * stride + i));
    for (int64_t i = 0; i < count; ++i) {
      double logit = logits.get(row * stride + i);
      scores[i] = args.sigmoid ? 1 / (1 + exp(-logit)) : exp(logit - largest);
      total += scores[i];
    }
    bool finite = isfinite(total);
    std::vector<bool> seen(count), seen_groups(groups);
    int64_t num_groups = 0;
    for (int64_t i = 0; i < top_k; ++i) {
      int64_t id = ids[row * top_k + i];
      if (id < 0 || id >= count || seen[id]) fail("routing: ids");
      seen[id] = true;
      num_groups += !seen_groups[id / size];
      seen_groups[id / size] = true;
      sum += scores[id] / (args.sigmoid ? 1 : total);
    }
    if (num_groups > top_groups) fail("routing: groups");
    for (int64_t i = 0; finite && i < top_k; ++i) {
      double score = scores[ids[row * top_k + i]] / (args.sigmoid ? 1 : total);
      double wanted = 1.5 * (args.renormalise ? score / sum : score);
      if (args.expert_scale) wanted *= factors[ids[row * top_k + i]];
      note(weights[row * top_k + i]);
      if (!(fabs(weights[row * top_k + i] - wanted) < 1e-5 * (1 + wanted))) fail("routing: weights");
    }
  }
  args.top_k = size * top_groups + 1;
  if (asyncllm_routing(context, &args, rows) != STATUS_INVALID) fail("routing: too many");
}

// The packed layers of some experts, and their weights.
struct Stack {
  int64_t n, k;
  std::vector<Array> values;
  std::vector<Integers> integers;
  std::vector<std::vector<float>> biases;
  std::vector<Weights*> packed;
  bool quantised, spanned;

  Stack(Context* context, int32_t dtype, int64_t count, int64_t n, int64_t k, bool quantised,
        bool biased)
      : n(n), k(k), quantised(quantised), spanned(quantised && rounds_int8_in_spans(context)) {
    for (int64_t e = 0; e < count; ++e) {
      values.emplace_back(dtype, n * k, 1 / sqrt(double(k)));
      integers.emplace_back(n, n * k);
      for (int64_t i = 0; i < n; ++i) integers[e].scales[i] /= float(k);
      biases.emplace_back(n);
      for (float& bias : biases[e]) bias = biased ? float(normal()) : 0;
      packed.push_back(asyncllm_pack(
          context, quantised ? (void*)integers[e].values.get() : values[e].at(),
          quantised ? int32_t(DTYPE_I8) : dtype, n, k, k,
          quantised ? integers[e].scales.get() : nullptr, biased ? biases[e].data() : nullptr));
      if (!packed.back()) fail("pack");
    }
  }
  ~Stack() {
    for (Weights* each : packed) asyncllm_free_weights(each);
  }
  // The form in which `row` takes the inputs.
  std::vector<double> inputs(const std::vector<double>& x) const {
    return spanned ? rounded_in_spans(x) : x;
  }
  double row(int64_t e, int64_t i, const std::vector<double>& x) const {
    double sum = biases[e][i];
    for (int64_t j = 0; j < k; ++j)
      sum += x[j] * (quantised ? double(integers[e].values[i * k + j]) * integers[e].scales[i]
                               : values[e].get(i * k + j));
    return sum;
  }
};

void experts(Context* context, int32_t dtype) {
  int64_t count = draw(1, 6), top_k = draw(1, count), width = draw(1, 50), inner = draw(1, 40);
  int64_t rows = draw(0, 60), stride = width + draw(0, 3);
  bool quantised = draw(0, 1), biased = draw(0, 1), shares = draw(0, 1), gated = draw(0, 1);
  Stack gate_up(context, dtype, count, 2 * inner, width, quantised, biased);
  Stack down(context, dtype, count, width, inner, quantised, biased);
  int64_t last = rows ? (rows - 1) * stride + width : 0;
  Array x(dtype, last), shared(dtype, last), gates(dtype, rows), out(dtype, rows * width);
  std::unique_ptr<int32_t[]> ids(new int32_t[rows * top_k]);
  std::unique_ptr<float[]> weights(new float[rows * top_k]);
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<int32_t> order;
    for (int32_t e = 0; e < count; ++e) order.push_back(e);
    std::shuffle(order.begin(), order.end(), engine);
    std::copy(order.begin(), order.begin() + top_k, ids.get() + row * top_k);
  }
  for (int64_t i = 0; i < rows * top_k; ++i) weights[i] = float(draw(0, 100)) / 100;
  ExpertsArgs args = {gate_up.packed.data(), down.packed.data(), x.at(), stride, ids.get(),
                      weights.get(), shares ? shared.at() : nullptr, stride,
                      shares && gated ? gates.at() : nullptr, 1, out.at(), count, top_k, width,
                      inner, 1.7f, draw(0, 1) ? 1.0f : 0.0f, dtype};
  expect_ok(asyncllm_experts(context, &args, rows), "experts");
  // Rounded behind each product and the activation.
  double more = dtype == DTYPE_F32 ? (quantised ? 4e-3 : 1e-5) : 0.1;
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<double> input(width), sums(width), middle(inner);
    for (int64_t i = 0; i < width; ++i) input[i] = x.get(row * stride + i);
    input = gate_up.inputs(input);
    for (int64_t place = row * top_k; place < (row + 1) * top_k; ++place) {
      int64_t e = ids[place];
      for (int64_t i = 0; i < inner; ++i) {
        double gate = gate_up.row(e, i, input), up = gate_up.row(e, inner + i, input);
        if (args.limit > 0) {
          gate = std::min(gate, 1.0), up = std::max(-1.0, std::min(up, 1.0)) + 1;
          middle[i] = up * gate / (1 + exp(-1.7 * gate));
        } else {
          middle[i] = up * gate / (1 + exp(-gate));
        }
      }
      std::vector<double> found = down.inputs(middle);
      for (int64_t i = 0; i < width; ++i) sums[i] += weights[place] * down.row(e, i, found);
    }
    double factor = args.gate ? 1 / (1 + exp(-gates.get(row))) : shares ? 1 : 0;
    for (int64_t i = 0; i < width; ++i)
      expect(out, row * width + i, sums[i] + factor * shared.get(row * stride + i), "experts",
             more);
  }
  if (!rows) return;
  ids[draw(0, rows * top_k - 1)] = draw(0, 1) ? int32_t(count) : -1;
  if (asyncllm_experts(context, &args, rows) != STATUS_INDEX) fail("experts: ids");
}
