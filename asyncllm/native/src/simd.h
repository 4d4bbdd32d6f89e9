// Vector types and functions that every simd_*.h defines; included into an anonymous namespace.
//
//   W, ROWS, NV        floats per vector; rows per register tile; vectors per panel
//   zero set1 load store add sub mul div fma vmax
//   store(int8*, x)             x is of integers from -128 to 127
//   at_least(value, x, limit)   value where x is not below limit (NaN is not), else 0
//   load_pair(bf16*, a, b)      two vectors whose elements are interleaved in memory
//   vi, to_floats      W integers of 32 bits
//   vs, zero_integers load_shorts(int8*) set_pair(int16*)    W pairs of 16 bits; unless BYTE_PRODUCTS
//   dot_shorts(acc, a, b)       acc plus the two products of each pair; unless BYTE_PRODUCTS
//   vb, va             W quads of 4 bytes; W sums of quads' products, wide enough for the sum over
//                      a span of 4-bit values
//   load_codes(p, low, high)    the low and the high 4 bits of 4 W bytes
//   load_quads(uint8*)          W quads of bytes
//   add_bits(codes, x, shift, mask)    codes, or the bits of x, shifted right (left if shift is
//                      negative), that are in the mask; for each byte
//   look_up(uint8*, codes)      elements of an aligned table of 16 bytes
//   set_quad(int8*) no_sums dot_codes(acc, codes, x) total(va)
//   BYTE_PRODUCTS      defined if va is vi, and dot_codes sums products of 8-bit codes exactly
//   load_bytes(uint8*) set_integers less_product(a, b, x) add_sixteenfold(a, b)    on vi
//   round_even, scale_by_pow2(x, n)    n integral, within a normal float's exponents
//   hmax hsum sum4              sum4 is hsum of four vectors, with the same bits
#define INLINE static inline __attribute__((always_inline))

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

INLINE float bits_to_float(uint32_t bits) {
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}
INLINE uint32_t float_to_bits(float x) {
  uint32_t out;
  __builtin_memcpy(&out, &x, 4);
  return out;
}

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) { return bits_to_float((uint32_t)x.bits << 16); }
INLINE float widen(f16 x) {
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31;
  uint32_t mantissa = x.bits & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | mantissa << 13);
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  float small = (float)mantissa * 0x1p-24f;
  return sign ? -small : small;
}

INLINE void narrow(float x, float* out) { *out = x; }
INLINE void narrow(float x, bf16* out) {
  uint32_t bits = float_to_bits(x);
  out->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
INLINE void narrow(float x, f16* out) {
  uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) {
    out->bits = 0x7e00;
  } else if (size >= 0x477ff000) {
    out->bits = (uint16_t)(sign | 0x7c00);
  } else if (size < 0x38800000) {
    // Subnormal float16: adding 0.5 rounds to the last bit that such a float16 has.
    uint32_t rounded = float_to_bits(bits_to_float(size) + 0.5f) - float_to_bits(0.5f);
    out->bits = (uint16_t)(sign | rounded);
  } else {
    uint32_t rounded = size + 0xfff + (size >> 13 & 1);
    out->bits = (uint16_t)(sign | (rounded - 0x38000000) >> 13);
  }
}
