// Row kernels of sampling, which read logits in chunks of CHUNK.

// The first `count` of W logits, times `factor`; the others are minus infinity.
template <class T> INLINE vf load_logits(const T* p, int64_t count, vf factor) {
  if (count >= W) return mul(load(p), factor);
  float buffer[W];
  store(buffer, mul(load_some(p, count), factor));
  for (int64_t i = count; i < W; ++i) buffer[i] = -__builtin_inff();
  return load(buffer);
}

template <class T> INLINE float chunk_maximum(const T* x, int64_t count, vf factor) {
  vf top[2] = {set1(-__builtin_inff()), set1(-__builtin_inff())}, broken[2] = {zero(), zero()};
  for (int64_t i = 0; i < count; i += 2 * W)
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      if (i + part * W >= count) break;
      vf value = load_logits(x + i + part * W, count - i - part * W, factor);
      top[part] = vmax(top[part], value);
      broken[part] = note_broken(broken[part], value);
    }
  if (hsum(add(broken[0], broken[1])) != 0.0f) return __builtin_nanf("");
  return hmax(vmax(top[0], top[1]));
}

template <class T> INLINE float chunk_sum(const T* x, int64_t count, vf factor, float largest) {
  vf sums[2] = {zero(), zero()}, shift = set1(largest);
  for (int64_t i = 0; i < count; i += 2 * W)
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      if (i + part * W >= count) break;
      vf value = load_logits(x + i + part * W, count - i - part * W, factor);
      sums[part] = add(sums[part], exponential(sub(value, shift)));
    }
  return hsum(add(sums[0], sums[1]));
}

template <class T>
static void reduce_typed(const LogitsRow& row, int64_t first, int64_t last, float* maxima,
                         float* sums) {
  vf factor = set1(row.factor);
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const T* x = (const T*)row.values + chunk * CHUNK;
    int64_t count = least(CHUNK, row.count - chunk * CHUNK);
    float largest = chunk_maximum(x, count, factor);
    maxima[chunk] = largest;
    if (!sums) continue;
    sums[chunk] = largest > -__builtin_inff() ? chunk_sum(x, count, factor, largest) : 0.0f;
  }
}

static void reduce_chunks(const LogitsRow& row, int64_t first, int64_t last, float* maxima,
                          float* sums) {
  with_type(row.dtype, [&](auto* type) {
    reduce_typed<typename pointee<decltype(type)>::type>(row, first, last, maxima, sums);
  });
}

static void read_chunk(const LogitsRow& row, int64_t chunk, float* out) {
  with_type(row.dtype, [&](auto* type) {
    auto* x = (decltype(type))row.values + chunk * CHUNK;
    int64_t count = least(CHUNK, row.count - chunk * CHUNK);
    vf factor = set1(row.factor);
    for (int64_t i = 0; i < CHUNK; i += W)
      store(out + i, i < count ? load_logits(x + i, count - i, factor)
                               : set1(-__builtin_inff()));
  });
}
