// The AVX-512 intrinsics of simd_avx512.h in halves of AVX2, to run its kernels on processors
// that lack them. Included ahead of everything by the compiler's command line.
//
// What they compute is Intel's description (Intrinsics Guide); vdpbf16ps adds the odd pair first,
// takes subnormal inputs and results for 0, and rounds to nearest. Only what the kernels use is here.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define EMULATED static inline __attribute__((always_inline, unused))

struct emulated_ps {
  __m256 low, high;
};
struct emulated_si {
  __m256i low, high;
};

#define HALVES_1(type, name, op) \
  EMULATED type name(type a) { return {op(a.low), op(a.high)}; }
#define HALVES_2(type, name, op) \
  EMULATED type name(type a, type b) { return {op(a.low, b.low), op(a.high, b.high)}; }

HALVES_2(emulated_ps, emulated_add_ps, _mm256_add_ps)
HALVES_2(emulated_ps, emulated_sub_ps, _mm256_sub_ps)
HALVES_2(emulated_ps, emulated_mul_ps, _mm256_mul_ps)
HALVES_2(emulated_ps, emulated_div_ps, _mm256_div_ps)
HALVES_2(emulated_ps, emulated_max_ps, _mm256_max_ps)
HALVES_2(emulated_si, emulated_add_epi32, _mm256_add_epi32)
HALVES_2(emulated_si, emulated_sub_epi32, _mm256_sub_epi32)
HALVES_2(emulated_si, emulated_mullo_epi32, _mm256_mullo_epi32)
HALVES_2(emulated_si, emulated_and_si512, _mm256_and_si256)
HALVES_2(emulated_si, emulated_or_si512, _mm256_or_si256)
HALVES_2(emulated_si, emulated_shuffle_epi8, _mm256_shuffle_epi8)
EMULATED emulated_si emulated_broadcast_i32x4(__m128i x) {
  return {_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x)};
}

