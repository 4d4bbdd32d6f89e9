// AVX-512 with the dot products of AVX512_VNNI and, if PAIRED_BFLOAT16, of AVX512_BF16.
enum { W = 16, ROWS = 6, NV = 4 };
#define BYTE_PRODUCTS
typedef __m512 vf;
typedef __m512i vi;
INLINE vf zero() { return _mm512_setzero_ps(); }
INLINE vf set1(float x) { return _mm512_set1_ps(x); }
INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
INLINE vf load(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE vf load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
INLINE void store(bf16* p, vf x) {
  // Do not use vcvtneps2bf16: it flushes subnormals, which the other instruction sets keep.
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
INLINE void store(f16* p, vf x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, 0)); }
INLINE void store(int8_t* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf at_least(vf value, vf x, float limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(limit), _CMP_NLT_UQ), value);
}
INLINE void load_pair(const bf16* p, vf& a, vf& b) {
  __m512i both = _mm512_loadu_si512(p);
  a = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
}
#ifdef PAIRED_BFLOAT16
// Adds to acc, for 16 outputs, the products of a pair of weights with one pair of x.
INLINE vf dot_pair(vf acc, const bf16* weights, uint32_t pair) {
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(weights),
                          (__m512bh)_mm512_set1_epi32((int)pair));
}
#endif
INLINE vf to_floats(vi x) { return _mm512_cvtepi32_ps(x); }
typedef __m512i vb, va;
INLINE void load_codes(const uint8_t* p, vb& low, vb& high) {
  const __m512i mask = _mm512_set1_epi32(0x0f0f0f0f);
  __m512i both = _mm512_loadu_si512(p);
  low = _mm512_and_si512(both, mask);
  high = _mm512_and_si512(_mm512_srli_epi32(both, 4), mask);
}
INLINE vb load_quads(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE vb add_bits(vb codes, vb from, int shift, uint8_t mask) {
  vb moved = shift < 0 ? _mm512_slli_epi32(from, -shift) : _mm512_srli_epi32(from, shift);
  return _mm512_or_si512(codes, _mm512_and_si512(moved, _mm512_set1_epi32(mask * 0x01010101)));
}
INLINE vb look_up(const uint8_t* table, vb codes) {
  __m128i one = _mm_load_si128((const __m128i*)table);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(one), codes);
}
INLINE vb set_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return _mm512_set1_epi32(quad);
}
INLINE va no_sums() { return _mm512_setzero_si512(); }
INLINE va dot_codes(va acc, vb codes, vb x) {
  acc = _mm512_dpbusd_epi32(acc, codes, x);
#ifndef ASYNCLLM_EMULATED  // An emulated vector fits into no register.
  // The barrier keeps clang from moving a span's products behind the loads of its scales.
  asm volatile("" : "+v"(acc));
#endif
  return acc;
}
INLINE vi total(va x) { return x; }
INLINE vi load_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
INLINE vi set_integers(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi less_product(vi a, vi b, int32_t x) {
  return _mm512_sub_epi32(a, _mm512_mullo_epi32(b, _mm512_set1_epi32(x)));
}
INLINE vi add_sixteenfold(vi a, vi b) { return _mm512_add_epi32(a, _mm512_slli_epi32(b, 4)); }
INLINE vf round_even(vf x) { return _mm512_roundscale_ps(x, 8); }
INLINE vf scale_by_pow2(vf x, vf n) {
  __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return mul(x, _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23)));
}
INLINE __m256 fold(vf x) {
  return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}
INLINE float hmax(vf x) { return _mm512_reduce_max_ps(x); }
INLINE void sum4(vf a, vf b, vf c, vf d, float* out) {
  __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
INLINE float hsum(vf x) {
  __m256 sums = _mm256_hadd_ps(fold(x), fold(x));
  sums = _mm256_hadd_ps(sums, sums);
  return _mm_cvtss_f32(
      _mm_add_ss(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
