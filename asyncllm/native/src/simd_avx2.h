// AVX2, FMA and F16C.
enum { W = 8, ROWS = 3, NV = 2 };
typedef __m256 vf;
typedef __m256i vs;
// A vector of int32_t instead of __m256i, for which GCC would not accumulate sums in place.
typedef int32_t vi __attribute__((vector_size(32)));
INLINE vf zero() { return _mm256_setzero_ps(); }
INLINE vf set1(float x) { return _mm256_set1_ps(x); }
INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
INLINE vf load(const bf16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE vf load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
INLINE void store(bf16* p, vf x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
  __m256i high = _mm256_srli_epi32(rounded, 16);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
INLINE void store(f16* p, vf x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, 0)); }
INLINE void store(int8_t* p, vf x) {
  __m256i wide = _mm256_cvtps_epi32(x);
  __m128i both = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(both, both));
}
INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf at_least(vf value, vf x, float limit) {
  return _mm256_and_ps(value, _mm256_cmp_ps(x, set1(limit), _CMP_NLT_UQ));
}
INLINE void load_pair(const bf16* p, vf& a, vf& b) {
  __m256i both = _mm256_loadu_si256((const __m256i*)p);
  a = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)));
}
INLINE vi zero_integers() { return vi{}; }
INLINE vs load_shorts(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
INLINE vs set_pair(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm256_set1_epi32(pair);
}
INLINE vi dot_shorts(vi acc, vs a, vs b) { return acc + (vi)_mm256_madd_epi16(a, b); }
INLINE vf to_floats(vi x) { return _mm256_cvtepi32_ps((__m256i)x); }
typedef __m256i vb;
typedef int16_t va __attribute__((vector_size(32)));
INLINE void load_codes(const uint8_t* p, vb& low, vb& high) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i both = _mm256_loadu_si256((const __m256i*)p);
  low = _mm256_and_si256(both, mask);
  high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
}
INLINE vb load_quads(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE vb add_bits(vb codes, vb from, int shift, uint8_t mask) {
  vb moved = shift < 0 ? _mm256_slli_epi32(from, -shift) : _mm256_srli_epi32(from, shift);
  return _mm256_or_si256(codes, _mm256_and_si256(moved, _mm256_set1_epi8((char)mask)));
}
INLINE vb look_up(const uint8_t* table, vb codes) {
  __m128i one = _mm_load_si128((const __m128i*)table);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(one), codes);
}
INLINE vb set_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}
INLINE va no_sums() { return va{}; }
INLINE va dot_codes(va acc, vb codes, vb x) {
  acc += (va)_mm256_maddubs_epi16(codes, x);
  // The barrier keeps GCC from computing a span's products all at once, which would spill them.
  asm("" : "+x"(acc));
  return acc;
}
INLINE vi total(va x) { return (vi)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1)); }
INLINE vi load_bytes(const uint8_t* p) {
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
INLINE vi set_integers(int32_t x) { return (vi)_mm256_set1_epi32(x); }
INLINE vi less_product(vi a, vi b, int32_t x) { return a - b * x; }
INLINE vi add_sixteenfold(vi a, vi b) { return a + (b << 4); }
INLINE vf round_even(vf x) { return _mm256_round_ps(x, 8); }
INLINE vf scale_by_pow2(vf x, vf n) {
  __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}
INLINE float hmax(vf x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
INLINE void sum4(vf a, vf b, vf c, vf d, float* out) {
  __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
INLINE float hsum(vf x) {
  __m256 sums = _mm256_hadd_ps(x, x);
  sums = _mm256_hadd_ps(sums, sums);
  return _mm_cvtss_f32(
      _mm_add_ss(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