EMULATED emulated_ps emulated_set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
EMULATED emulated_si emulated_set1_epi32(int x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
EMULATED emulated_ps emulated_loadu_ps(const void* p) {
  const float* from = (const float*)p;
  return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
EMULATED emulated_si emulated_loadu_si512(const void* p) {
  const __m256i* from = (const __m256i*)p;
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
EMULATED void emulated_storeu_ps(void* p, emulated_ps x) {
  _mm256_storeu_ps((float*)p, x.low);
  _mm256_storeu_ps((float*)p + 8, x.high);
}
EMULATED emulated_ps emulated_fmadd_ps(emulated_ps a, emulated_ps b, emulated_ps c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
EMULATED emulated_si emulated_castps_si512(emulated_ps x) {
  return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}
EMULATED emulated_ps emulated_castsi512_ps(emulated_si x) {
  return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}
EMULATED emulated_si emulated_slli_epi32(emulated_si x, unsigned count) {
  return {_mm256_slli_epi32(x.low, (int)count), _mm256_slli_epi32(x.high, (int)count)};
}
EMULATED emulated_si emulated_srli_epi32(emulated_si x, unsigned count) {
  return {_mm256_srli_epi32(x.low, (int)count), _mm256_srli_epi32(x.high, (int)count)};
}
EMULATED emulated_si emulated_cvtepu16_epi32(__m256i x) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}
EMULATED __m256i emulated_cvtepi32_epi16(emulated_si x) {
  int32_t wide[16];
  int16_t narrow[16];
  __builtin_memcpy(wide, &x, 64);
  for (int i = 0; i < 16; ++i) narrow[i] = (int16_t)wide[i];
  return _mm256_loadu_si256((const __m256i*)narrow);
}
EMULATED __m128i emulated_cvtepi32_epi8(emulated_si x) {
  int32_t wide[16];
  int8_t narrow[16];
  __builtin_memcpy(wide, &x, 64);
  for (int i = 0; i < 16; ++i) narrow[i] = (int8_t)wide[i];
  return _mm_loadu_si128((const __m128i*)narrow);
}
EMULATED emulated_ps emulated_cvtph_ps(__m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
EMULATED emulated_ps emulated_cvtepi32_ps(emulated_si x) {
  return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
EMULATED emulated_si emulated_cvtps_epi32(emulated_ps x) {
  return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)};
}
EMULATED uint16_t emulated_mask(__m256 low, __m256 high) {
  return (uint16_t)(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}
EMULATED emulated_si emulated_mask_mov_epi32(emulated_si kept, uint16_t mask, emulated_si taken) {
  int32_t a[16], b[16];
  __builtin_memcpy(a, &kept, 64);
  __builtin_memcpy(b, &taken, 64);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) a[i] = b[i];
  __builtin_memcpy(&kept, a, 64);
  return kept;
}
EMULATED emulated_ps emulated_maskz_mov_ps(uint16_t mask, emulated_ps x) {
  emulated_si zero = emulated_set1_epi32(0);
  return emulated_castsi512_ps(emulated_mask_mov_epi32(zero, mask, emulated_castps_si512(x)));
}
EMULATED float emulated_reduce_max_ps(emulated_ps x) {
  __m256 eight = _mm256_max_ps(x.high, x.low);
  __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  __m128 two = _mm_max_ps(four, _mm_shuffle_ps(four, four, _MM_SHUFFLE(1, 0, 3, 2)));
  return _mm_cvtss_f32(_mm_max_ps(two, _mm_shuffle_ps(two, two, _MM_SHUFFLE(2, 3, 0, 1))));
}
EMULATED emulated_si emulated_cvtepu8_epi32(__m128i x) {
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
EMULATED emulated_si emulated_dpbusd_epi32(emulated_si acc, emulated_si a, emulated_si b) {
  int32_t sums[16];
  uint8_t x[64];
  int8_t y[64];
  __builtin_memcpy(sums, &acc, 64);
  __builtin_memcpy(x, &a, 64);
  __builtin_memcpy(y, &b, 64);
  for (int i = 0; i < 64; ++i) sums[i / 4] += x[i] * y[i];
  __builtin_memcpy(&acc, sums, 64);
  return acc;
}
EMULATED float emulated_flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? 0.0f : x; }
EMULATED float emulated_bfloat16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float x;
  __builtin_memcpy(&x, &wide, 4);
  return emulated_flush(x);
}
EMULATED emulated_ps emulated_dpbf16_ps(emulated_ps acc, emulated_si a, emulated_si b) {
  float sums[16];
  uint16_t x[32], y[32];
  __builtin_memcpy(sums, &acc, 64);
  __builtin_memcpy(x, &a, 64);
  __builtin_memcpy(y, &b, 64);
  for (int i = 0; i < 16; ++i)
    for (int odd = 1; odd >= 0; --odd)
      sums[i] = emulated_flush(__builtin_fmaf(emulated_bfloat16(x[2 * i + odd]),
                                              emulated_bfloat16(y[2 * i + odd]),
                                              emulated_flush(sums[i])));
  __builtin_memcpy(&acc, sums, 64);
  return acc;
}

#define __m512 emulated_ps
#define __m512i emulated_si
#define __m512bh emulated_si
#define __mmask16 uint16_t
#define _mm512_add_epi32 emulated_add_epi32
#define _mm512_add_ps emulated_add_ps
#define _mm512_and_si512 emulated_and_si512
#define _mm512_broadcast_i32x4 emulated_broadcast_i32x4
#define _mm512_castps512_ps256(x) ((x).low)
#define _mm512_castps_si512 emulated_castps_si512
#define _mm512_castsi512_ps emulated_castsi512_ps
#define _mm512_cmp_ps_mask(a, b, op) \
  emulated_mask(_mm256_cmp_ps((a).low, (b).low, op), _mm256_cmp_ps((a).high, (b).high, op))
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_cvtps_ph(x, rounding)                                               \
  _mm256_set_m128i(_mm256_cvtps_ph((x).high, rounding), _mm256_cvtps_ph((x).low, rounding))
#define _mm512_div_ps emulated_div_ps
#define _mm512_dpbf16_ps emulated_dpbf16_ps
#define _mm512_dpbusd_epi32 emulated_dpbusd_epi32
#define _mm512_extractf32x8_ps(x, half) ((half) ? (x).high : (x).low)
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_loadu_ps emulated_loadu_ps
#define _mm512_loadu_si512 emulated_loadu_si512
#define _mm512_mask_mov_epi32 emulated_mask_mov_epi32
#define _mm512_maskz_mov_ps emulated_maskz_mov_ps
#define _mm512_max_ps emulated_max_ps
#define _mm512_mul_ps emulated_mul_ps
#define _mm512_mullo_epi32 emulated_mullo_epi32
#define _mm512_or_si512 emulated_or_si512
#define _mm512_reduce_max_ps emulated_reduce_max_ps
#define _mm512_roundscale_ps(x, mode) \
  emulated_ps { _mm256_round_ps((x).low, mode), _mm256_round_ps((x).high, mode) }
#define _mm512_set1_epi32 emulated_set1_epi32
#define _mm512_set1_ps emulated_set1_ps
#define _mm512_setzero_ps() emulated_set1_ps(0)
#define _mm512_setzero_si512() emulated_set1_epi32(0)
#define _mm512_shuffle_epi8 emulated_shuffle_epi8
#define _mm512_slli_epi32 emulated_slli_epi32
#define _mm512_srli_epi32 emulated_srli_epi32
#define _mm512_storeu_ps emulated_storeu_ps
#define _mm512_sub_ps emulated_sub_ps
#define _mm512_sub_epi32 emulated_sub_epi32
