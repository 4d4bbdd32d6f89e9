// Weights in groups of inputs, and in blocks of GGUF, for fuzz.cpp.

// Weights and bytes of a block, as ggml-common.h has them.
struct BlockSize {
  int64_t elements, bytes;
};
inline BlockSize block_size(int32_t type) {
  static const BlockSize SIZES[] = {{32, 20},   {32, 22},   {32, 24}, {256, 144},
                                    {256, 176}, {256, 210}, {32, 18}};
  return SIZES[type - DTYPE_Q4_1];
}

// Weight j of a block, as dequantize_row_* of ggml-quants.c has it.
inline double block_weight(int32_t type, const uint8_t* block, int64_t j) {
  auto half = [&](int at) { return widen_f16(uint16_t(block[at] | block[at + 1] << 8)); };
  if (type == DTYPE_Q6_K) {
    int64_t in = j % 128, low = j / 128 * 64 + in % 64, high = 128 + j / 128 * 32 + in % 32;
    int code = (block[low] >> in / 64 * 4 & 15) | (block[high] >> in / 32 * 2 & 3) << 4;
    return half(208) * int8_t(block[192 + j / 16]) * (code - 32);
  }
  if (type == DTYPE_Q4_K || type == DTYPE_Q5_K) {
    const uint8_t* scales = block + 4;
    int64_t span = j / 32, lane = j % 32;
    const uint8_t* low = block + (type == DTYPE_Q4_K ? 16 : 48) + span / 2 * 32;
    int code = low[lane] >> span % 2 * 4 & 15;
    if (type == DTYPE_Q5_K) code += (block[16 + lane] >> span & 1) * 16;
    int scale = scales[span] & 63, minimum = scales[span + 4] & 63;
    if (span >= 4) {
      scale = (scales[span + 4] & 15) | scales[span - 4] >> 6 << 4;
      minimum = scales[span + 4] >> 4 | scales[span] >> 6 << 4;
    }
    return half(0) * scale * code - half(2) * minimum;
  }
  bool above = type == DTYPE_Q4_1 || type == DTYPE_Q5_1;
  bool five = type == DTYPE_Q5_0 || type == DTYPE_Q5_1;
  int at = above ? 4 : 2;
  int code = block[at + five * 4 + j % 16] >> j / 16 * 4 & 15;
  if (five) code += (block[at + j / 8] >> j % 8 & 1) * 16;
  static const int VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};
  if (type == DTYPE_IQ4_NL) return half(0) * VALUES[code];
  return above ? half(0) * code + half(2) : half(0) * (code - 16);
}

// Codes with scales and zero points, each array to its last byte.
struct Codes {
  int64_t n, k, group, groups, row_bytes;
  int32_t type;
  Array scales;
  std::unique_ptr<uint8_t[]> values, zeros;

  bool is_block() const { return type >= DTYPE_Q4_1; }

  explicit Codes(int64_t n)
      : n(n),
        k(draw(1, 300)),
        group(SPAN * draw(1, 4)),
        groups((k + group - 1) / group),
        row_bytes(0),
        type(int32_t(draw(0, 1) ? draw(DTYPE_U4, DTYPE_U8) : draw(DTYPE_Q4_1, DTYPE_IQ4_NL))),
        scales(int32_t(draw(DTYPE_F32, DTYPE_F16)), n * groups, 0.1) {
    int64_t used = type == DTYPE_U4 ? (k + 1) / 2 : k;
    if (is_block()) {
      scales.dtype = DTYPE_F16;
      group = block_size(type).elements;
      groups = draw(1, 640 / group);
      k = groups * group;
      used = groups * block_size(type).bytes;
    }
    row_bytes = used + draw(0, 3);
    int64_t count = (n - 1) * row_bytes + used;
    values.reset(new uint8_t[count]);
    for (int64_t i = 0; i < count; ++i) values[i] = uint8_t(draw(0, 255));
    if (is_block()) {
      // Scales and minima are about 2^-5, or 2^-11 where a byte multiplies them, so that outputs
      // are not beyond float16.
      int exponent = group == SPAN ? 0x28 : 0x10;
      for (int64_t i = 0; i < n * groups; ++i) {
        uint8_t* block = values.get() + i / groups * row_bytes;
        block += i % groups * block_size(type).bytes;
        if (type == DTYPE_Q6_K) block += 208;
        bool has_minimum = type == DTYPE_Q4_1 || type == DTYPE_Q5_1 || type == DTYPE_Q4_K ||
                           type == DTYPE_Q5_K;
        block[1] = uint8_t((block[1] & 0x83) | exponent);
        if (has_minimum) block[3] = uint8_t((block[3] & 0x83) | exponent);
      }
    } else if (draw(0, 1)) {
      zeros.reset(new uint8_t[n * groups]);
      for (int64_t i = 0; i < n * groups; ++i) zeros[i] = uint8_t(draw(0, 255));
    }
  }
  double get(int64_t i, int64_t j) const {
    const uint8_t* row = values.get() + i * row_bytes;
    if (is_block())
      return block_weight(type, row + j / group * block_size(type).bytes, j % group);
    int code = type == DTYPE_U4 ? row[j / 2] >> j % 2 * 4 & 15 : row[j];
    int64_t at = i * groups + j / group;
    int zero = zeros ? zeros[at] : type == DTYPE_U4 ? 8 : 128;
    return (code - zero) * scales.get(at);
  }
};

