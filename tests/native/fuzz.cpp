// Calls every op with random shapes, strides, block tables and lengths, and compares with sums in
// double. All memory is allocated to its last element, so that a sanitizer sees every stray read.
//
//     fuzz SEED ROUNDS [ISA]
#include "fuzz.h"

std::mt19937_64 engine;
uint64_t digest = 0;

namespace {

// Integers as weights, each a multiple of its row's scale.
struct Integers {
  std::unique_ptr<int8_t[]> values;
  std::unique_ptr<float[]> scales;
  Integers(int64_t n, int64_t count) : values(new int8_t[count]), scales(new float[n]) {
    for (int64_t i = 0; i < count; ++i) values[i] = int8_t(draw(-127, 127));
    for (int64_t i = 0; i < n; ++i) scales[i] = float(draw(1, 99)) / 8192;
  }
};

void linear(Context* context, int32_t dtype) {
  int64_t n = draw(1, 150), k = draw(1, 200), m = draw(0, 70);
  int64_t w_stride = k + draw(0, 3), x_stride = k + draw(0, 3), y_stride = n + draw(0, 3);
  Array w(dtype, (n - 1) * w_stride + k, 1 / sqrt(double(k)));
  Array x(dtype, m ? (m - 1) * x_stride + k : 0), y(dtype, m ? (m - 1) * y_stride + n : 0);
  Integers integers(n, w.count);
  bool biased = draw(0, 1), quantised = draw(0, 1);
  std::unique_ptr<float[]> bias(new float[n]);
  for (int64_t i = 0; i < n; ++i) bias[i] = float(normal());
  auto weight = [&](int64_t i, int64_t j) {
    int64_t at = i * w_stride + j;
    return quantised ? double(integers.values[at]) * integers.scales[i] : w.get(at);
  };
  Weights* packed = asyncllm_pack(context, quantised ? integers.values.get() : w.at(),
                                  quantised ? int32_t(DTYPE_I8) : dtype, n, k, w_stride,
                                  quantised ? integers.scales.get() : nullptr,
                                  biased ? bias.get() : nullptr);
  if (!packed) fail("pack");
  expect_ok(asyncllm_linear(context, packed, x.at(), x_stride, y.at(), y_stride, m, dtype),
            "linear");
  for (int64_t i = 0; i < m; ++i) {
    std::vector<double> row = x.row(i * x_stride, k);
    if (quantised && rounds_int8_in_spans(context)) row = rounded_in_spans(row);
    for (int64_t j = 0; j < n; ++j) {
      double sum = biased ? bias[j] : 0;
      for (int64_t l = 0; l < k; ++l) sum += row[l] * weight(j, l);
      // Rounding x to 16 bits adds 1 in 65,534 of its largest element to each product.
      expect(y, i * y_stride + j, sum, "linear", quantised ? 4e-3 : 0);
    }
  }
  std::vector<int64_t> tokens(m);
  expect_ok(asyncllm_linear_argmax(context, packed, x.at(), x_stride, tokens.data(), m, dtype),
            "linear_argmax");
  for (int64_t i = 0; i < m; ++i) {
    int64_t best = 0;
    for (int64_t j = 0; j < n; ++j)
      if (y.get(i * y_stride + j) > y.get(i * y_stride + best)) best = j;
    if (tokens[i] != best) fail("linear_argmax");
  }
  std::vector<int64_t> ids;
  for (int64_t i = draw(0, 9); i > 0; --i) ids.push_back(draw(0, n - 1));
  Array rows(dtype, int64_t(ids.size()) * k);
  expect_ok(asyncllm_gather(context, packed, ids.data(), int64_t(ids.size()), rows.at(), 1.0f,
                            dtype),
            "gather");
  for (size_t i = 0; i < ids.size(); ++i)
    for (int64_t l = 0; l < k; ++l)
      expect(rows, int64_t(i) * k + l, weight(ids[i], l), "gather");
  int64_t beyond = draw(0, 1) ? n : -1;
  Array one(dtype, k);
  if (asyncllm_gather(context, packed, &beyond, 1, one.at(), 1.0f, dtype) != STATUS_INDEX)
    fail("gather beyond the table");
  asyncllm_free_weights(packed);
}

void rows(Context* context, int32_t dtype) {
  int64_t m = draw(0, 20), width = draw(1, 100), stride = 2 * width + draw(0, 3);
  int64_t span = m ? (m - 1) * stride + 2 * width : 0;
  int32_t weight_dtype = draw(0, 1) ? dtype : int32_t(DTYPE_F32);
  double multiplier = draw(0, 1) ? 1 : 0.25, scaled = draw(0, 1) ? 1 : 0.5;
  Array x(dtype, span), residual(dtype, span), weight(weight_dtype, width), out(dtype, m * width);
  bool gelu = draw(0, 1), apart = draw(0, 1);
  Array& ups = apart ? residual : x;
  int64_t first_up = apart ? 0 : width;
  expect_ok(asyncllm_gated_mul(context, x.at(), stride, m ? ups.at(first_up) : nullptr, stride,
                               out.at(), m, width,
                               gelu ? ACTIVATION_GELU_TANH : ACTIVATION_SILU, dtype),
            "gated_mul");
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < width; ++j) {
      double gate = x.get(i * stride + j), up = ups.get(i * stride + first_up + j);
      double inner = gelu ? sqrt(8 / M_PI) * (gate + 0.044715 * gate * gate * gate) : gate;
      expect(out, i * width + j, gate / (1 + exp(-inner)) * up, "gated_mul");
    }
  std::vector<double> sums;
  bool adds = draw(0, 1);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < width; ++j)
      sums.push_back(adds ? (x.get(i * stride + j) * multiplier + residual.get(i * stride + j)) *
                                scaled
                          : x.get(i * stride + j));
  expect_ok(asyncllm_rms_norm(context, x.at(), stride, adds ? residual.at() : nullptr, stride,
                              weight.at(), weight_dtype, 1e-5f, float(multiplier),
                              float(scaled), out.at(), m, width, dtype),
            "rms_norm");
  for (int64_t i = 0; i < m; ++i) {
    double squares = 0;
    for (int64_t j = 0; j < width; ++j) squares += sums[i * width + j] * sums[i * width + j];
    double scale = 1 / sqrt(squares / double(width) + 1e-5);
    for (int64_t j = 0; j < width; ++j) {
      double sum = sums[i * width + j];
      if (adds) expect(residual, i * stride + j, sum, "residual");
      expect(out, i * width + j, sum * scale * weight.get(j), "rms_norm");
    }
  }
  sums.clear();
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < width; ++j)
      sums.push_back((x.get(i * stride + j) * multiplier + residual.get(i * stride + j)) * scaled);
  expect_ok(asyncllm_add(context, x.at(), stride, residual.at(), stride, float(multiplier),
                         float(scaled), m, width, dtype),
            "add");
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < width; ++j)
      expect(residual, i * stride + j, sums[i * width + j], "add");
  sums.clear();
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < width; ++j) sums.push_back(x.get(i * stride + j));
  expect_ok(asyncllm_softcap(context, x.at(), stride, 2.0f, m, width, dtype), "softcap");
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < width; ++j)
      expect(x, i * stride + j, 2 * tanh(sums[i * width + j] / 2), "softcap");
}

