// Functions on vectors, and on the first `count` elements of a vector.
INLINE void zero_floats(float* p, int64_t count) {
  for (int64_t i = 0; i < count; ++i) p[i] = 0.0f;
}
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Loads the first `count` elements and reads no others; the rest of the vector is zeros.
template <class T> INLINE vf load_some(const T* p, int64_t count) {
  float buffer[W];
  for (int i = 0; i < W; ++i) buffer[i] = i < count ? widen(p[i]) : 0.0f;
  return load(buffer);
}
template <class T> INLINE vf load_up_to(const T* p, int64_t count) {
  return count >= W ? load(p) : load_some(p, count);
}
template <class T> INLINE void store_up_to(T* p, vf x, int64_t count) {
  if (count >= W) {
    store(p, x);
    return;
  }
  float buffer[W];
  store(buffer, x);
  for (int64_t i = 0; i < count; ++i) narrow(buffer[i], p + i);
}

// Rounds x to T.
INLINE vf rounded_to(vf x, const float*) { return x; }
template <class T> INLINE vf rounded_to(vf x, const T*) {
  T buffer[W];
  store(buffer, x);
  return load(buffer);
}

// `exponential` of x that is NaN or at most 88.37626.
INLINE vf bounded_exponential(vf x) {
  const float least_normal = -87.33654f;
  // The bound is the first operand, because vmax keeps NaN in its second.
  vf bounded = vmax(set1(least_normal), x);
  vf n = round_even(mul(bounded, set1(1.44269504f)));
  vf r = fma(n, set1(-0.693359375f), bounded);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  return at_least(scale_by_pow2(p, n), x, least_normal);
}
// e^x within 2 units in the last place. It is exactly 1 for x = 0, and 0 where e^x is subnormal.
INLINE vf exponential(vf x) {
  return bounded_exponential(sub(zero(), vmax(set1(-88.37626f), sub(zero(), x))));
}
// Sets `noted` to NaN where x is NaN or plus infinity.
INLINE vf note_broken(vf noted, vf x) {
  return fma(at_least(x, x, -__FLT_MAX__), zero(), noted);
}
INLINE vf hyperbolic_tangent(vf x) {
  vf e = exponential(add(x, x));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}
INLINE float exponential(float x) {
  float out[W];
  store(out, exponential(set1(x)));
  return out[0];
}

// Calls f with a null pointer to the element type for `dtype`.
template <class F> INLINE void with_type(int32_t dtype, F&& f) {
  if (dtype == DTYPE_F32)
    f((float*)nullptr);
  else if (dtype == DTYPE_BF16)
    f((bf16*)nullptr);
  else
    f((f16*)nullptr);
}
