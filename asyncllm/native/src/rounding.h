// Quantisation of weights, with the same bits as gpu/ops/quantise.py. It uses single IEEE
// operations without fused multiply-add, so that all instruction sets give the same result.
INLINE vf vmin(vf a, vf b) { return sub(zero(), vmax(sub(zero(), a), sub(zero(), b))); }
// Returns NaN for NaN.
INLINE vf clamp(vf x, float low, float high) { return vmin(set1(high), vmax(set1(low), x)); }
INLINE float round_even(float x) {
  float out[W];
  store(out, round_even(set1(x)));
  return out[0];
}

// The scale of a group, its reciprocal, and the zero point.
struct Steps { float scale, inverse, zero; };

INLINE Steps steps_of(float low, float high, double shrink) {
  bf16 stored;
  narrow((high - low) * (float)(shrink / 15.0), &stored);
  float scale = widen(stored), inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  float code = round_even(low * (float)-shrink * inverse);
  return {scale, inverse, code > 15.0f ? 15.0f : code > 0.0f ? code : 0.0f};
}

// Root of the sum of squared rounding errors, summed pairwise in the order of quantise.py.
INLINE float error_of(const vf* values, const Steps& steps) {
  vf squares[SPAN / W];
  for (int i = 0; i < SPAN / W; ++i) {
    vf exact = mul(values[i], set1(steps.inverse));
    vf error = sub(clamp(round_even(exact), -steps.zero, 15.0f - steps.zero), exact);
    squares[i] = mul(error, error);
  }
  for (int half = SPAN / W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) squares[i] = add(squares[i], squares[i + half]);
  float sums[W];
  store(sums, squares[0]);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return __builtin_sqrtf(sums[0]) * steps.scale;
}

// Minimum and maximum of a group's elements and 0. If an element is NaN, both are NaN, and the
// payload of such elements is cleared.
INLINE void range_of(vf* values, float* low, float* high) {
  vf top = zero(), bottom = zero(), broken = zero();
  for (int i = 0; i < SPAN / W; ++i) {
    top = vmax(values[i], top);
    bottom = vmax(sub(zero(), values[i]), bottom);
    broken = fma(values[i], zero(), broken);
  }
  *low = -hmax(bottom);
  *high = hmax(top);
  if (hsum(broken) == 0.0f) return;
  for (int i = 0; i < SPAN / W; ++i) {
    float each[W];
    store(each, values[i]);
    for (int j = 0; j < W; ++j)
      if (each[j] != each[j]) *low = *high = each[j] = __builtin_nanf("");
    values[i] = load(each);
  }
}

// Converts integral floats that fit a byte to integers, and NaN without payload to 0.
template <class T> INLINE void store_integers(vf x, T* out) {
  // After adding 1.5 * 2^23, the last bits of a float are those of the integer.
  float shifted[W];
  uint32_t bits[W];
  store(shifted, add(x, set1(12582912.0f)));
  __builtin_memcpy(bits, shifted, sizeof(bits));
  for (int j = 0; j < W; ++j) out[j] = (T)bits[j];
}

// Rounds a group, the first `count` elements of x, to 4 bits; returns its scale and zero point.
template <class T> static Steps round_group(const T* x, int64_t count, uint8_t* codes) {
  static const double SHRINKS[] = {1.0, 0.92, 0.84};
  vf values[SPAN / W];
  for (int i = 0; i < SPAN / W; ++i)
    values[i] = i * W < count ? load_up_to(x + i * W, count - i * W) : zero();
  float low, high, least_error = 0.0f;
  range_of(values, &low, &high);
  Steps best = {0, 0, 0};
  for (double shrink : SHRINKS) {
    Steps steps = steps_of(low, high, shrink);
    float error = error_of(values, steps);
    if (shrink == SHRINKS[0] || error < least_error) best = steps, least_error = error;
  }
  for (int i = 0; i < SPAN / W; ++i) {
    vf code = add(round_even(mul(values[i], set1(best.inverse))), set1(best.zero));
    store_integers(clamp(code, 0.0f, 15.0f), codes + i * W);
  }
  return best;
}

template <class T> static void round_to_groups(const RoundArgs& args, const T* x, int64_t row) {
  int64_t groups = count_spans(args.k);
  uint8_t* out = (uint8_t*)args.values_out + row * (args.k / 2);
  bf16* scales = (bf16*)args.scales + row * groups;
  uint8_t* zeros = args.zeros + row * groups;
  for (int64_t group = 0; group < groups; ++group) {
    int64_t first = group * SPAN, count = least(SPAN, args.k - first);
    uint8_t codes[SPAN];
    Steps steps = round_group(x + first, count, codes);
    narrow(steps.scale, scales + group);
    zeros[group] = (uint8_t)steps.zero;
    for (int64_t i = 0; i < count / 2; ++i)
      out[first / 2 + i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
  }
}

template <class T> static void round_to_channel(const RoundArgs& args, const T* x, int64_t row) {
  vf top = zero(), broken = zero();
  for (int64_t i = 0; i < args.k; i += W) {
    vf value = load_up_to(x + i, args.k - i);
    top = vmax(vmax(value, sub(zero(), value)), top);
    broken = fma(value, zero(), broken);
  }
  float largest = hmax(top);
  int8_t* out = (int8_t*)args.values_out + row * args.k;
  float* scale = (float*)args.scales + row;
  if (hsum(broken) != 0.0f) {
    // A row with NaN or infinity gets such a scale, which makes its outputs NaN.
    for (int64_t i = 0; i < args.k; ++i)
      if (widen(x[i]) != widen(x[i])) largest = __builtin_nanf("");
    *scale = largest;
    __builtin_memset(out, 0, args.k);
    return;
  }
  *scale = largest / 127.0f;
  vf divisor = set1(*scale == 0.0f ? 1.0f : *scale);
  for (int64_t i = 0; i < args.k; i += W) {
    vf value = clamp(round_even(div(load_up_to(x + i, args.k - i), divisor)), -127.0f, 127.0f);
    int8_t integers[W];
    store_integers(value, integers);
    __builtin_memcpy(out + i, integers, least(W, args.k - i));
  }
}

static void round_row(const RoundArgs& args, int64_t row) {
  with_type(args.dtype, [&](auto* type) {
    auto* x = (decltype(type))args.values + row * args.row_stride;
    if (args.bits == 4)
      round_to_groups(args, x, row);
    else
      round_to_channel(args, x, row);
  });
}