struct Cache {
  int64_t blocks, block_size, heads, dim, head_stride, slot_stride, block_stride, kv_stride;
  Array values;

  Cache(int32_t dtype, int64_t heads, int64_t dim)
      : blocks(draw(1, 40)),
        block_size(draw(1, 20)),
        heads(heads),
        dim(dim),
        head_stride(dim + draw(0, 2)),
        slot_stride(heads * head_stride + draw(0, 2)),
        block_stride(block_size * slot_stride + draw(0, 2)),
        kv_stride(blocks * block_stride + draw(0, 2)),
        values(dtype, kv_stride + (blocks - 1) * block_stride + (block_size - 1) * slot_stride +
                          (heads - 1) * head_stride + dim) {}
  int64_t at(int64_t kv, int64_t slot, int64_t head) const {
    return kv * kv_stride + slot / block_size * block_stride + slot % block_size * slot_stride +
           head * head_stride;
  }
};

void rope(Context* context, int32_t dtype) {
  int64_t kv_heads = draw(1, 3), heads = kv_heads * draw(1, 3), dim = 2 * draw(1, 40);
  Cache cache(dtype, kv_heads, dim);
  int64_t slots = cache.blocks * cache.block_size, tokens = draw(0, slots < 9 ? slots : 9);
  bool writes = draw(0, 3);
  if (!writes) kv_heads = 0;
  int64_t width = (heads + 2 * kv_heads) * dim, stride = width + draw(0, 3), positions = draw(1, 30);
  int64_t table_width = draw(0, 1) ? dim : 2 * dim;
  Array qkv(dtype, tokens ? (tokens - 1) * stride + width : 0);
  Array table(dtype, positions * table_width);
  Array q_norm(dtype, dim), k_norm(dtype, dim), v_norm(dtype, dim);
  std::vector<int64_t> slot, position;
  int64_t first = draw(0, slots - tokens);
  for (int64_t i = 0; i < tokens; ++i) {
    slot.push_back(first + i);
    position.push_back(draw(0, positions - 1));
  }
  std::vector<double> before;
  for (int64_t i = 0; i < qkv.count; ++i) before.push_back(qkv.get(i));
  bool norms = draw(0, 1), norms_v = norms && writes && draw(0, 1);
  RopeArgs args = {};
  args.qkv = qkv.at(), args.token_stride = stride, args.table = table.at();
  args.table_rows = positions, args.positions = position.data(), args.eps = 1e-5f;
  args.q_norm = norms ? q_norm.at() : nullptr, args.k_norm = norms && writes ? k_norm.at() : nullptr;
  args.v_norm = norms_v ? v_norm.at() : nullptr, args.num_tokens = tokens;
  if (writes) args.cache = cache.values.at(), args.slots = slot.data();
  args.kv_stride = cache.kv_stride, args.block_stride = cache.block_stride;
  args.slot_stride = cache.slot_stride, args.head_stride = cache.head_stride;
  args.heads = heads, args.kv_heads = kv_heads, args.head_dim = dim;
  args.num_blocks = cache.blocks, args.block_size = cache.block_size;
  args.dtype = args.norm_dtype = dtype, args.table_width = table_width;
  expect_ok(asyncllm_rope_and_cache(context, &args), "rope");
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t head = 0; head < heads + 2 * kv_heads; ++head) {
      int64_t at = token * stride + head * dim;
      bool turns = head < heads + kv_heads, normed_here = turns ? norms : norms_v;
      double squares = 0;
      for (int64_t i = 0; i < dim; ++i) squares += before[at + i] * before[at + i];
      double scale = normed_here ? 1 / sqrt(squares / double(dim) + 1e-5) : 1;
      const Array& weight = head < heads ? q_norm : turns ? k_norm : v_norm;
      auto normed = [&](int64_t i) {
        return before[at + i] * scale * (normed_here ? weight.get(i) : 1);
      };
      for (int64_t i = 0; i < dim; ++i) {
        int64_t half = dim / 2, pair = i % half;
        int64_t row = position[token] * table_width + (head < heads ? 0 : table_width - dim);
        double cosine = table.get(row + pair), sine = table.get(row + half + pair);
        double low = normed(pair), high = normed(half + pair);
        double wanted = i < half ? low * cosine - high * sine : high * cosine + low * sine;
        expect(qkv, at + i, turns ? wanted : normed(i), "rope");
        if (head >= heads) {
          int64_t own = head - heads, kv = own / kv_heads;
          if (cache.values.get(cache.at(kv, slot[token], own % kv_heads) + i) != qkv.get(at + i))
            fail("kv write");
        }
      }
    }
}

