// Ops on a row at a time.
template <class T>
static void norm_row(const T* x, T* residual, const T* weight, float eps, T* out, int64_t width) {
  vf squares = zero();
  for (int64_t i = 0; i < width; i += W) {
    int64_t left = width - i;
    vf value = load_up_to(x + i, left);
    if (residual) {
      value = rounded_to(add(load_up_to(residual + i, left), value), x);
      store_up_to(residual + i, value, left);
    }
    squares = fma(value, value, squares);
  }
  if (residual) x = residual;
  float scale = 1.0f / __builtin_sqrtf(hsum(squares) / (float)width + eps);
  for (int64_t i = 0; i < width; i += W) {
    int64_t left = width - i;
    vf normed = rounded_to(mul(load_up_to(x + i, left), set1(scale)), x);
    store_up_to(out + i, mul(normed, load_up_to(weight + i, left)), left);
  }
}

static void rms_norm(const void* x, void* residual, const void* weight, float eps, void* out,
                     int64_t width, int32_t dtype) {
  with_type(dtype, [&](auto* type) {
    using P = decltype(type);
    norm_row((P)x, (P)residual, (P)weight, eps, (P)out, width);
  });
}

// Norm, where weight is not null, and rotation of a head whose halves go together.
template <class T>
static void rotate_head(T* head, const T* table, const T* weight, float eps, int64_t size) {
  if (weight) norm_row<T>(head, nullptr, weight, eps, head, size);
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

template <class T> static void rope_token(const RopeArgs& args, int64_t token) {
  int64_t size = args.head_dim, heads = args.heads, kv_heads = args.kv_heads;
  T* qkv = (T*)args.qkv + token * args.token_stride;
  const T* table = (const T*)args.table + args.positions[token] * size;
  for (int64_t head = 0; head < heads + kv_heads; ++head) {
    const void* weight = head < heads ? args.q_norm : args.k_norm;
    rotate_head(qkv + head * size, table, (const T*)weight, args.eps, size);
  }
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

static void silu_mul(const void* gate_up, void* out, int64_t width, int32_t dtype) {
  with_type(dtype, [&](auto* type) {
    using P = decltype(type);
    P gate = (P)gate_up, up = gate + width;
    for (int64_t i = 0; i < width; i += W) {
      int64_t left = width - i;
      vf value = load_up_to(gate + i, left);
      vf silu = div(value, add(set1(1.0f), exponential(sub(zero(), value))));
      store_up_to((P)out + i, mul(rounded_to(silu, gate), load_up_to(up + i, left)), left);
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