void grouped(Context* context, int32_t dtype) {
  Codes codes(draw(1, 150));
  int64_t n = codes.n, k = codes.k, m = draw(0, 20);
  int64_t x_stride = k + draw(0, 3), y_stride = n + draw(0, 3);
  Array x(dtype, m ? (m - 1) * x_stride + k : 0), y(dtype, m ? (m - 1) * y_stride + n : 0);
  bool biased = draw(0, 1);
  std::unique_ptr<float[]> bias(new float[n]);
  for (int64_t i = 0; i < n; ++i) bias[i] = float(normal());
  GroupedArgs args = {codes.values.get(), n, k, codes.row_bytes, codes.group,
                      codes.is_block() ? nullptr : codes.scales.at(), codes.zeros.get(),
                      biased ? bias.get() : nullptr, codes.type, codes.scales.dtype};
  Weights* packed = asyncllm_pack_grouped(context, &args);
  if (!packed) fail("pack_grouped");
  expect_ok(asyncllm_linear(context, packed, x.at(), x_stride, y.at(), y_stride, m, dtype),
            "grouped linear");
  for (int64_t i = 0; i < m; ++i) {
    std::vector<double> row = rounded_in_spans(x.row(i * x_stride, k));
    for (int64_t j = 0; j < n; ++j) {
      double sum = biased ? bias[j] : 0, size = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += row[l] * codes.get(j, l);
        size += fabs(row[l] * codes.get(j, l));
      }
      expect(y, i * y_stride + j, sum, "grouped linear", 1e-5 * size);
    }
  }
  std::vector<int64_t> tokens(m), ids;
  expect_ok(asyncllm_linear_argmax(context, packed, x.at(), x_stride, tokens.data(), m, dtype),
            "grouped linear_argmax");
  for (int64_t i = 0; i < m; ++i) {
    int64_t best = 0;
    for (int64_t j = 0; j < n; ++j)
      if (y.get(i * y_stride + j) > y.get(i * y_stride + best)) best = j;
    if (tokens[i] != best) fail("grouped linear_argmax");
  }
  for (int64_t i = draw(0, 9); i > 0; --i) ids.push_back(draw(0, n - 1));
  Array rows(dtype, int64_t(ids.size()) * k);
  int64_t count = int64_t(ids.size());
  expect_ok(asyncllm_gather(context, packed, ids.data(), count, rows.at(), 1.0f, dtype),
            "grouped gather");
  for (size_t i = 0; i < ids.size(); ++i)
    for (int64_t l = 0; l < k; ++l)
      expect(rows, int64_t(i) * k + l, codes.get(ids[i], l), "grouped gather");
  asyncllm_free_weights(packed);
  for (int64_t wrong : {int64_t(0), int64_t(SPAN - 1), int64_t(SPAN + 1), int64_t(-SPAN)}) {
    args.group = wrong;
    if (asyncllm_pack_grouped(context, &args)) fail("pack_grouped with a wrong group");
  }
}

// Rounded weights are near what they were, and wrong arguments are refused.
void rounding(Context* context, int32_t dtype) {
  int64_t n = draw(1, 40), k = 2 * draw(1, 120), stride = k + draw(0, 3);
  int64_t groups = (k + SPAN - 1) / SPAN;
  Array values(dtype, (n - 1) * stride + k);
  std::unique_ptr<int8_t[]> integers(new int8_t[n * k]);
  std::unique_ptr<float[]> scales(new float[n]);
  RoundArgs args = {values.at(), n, k, stride, integers.get(), scales.get(), nullptr, dtype, 8};
  expect_ok(asyncllm_round(context, &args), "round to 8 bits");
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < k; ++j)
      if (fabs(integers[i * k + j] * double(scales[i]) - values.get(i * stride + j)) >
          0.5001 * scales[i])
        fail("round to 8 bits");
  std::unique_ptr<uint8_t[]> codes(new uint8_t[n * k / 2]), zeros(new uint8_t[n * groups]);
  Array steps(DTYPE_BF16, n * groups);
  args.values_out = codes.get();
  args.scales = steps.at();
  args.bits = 4;
  for (int wrong = 0; wrong < 2; ++wrong) {
    args.k = k - wrong;
    args.zeros = wrong ? zeros.get() : nullptr;
    if (asyncllm_round(context, &args) == STATUS_OK) fail("round with wrong arguments");
  }
  args.k = k;
  args.zeros = zeros.get();
  expect_ok(asyncllm_round(context, &args), "round to 4 bits");
  for (int64_t i = 0; i < n; ++i)
    for (int64_t group = 0; group < groups; ++group) {
      double low = 0, high = 0, error = 0;
      int64_t end = std::min<int64_t>(k, (group + 1) * SPAN);
      for (int64_t j = group * SPAN; j < end; ++j) {
        double value = values.get(i * stride + j);
        int code = codes[i * (k / 2) + j / 2] >> j % 2 * 4 & 15;
        low = std::min(low, value);
        high = std::max(high, value);
        error += pow((code - zeros[i * groups + group]) * steps.get(i * groups + group) - value, 2);
      }
      if (error > (end - group * SPAN) * pow(1.1 * (high - low) / 15, 2)) fail("round to 4 bits");
    }
}
