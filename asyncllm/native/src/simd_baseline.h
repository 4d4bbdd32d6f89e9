// Vectors of four floats by GCC's vector extension, for any processor of the architecture.
enum { W = 4, ROWS = 2, NV = 2 };
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
struct vs { vi even, odd; };
INLINE vf zero() { return vf{}; }
INLINE vf set1(float x) { return vf{x, x, x, x}; }
INLINE vf load(const float* p) {
  vf out;
  __builtin_memcpy(&out, p, sizeof(out));
  return out;
}
template <class T> INLINE vf load(const T* p) {
  return vf{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
}
INLINE void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof(x)); }
template <class T> INLINE void store(T* p, vf x) {
  for (int i = 0; i < W; ++i) narrow(x[i], p + i);
}
INLINE void store(int8_t* p, vf x) {
  for (int i = 0; i < W; ++i) p[i] = (int8_t)x[i];
}
INLINE vf add(vf a, vf b) { return a + b; }
INLINE vf sub(vf a, vf b) { return a - b; }
INLINE vf mul(vf a, vf b) { return a * b; }
INLINE vf div(vf a, vf b) { return a / b; }
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf at_least(vf value, vf x, float limit) { return x < set1(limit) ? vf{} : value; }
INLINE void load_pair(const bf16* p, vf& a, vf& b) {
  vi both;
  __builtin_memcpy(&both, p, sizeof(both));
  a = (vf)(both << 16);
  b = (vf)(both & (int32_t)0xffff0000);
}
INLINE vi zero_integers() { return vi{}; }
INLINE vs load_shorts(const int8_t* p) {
  return {vi{p[0], p[2], p[4], p[6]}, vi{p[1], p[3], p[5], p[7]}};
}
INLINE vs set_pair(const int16_t* p) {
  return {vi{p[0], p[0], p[0], p[0]}, vi{p[1], p[1], p[1], p[1]}};
}
INLINE vi dot_shorts(vi acc, vs a, vs b) { return acc + (a.even * b.even + a.odd * b.odd); }
INLINE vf to_floats(vi x) { return __builtin_convertvector(x, vf); }
struct vb { uint8_t bytes[4 * W]; };
typedef vi va;
INLINE void load_codes(const uint8_t* p, vb& low, vb& high) {
  for (int i = 0; i < 4 * W; ++i) {
    low.bytes[i] = p[i] & 15;
    high.bytes[i] = p[i] >> 4;
  }
}
INLINE vb load_quads(const uint8_t* p) {
  vb out;
  __builtin_memcpy(out.bytes, p, sizeof(out.bytes));
  return out;
}
INLINE vb add_bits(const vb& codes, const vb& from, int shift, uint8_t mask) {
  vb out;
  for (int i = 0; i < 4 * W; ++i) {
    int moved = shift < 0 ? from.bytes[i] << -shift : from.bytes[i] >> shift;
    out.bytes[i] = codes.bytes[i] | (moved & mask);
  }
  return out;
}
INLINE vb look_up(const uint8_t* table, const vb& codes) {
  vb out;
  for (int i = 0; i < 4 * W; ++i) out.bytes[i] = table[codes.bytes[i]];
  return out;
}
INLINE vb set_quad(const int8_t* p) {
  vb out;
  for (int i = 0; i < 4 * W; ++i) out.bytes[i] = (uint8_t)p[i % 4];
  return out;
}
INLINE va no_sums() { return vi{}; }
INLINE va dot_codes(va acc, const vb& codes, const vb& x) {
  for (int i = 0; i < 4 * W; ++i) acc[i / 4] += codes.bytes[i] * (int8_t)x.bytes[i];
  return acc;
}
INLINE vi total(va x) { return x; }
INLINE vi load_bytes(const uint8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
INLINE vi set_integers(int32_t x) { return vi{x, x, x, x}; }
INLINE vi less_product(vi a, vi b, int32_t x) { return a - b * x; }
INLINE vi add_sixteenfold(vi a, vi b) { return a + (b << 4); }
INLINE vf round_even(vf x) {
  // Adding 1.5 * 2^23 leaves no bits for a fraction, so that the sum is rounded to an integer.
  vf big = set1(12582912.0f);
  return (x + big) - big;
}
INLINE vf scale_by_pow2(vf x, vf n) {
  vf counted = n == n ? n : vf{};
  return n == n ? x * (vf)((__builtin_convertvector(counted, vi) + 127) << 23) : n;
}
INLINE float hmax(vf x) {
  float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
INLINE float hsum(vf x) { return (x[0] + x[1]) + (x[2] + x[3]); }
INLINE void sum4(vf a, vf b, vf c, vf d, float* out) {
  out[0] = hsum(a);
  out[1] = hsum(b);
  out[2] = hsum(c);
  out[3] = hsum(d);
}