void attention(Context* context, int32_t dtype) {
  int64_t kv_heads = draw(1, 3), group = draw(1, draw(0, 9) ? 4 : 40), dim = draw(1, 80);
  if (!draw(0, 19)) dim = draw(200, 512);
  int64_t heads = kv_heads * group, rows = draw(0, 5), longest = draw(0, 4) ? 60 : 1300;
  Cache cache(dtype, kv_heads, dim);
  int64_t width = (longest + cache.block_size - 1) / cache.block_size;
  std::vector<int32_t> table(rows * width);
  // Blocks are shared at will; those that no row has are NaN.
  cache.values.fill_nan();
  std::vector<int64_t> starts = {0};
  std::vector<int32_t> lengths;
  auto fill = [&](int64_t kv, int64_t slot) {
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t i = 0; i < dim; ++i) cache.values.set(cache.at(kv, slot, head) + i, normal());
  };
  for (int64_t row = 0; row < rows; ++row) {
    int64_t length = draw(0, longest), tokens = draw(0, 2) ? 1 : draw(0, length < 40 ? length : 40);
    for (int64_t i = 0; i < width; ++i) table[row * width + i] = int32_t(draw(-9, 1000000));
    for (int64_t i = 0; i * cache.block_size < length; ++i)
      table[row * width + i] = int32_t(draw(0, cache.blocks - 1));
    for (int64_t key = 0; key < length; ++key)
      for (int64_t kv = 0; kv < 2; ++kv)
        fill(kv, table[row * width + key / cache.block_size] * cache.block_size +
                     key % cache.block_size);
    starts.push_back(starts.back() + tokens);
    lengths.push_back(int32_t(length));
  }
  int64_t tokens = starts.back(), head_stride = dim + draw(0, 2);
  int64_t token_stride = heads * head_stride + draw(0, 5);
  int64_t span = tokens ? (tokens - 1) * token_stride + (heads - 1) * head_stride + dim : 0;
  Array q(dtype, span), out(dtype, tokens * heads * dim);
  std::vector<float> sinks;
  for (int64_t i = 0; i < heads; ++i) sinks.push_back(float(normal()));
  bool sinking = draw(0, 1);
  AttentionArgs args = {};
  args.q = q.at(), args.q_token_stride = token_stride, args.q_head_stride = head_stride;
  args.cache = cache.values.at(), args.kv_stride = cache.kv_stride;
  args.block_stride = cache.block_stride, args.slot_stride = cache.slot_stride;
  args.head_stride = cache.head_stride, args.out = out.at(), args.block_table = table.data();
  args.table_stride = args.table_width = width, args.query_start = starts.data();
  args.seq_lens = lengths.data(), args.rows = rows, args.num_tokens = tokens;
  args.heads = heads, args.kv_heads = kv_heads, args.head_dim = dim;
  args.num_blocks = cache.blocks, args.block_size = cache.block_size;
  args.window = draw(0, 1) ? draw(1, 50) : 0, args.scale = 1 / sqrtf(float(dim));
  args.softcap = draw(0, 1) ? 2.0f : 0.0f, args.sinks = sinking ? sinks.data() : nullptr;
  args.dtype = dtype;
  expect_ok(asyncllm_attention(context, &args), "attention");
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t token = starts[row]; token < starts[row + 1]; ++token) {
      int64_t position = lengths[row] - starts[row + 1] + token;
      int64_t from = args.window ? position + 1 - args.window : 0;
      if (from < 0) from = 0;
      for (int64_t head = 0; head < heads; ++head) {
        std::vector<double> sums(dim);
        double total = sinking ? exp(double(sinks[head])) : 0;
        for (int64_t key = from; key <= position; ++key) {
          int64_t slot = table[row * width + key / cache.block_size] * cache.block_size +
                         key % cache.block_size;
          int64_t k_at = cache.at(0, slot, head / group), v_at = cache.at(1, slot, head / group);
          double score = 0;
          for (int64_t i = 0; i < dim; ++i)
            score += q.get(token * token_stride + head * head_stride + i) *
                     cache.values.get(k_at + i);
          score *= args.scale;
          if (args.softcap != 0) score = args.softcap * tanh(score / args.softcap);
          total += exp(score);
          for (int64_t i = 0; i < dim; ++i)
            sums[i] += exp(score) * cache.values.get(v_at + i);
        }
        for (int64_t i = 0; i < dim; ++i)
          expect(out, (token * heads + head) * dim + i, lengths[row] ? sums[i] / total : 0,
                 "attention");
      }
    }
}

