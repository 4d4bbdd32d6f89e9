// Kernels of ops that compute each row by itself: norms, RoPE, activations.

// Unless residual is null, residual = scale * (residual + multiplier * x) for the vector at i, with
// each product and the sum rounded to the type of x. Returns that vector, or that of x.
template <class T>
INLINE vf add_vector(const T* x, T* residual, float multiplier, float scale, int64_t i,
                     int64_t left) {
  vf value = load_up_to(x + i, left);
  if (!residual) return value;
  if (multiplier != 1.0f) value = rounded_to(mul(value, set1(multiplier)), x);
  value = rounded_to(add(load_up_to(residual + i, left), value), x);
  if (scale != 1.0f) value = rounded_to(mul(value, set1(scale)), x);
  store_up_to(residual + i, value, left);
  return value;
}

// Rounds normed values before the multiplication by a weight of x's type, but not before the
// multiplication by a float32 weight.
template <class T> INLINE vf normed_for(vf normed, const T* x, const T*) {
  return rounded_to(normed, x);
}
template <class T> INLINE vf normed_for(vf normed, const T*, const void*) { return normed; }

template <class T, class V>
static void norm_row(const T* x, T* residual, const V* weight, float eps, float multiplier,
                     float sum_scale, T* out, int64_t width) {
  vf squares = zero();
  for (int64_t i = 0; i < width; i += W) {
    vf value = add_vector(x, residual, multiplier, sum_scale, i, width - i);
    squares = fma(value, value, squares);
  }
  if (residual) x = residual;
  float scale = 1.0f / __builtin_sqrtf(hsum(squares) / (float)width + eps);
  for (int64_t i = 0; i < width; i += W) {
    int64_t left = width - i;
    vf normed = normed_for(mul(load_up_to(x + i, left), set1(scale)), x, weight);
    store_up_to(out + i, mul(normed, load_up_to(weight + i, left)), left);
  }
}

static void rms_norm(const void* x, void* residual, const void* weight, int32_t weight_dtype,
                     float eps, float multiplier, float scale, void* out, int64_t width,
                     int32_t dtype) {
  with_type(dtype, [&](auto* type) {
    using P = decltype(type);
    if (weight_dtype == dtype)
      norm_row((P)x, (P)residual, (P)weight, eps, multiplier, scale, (P)out, width);
    else
      norm_row((P)x, (P)residual, (const float*)weight, eps, multiplier, scale, (P)out, width);
  });
}

static void add_row(const void* x, void* residual, float multiplier, float scale, int64_t width,
                    int32_t dtype) {
  with_type(dtype, [&](auto* type) {
    using P = decltype(type);
    for (int64_t i = 0; i < width; i += W)
      add_vector((P)x, (P)residual, multiplier, scale, i, width - i);
  });
}

static void scale_row(void* x, float factor, int64_t width, int32_t dtype) {
  with_type(dtype, [&](auto* type) {
    auto* at = (decltype(type))x;
    for (int64_t i = 0; i < width; i += W)
      store_up_to(at + i, mul(load_up_to(at + i, width - i), set1(factor)), width - i);
  });
}

static void softcap_row(void* x, float cap, int64_t width, int32_t dtype) {
  with_type(dtype, [&](auto* type) {
    auto* at = (decltype(type))x;
    for (int64_t i = 0; i < width; i += W) {
      vf capped = hyperbolic_tangent(div(load_up_to(at + i, width - i), set1(cap)));
      store_up_to(at + i, mul(capped, set1(cap)), width - i);
    }
  });
}

// Applies RoPE to a head in GPT-NeoX order: elements i and i + half are a pair.
template <class T> static void rotate_head(T* head, const T* table, int64_t size) {
  int64_t half = size / 2;
  const T *cosines = table, *sines = table + half;
  for (int64_t i = 0; i < half; i += W) {
    int64_t left = half - i;
    vf cosine = load_up_to(cosines + i, left), sine = load_up_to(sines + i, left);
    vf low = load_up_to(head + i, left), high = load_up_to(head + half + i, left);
    store_up_to(head + i, sub(mul(low, cosine), mul(high, sine)), left);
    store_up_to(head + half + i, fma(low, sine, mul(high, cosine)), left);
  }
}

// Norms adjacent heads, each by itself or, with `whole`, all together; none if weight is null.
template <class T>
static void norm_heads(const RopeArgs& args, T* heads, const void* weight, int64_t count,
                       bool whole) {
  if (!weight) return;
  int64_t size = whole ? count * args.head_dim : args.head_dim;
  for (T *at = heads, *end = heads + count * args.head_dim; at < end; at += size) {
    if (args.norm_dtype == args.dtype)
      norm_row<T>(at, nullptr, (const T*)weight, args.eps, 1.0f, 1.0f, at, size);
    else
      norm_row<T>(at, nullptr, (const float*)weight, args.eps, 1.0f, 1.0f, at, size);
  }
}

template <class T> static void rope_token(const RopeArgs& args, int64_t token) {
  int64_t size = args.head_dim, heads = args.heads, kv_heads = args.kv_heads;
  T* qkv = (T*)args.qkv + token * args.token_stride;
  const T* table = (const T*)args.table + args.positions[token] * args.table_width;
  norm_heads(args, qkv, args.q_norm, heads, args.whole_norms);
  norm_heads(args, qkv + heads * size, args.k_norm, kv_heads, args.whole_norms);
  norm_heads(args, qkv + (heads + kv_heads) * size, args.v_norm, kv_heads, false);
  for (int64_t head = 0; head < heads; ++head) rotate_head(qkv + head * size, table, size);
  if (!kv_heads) return;
  table += args.table_width - size;
  for (int64_t head = heads; head < heads + kv_heads; ++head)
    rotate_head(qkv + head * size, table, size);
  int64_t slot = args.slots[token];
  T* to = (T*)args.cache + slot / args.block_size * args.block_stride +
          slot % args.block_size * args.slot_stride;
  for (int64_t head = 0; head < 2 * kv_heads; ++head) {
    T* target = to + head / kv_heads * args.kv_stride + head % kv_heads * args.head_stride;
    __builtin_memcpy(target, qkv + (heads + head) * size, size * sizeof(T));
  }
}

static void rope(const RopeArgs& args, int64_t token) {
  with_type(args.dtype, [&](auto* type) {
    rope_token<typename pointee<decltype(type)>::type>(args, token);
  });
}

// SiLU, x / (1 + e^-x); and GELU by tanh, x / (1 + e^-z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
INLINE vf activated(vf x, bool gelu) {
  vf inner = x;
  if (gelu) {
    vf cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    inner = mul(cubic, set1(1.5957691216f));
  }
  return div(x, add(set1(1.0f), exponential(sub(zero(), inner))));
}

static void gated_mul(const void* gates, const void* ups, void* out, int64_t width,
                      int32_t activation, int32_t dtype) {
  with_type(dtype, [&](auto* type) {
    using P = decltype(type);
    P gate = (P)gates, up = (P)ups;
    bool gelu = activation == ACTIVATION_GELU_TANH;
    for (int64_t i = 0; i < width; i += W) {
      int64_t left = width - i;
      vf value = rounded_to(activated(load_up_to(gate + i, left), gelu), gate);
      store_up_to((P)out + i, mul(value, load_up_to(up + i, left)), left);
    }
  });
}

static void widen_row(const void* x, int32_t dtype, float* out, int64_t count) {
  with_type(dtype, [&](auto* type) {
    auto* from = (decltype(type))x;
    for (int64_t i = 0; i < count; i += W)
      store_up_to(out + i, load_up_to(from + i, count - i), count - i);
  });
}
