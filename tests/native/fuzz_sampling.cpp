// The ops of sampling: draws, rules and penalties, log-probabilities.
#include "fuzz.h"

namespace {

// The exponential number of a word of Philox4x32-10.
double exponential(uint64_t key, uint64_t counter, uint64_t domain, int word) {
  uint64_t c[4] = {counter, domain, 0, 0}, low = key & 0xffffffff, high = key >> 32;
  for (int round = 0; round < 10; ++round) {
    uint64_t a = c[0] * 0xD2511F53, b = c[2] * 0xCD9E8D57, mask = 0xffffffff;
    uint64_t next[4] = {b >> 32 ^ c[1] ^ low, b & mask, a >> 32 ^ c[3] ^ high, a & mask};
    memcpy(c, next, sizeof(c));
    low = (low + 0x9E3779B9) & mask;
    high = (high + 0xBB67AE85) & mask;
  }
  double u = (double(float(c[word])) + 0.5) * ldexp(1, -32);
  return -log1p(-(u < 1 - ldexp(1, -24) ? u : 1 - ldexp(1, -24)));
}
double token_score(double logit, uint64_t key, int64_t token) {
  int64_t counter = token / 1024 * 256 + token % 256;
  return logit - log(exponential(key, uint64_t(counter), 0, int(token / 256 % 4)));
}
uint64_t split_mix(uint64_t state, int64_t position) {
  uint64_t z = state + uint64_t(position + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

struct Truncation {
  int64_t top_k;
  double top_p, min_p;
};

// Whether `token` has the best score, within rounding, of those that are kept.
bool wins(const std::vector<double>& logits, uint64_t key, const Truncation& cut, int64_t token) {
  const double SLACK = 1e-4;
  int64_t size = int64_t(logits.size());
  std::vector<int64_t> order;
  for (int64_t i = 0; i < size; ++i)
    if (logits[i] > -INFINITY) order.push_back(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  double largest = logits[order[0]], sum = 0, total = 0;
  auto among = [&](size_t rank) {
    return logits[order[rank]] >= largest + log(cut.min_p) &&
           (cut.top_k <= 0 || int64_t(rank) < cut.top_k);
  };
  for (size_t rank = 0; rank < order.size(); ++rank)
    if (among(rank)) total += exp(logits[order[rank]] - largest);
  double best = -INFINITY, own = -INFINITY;
  for (size_t rank = 0; rank < order.size() && among(rank); ++rank) {
    if (cut.top_p < 1 && sum >= cut.top_p * total * (1 + 1e-6)) break;
    double score = token_score(logits[order[rank]], key, order[rank]);
    // What rounding may have cut off is no rival, and may win.
    bool sure = cut.top_p >= 1 || sum < cut.top_p * total * (1 - 1e-6);
    if (sure && score > best) best = score;
    if (order[rank] == token) own = score;
    sum += exp(logits[order[rank]] - largest);
  }
  return own >= best - SLACK;
}

bool wins_rounds(const std::vector<double>& logits, uint64_t key, int64_t token) {
  const double SLACK = 1e-4;
  int64_t size = int64_t(logits.size()), chunk = token / 256;
  double best = -INFINITY, own = -INFINITY;
  for (int64_t first = 0; first < size; first += 256) {
    double mass = 0;
    for (int64_t i = first; i < size && i < first + 256; ++i) mass += exp(logits[i]);
    double score = log(mass) - log(exponential(key, uint64_t(first / 256), 1, 0));
    if (score > best) best = score;
    if (first / 256 == chunk) own = score;
  }
  if (!(own >= best - SLACK)) return false;
  best = -INFINITY;
  for (int64_t i = chunk * 256; i < size && i < chunk * 256 + 256; ++i)
    best = std::max(best, token_score(logits[i], key, i));
  return token_score(logits[token], key, token) >= best - SLACK;
}

void sample(Context* context, int32_t dtype) {
  int64_t rows = draw(0, 5), size = draw(1, draw(0, 2) ? 3000 : 40), lines = rows + draw(1, 3);
  int64_t stride = draw(0, 3) ? size + draw(0, 3) : 0;
  Array logits(dtype, rows ? (rows - 1) * stride + size : 0, draw(0, 1) ? 3 : 0.1);
  if (!draw(0, 3) && logits.count)
    logits.set(draw(0, logits.count - 1), draw(0, 1) ? NAN : INFINITY);
  for (int64_t i = draw(0, 1) ? logits.count / 2 : 0; i > 0; --i)
    logits.set(draw(0, logits.count - 1), -INFINITY);
  std::vector<int64_t> index, positions, states, last(lines, -7), out(rows, -7);
  std::vector<float> temperature, top_p, min_p;
  std::vector<int32_t> top_k;
  for (int64_t line = 0; line < lines; ++line) {
    states.push_back(int64_t(engine()));
    temperature.push_back(draw(0, 3) ? float(draw(1, 30)) / 10 : 0);
    top_k.push_back(draw(0, 1) ? 0 : int32_t(draw(1, draw(0, 1) ? size + 2 : 9)));
    top_p.push_back(draw(0, 1) ? 1 : float(draw(1, 99)) / 100);
    min_p.push_back(draw(0, 1) ? 0 : float(draw(1, 100)) / 100);
  }
  for (int64_t row = 0; row < rows; ++row) {
    index.push_back(draw(0, 5) ? row : -1);
    positions.push_back(draw(0, 1000));
  }
  SampleArgs args = {logits.at(),  stride,          rows,         size,         index.data(),
                     positions.data(), states.data(), temperature.data(), top_k.data(),
                     top_p.data(), min_p.data(),    lines,        last.data(),  out.data(),
                     dtype};
  expect_ok(asyncllm_sample(context, &args), "sample");
  for (int64_t row = 0; row < rows; ++row) {
    int64_t line = index[row], found = out[row];
    if (line < 0) {
      if (found != -1) fail("sample of a row that is left out");
      continue;
    }
    if (last[line] != (found < 0 ? 0 : found)) fail("last sampled");
    bool greedy = temperature[line] < 1e-5f, broken = false, any = false;
    std::vector<double> scaled;
    for (int64_t i = 0; i < size; ++i) {
      double logit = logits.get(row * stride + i);
      broken |= !(logit < INFINITY);
      any |= logit > -INFINITY;
      scaled.push_back(float(logit) * (greedy ? 1.0f : 1.0f / temperature[line]));
    }
    if (broken || !any) {
      if (found != (broken ? -1 : -2)) fail("sample of what is no number");
      continue;
    }
    uint64_t key = split_mix(uint64_t(states[line]), positions[row] + 1);
    Truncation cut = {top_k[line], top_p[line], min_p[line]};
    bool truncated = (cut.top_k > 0 && cut.top_k < size) || cut.top_p < 1 || cut.min_p > 0;
    note(double(found));
    if (found < 0 || found >= size) fail("sample: a token beyond the vocabulary");
    int64_t first = std::max_element(scaled.begin(), scaled.end()) - scaled.begin();
    bool right = greedy      ? found == first
                 : truncated ? wins(scaled, key, cut, found)
                             : wins_rounds(scaled, key, found);
    if (!right) fail("sample: token " + std::to_string(found) + " of " + std::to_string(size));
  }
  if (rows) {
    index[0] = lines;
    if (asyncllm_sample(context, &args) != STATUS_INDEX) fail("sample beyond the table");
  }
}

void log_probabilities(Context* context, int32_t dtype) {
  int64_t rows = draw(0, 4), size = draw(1, 1500), stride = size + draw(0, 3);
  int64_t top = draw(0, draw(0, 3) ? 20 : size);
  if (top > size) top = size;
  Array logits(dtype, rows ? (rows - 1) * stride + size : 0, 2);
  std::vector<int64_t> tokens, ids(rows * (top + 1));
  std::vector<float> values(rows * (top + 1));
  for (int64_t row = 0; row < rows; ++row) tokens.push_back(draw(-1, size - 1));
  expect_ok(asyncllm_top_logprobs(context, logits.at(), stride, rows, size, dtype, tokens.data(),
                                  top, values.data(), ids.data()),
            "top_logprobs");
  for (int64_t row = 0; row < rows; ++row) {
    auto at = [&](int64_t i) { return logits.get(row * stride + i); };
    double total = 0;
    for (int64_t i = 0; i < size; ++i) total += exp(at(i));
    std::vector<int64_t> order(size);
    for (int64_t i = 0; i < size; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return at(a) > at(b); });
    int64_t token = tokens[row] < 0 ? 0 : tokens[row], rank = 1;
    for (int64_t i = 0; i < size; ++i) rank += at(i) > at(token);
    order.resize(top);
    order.push_back(token);
    for (int64_t i = 0; i <= top; ++i) {
      int64_t place = row * (top + 1) + i;
      if (ids[place] != (i < top ? order[i] : rank)) fail("top_logprobs: ids");
      note(values[place]);
      if (!(fabs(values[place] - (at(order[i]) - log(total))) < 1e-4)) fail("top_logprobs");
    }
  }
}

void process(Context* context, int32_t dtype) {
  int64_t rows = draw(0, 5), size = draw(1, 400), lines = rows + draw(1, 3);
  int64_t stride = size + draw(0, 3), words = (size + 31) / 32, masks = draw(0, 3);
  int64_t max_bias = draw(1, 9), max_stop = draw(1, 9);
  Array logits(dtype, rows ? (rows - 1) * stride + size : 0, 2);
  auto bits = [&](int64_t count) {
    std::vector<int32_t> found(count * words);
    for (int32_t& word : found) word = draw(0, 2) ? int32_t(engine()) : -int32_t(draw(0, 1));
    return found;
  };
  auto ids = [&](int64_t count) {
    std::vector<int32_t> found(count);
    for (int32_t& id : found) id = int32_t(draw(0, size - 1));
    return found;
  };
  auto floats = [&](double low, double high) {
    std::vector<float> found(lines);
    for (float& x : found)
      x = float(std::uniform_real_distribution<double>(low, high)(engine));
    return found;
  };
  std::vector<float> out(rows * size), bias_values(lines * max_bias), repetition = floats(0.5, 2);
  std::vector<float> frequency = floats(-1, 1), presence = floats(-1, 1);
  for (float& x : bias_values) x = float(normal());
  std::vector<int32_t> mask_words = bits(masks), allowed = bits(lines), in_prompt = bits(lines);
  std::vector<int32_t> bias_ids = ids(lines * max_bias), stop_ids = ids(lines * max_stop);
  std::vector<int32_t> restricted, num_bias, num_stop, counts(lines * size);
  for (int32_t& count : counts) count = draw(0, 4) ? 0 : int32_t(draw(1, 5));
  std::vector<int64_t> index, positions, host, last, slots, min_end, counted_from;
  for (int64_t line = 0; line < lines; ++line) {
    restricted.push_back(int32_t(draw(0, 1)));
    num_bias.push_back(int32_t(draw(0, max_bias)));
    num_stop.push_back(int32_t(draw(0, max_stop)));
    min_end.push_back(draw(0, 20));
    counted_from.push_back(draw(0, 20));
    last.push_back(draw(0, size - 1));
  }
  for (int64_t row = 0; row < rows; ++row) {
    index.push_back(draw(0, 5) ? row : -1);
    positions.push_back(draw(0, 20));
    host.push_back(draw(-1, size - 1));
    slots.push_back(draw(-1, masks - 1));
  }
  LogitsArgs args = {};
  args.logits = logits.at(), args.row_stride = stride, args.rows = rows, args.vocab_size = size;
  args.out = out.data(), args.req_indices = index.data(), args.positions = positions.data();
  args.host_token_ids = host.data(), args.last_sampled = last.data(), args.lines = lines;
  args.words = words, args.dtype = dtype;
  if (draw(0, 1)) {
    args.mask_slots = slots.data(), args.mask_words = mask_words.data(), args.num_masks = masks;
  }
  args.rules = int32_t(draw(0, 1)), args.penalties = int32_t(draw(0, 1));
  args.restricted = restricted.data(), args.num_bias = num_bias.data();
  args.num_stop_ids = num_stop.data(), args.min_end = min_end.data();
  args.allowed = allowed.data(), args.bias_ids = bias_ids.data();
  args.bias_values = bias_values.data(), args.stop_ids = stop_ids.data();
  args.max_bias = max_bias, args.max_stop_ids = max_stop;
  args.counted_from = counted_from.data(), args.repetition = repetition.data();
  args.frequency = frequency.data(), args.presence = presence.data();
  args.counts = counts.data(), args.in_prompt = in_prompt.data();
  std::vector<int32_t> before = counts;
  expect_ok(asyncllm_process_logits(context, &args), "process_logits");
  auto bit = [&](const std::vector<int32_t>& table, int64_t line, int64_t token) {
    return uint32_t(table[line * words + token / 32]) >> token % 32 & 1;
  };
  for (int64_t row = 0; row < rows; ++row) {
    int64_t line = index[row];
    if (line < 0) continue;
    if (args.penalties && positions[row] >= counted_from[line])
      ++before[line * size + (host[row] < 0 ? last[line] : host[row])];
    for (int64_t i = 0; i < size; ++i) {
      float x = float(logits.get(row * stride + i));
      if (args.mask_slots && slots[row] >= 0 && !bit(mask_words, slots[row], i)) x = -INFINITY;
      if (args.rules) {
        for (int64_t j = 0; j < num_bias[line]; ++j)
          if (bias_ids[line * max_bias + j] == i) x += bias_values[line * max_bias + j];
        if (restricted[line] && !bit(allowed, line, i)) x = -INFINITY;
        for (int64_t j = 0; j < num_stop[line] && positions[row] + 1 < min_end[line]; ++j)
          if (stop_ids[line * max_stop + j] == i) x = -INFINITY;
      }
      int32_t count = before[line * size + i];
      if (args.penalties && (count || bit(in_prompt, line, i))) {
        x = x > 0 ? x / repetition[line] : x * repetition[line];
        x = x - frequency[line] * float(count);
        x = x - presence[line] * float(count > 0);
      }
      if (out[row * size + i] != x) fail("process_logits");
    }
  }
  if (counts != before) fail("counts");
}

}  // namespace

void fuzz_sampling(Context* context, int32_t dtype) {
  sample(context, dtype);
  log_probabilities(context, dtype);
  process(context, dtype);
}