#include "fuzz_grouped.h"
#include "fuzz_experts.h"
#include "fuzz_recurrent.h"
#include "fuzz_program.h"

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) fail("fuzz SEED ROUNDS [ISA]");
  uint64_t seed = strtoull(arguments[1], nullptr, 10);
  int64_t rounds = atoll(arguments[2]);
  const char* isa = count > 3 ? arguments[3] : nullptr;
  for (int64_t round = 0; round < rounds; ++round) {
    engine.seed(seed + uint64_t(round));
    Context* context = asyncllm_create(int32_t(draw(1, 3)), isa);
    if (!context) fail("create");
    for (int32_t dtype : {DTYPE_F32, DTYPE_BF16, DTYPE_F16}) {
      linear(context, dtype);
      grouped(context, dtype);
      rounding(context, dtype);
      rows(context, dtype);
      rope(context, dtype);
      attention(context, dtype);
      routing(context, dtype);
      experts(context, dtype);
      causal_conv(context, dtype);
      gated_delta(context, dtype);
      gates(context, dtype);
      program(context, dtype);
    }
    for (int32_t dtype : {DTYPE_F32, DTYPE_BF16, DTYPE_F16}) fuzz_sampling(context, dtype);
    asyncllm_close(context);
  }
  printf("%s: %lld rounds from seed %llu, digest %016llx\n", isa ? isa : asyncllm_best_isa(), (long long)rounds,
         (unsigned long long)seed, (unsigned long long)digest);
}
