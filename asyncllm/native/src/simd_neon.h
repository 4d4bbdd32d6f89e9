// NEON, which every 64-bit ARM processor has.
enum { W = 4, ROWS = 4, NV = 4 };
typedef float32x4_t vf;
typedef int32x4_t vi;
typedef int16x8_t vs;
INLINE vf zero() { return vdupq_n_f32(0.0f); }
INLINE vf set1(float x) { return vdupq_n_f32(x); }
INLINE vf load(const float* p) { return vld1q_f32(p); }
INLINE vf load(const bf16* p) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16((const uint16_t*)p)), 16));
}
INLINE vf load(const f16* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
}
INLINE void store(float* p, vf x) { vst1q_f32(p, x); }
INLINE void store(bf16* p, vf x) {
  uint32x4_t bits = vreinterpretq_u32_f32(x);
  uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  rounded = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
  vst1_u16((uint16_t*)p, vshrn_n_u32(rounded, 16));
}
INLINE void store(f16* p, vf x) {
  vst1_u16((uint16_t*)p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
INLINE void store(int8_t* p, vf x) {
  int16x4_t both = vmovn_s32(vcvtq_s32_f32(x));
  uint32_t four = vget_lane_u32(vreinterpret_u32_s8(vmovn_s16(vcombine_s16(both, both))), 0);
  __builtin_memcpy(p, &four, 4);
}
INLINE vf add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf div(vf a, vf b) { return vdivq_f32(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE vf vmax(vf a, vf b) { return vmaxq_f32(a, b); }
INLINE vf at_least(vf value, vf x, float limit) {
  uint32x4_t below = vcltq_f32(x, vdupq_n_f32(limit));
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), below));
}
INLINE void load_pair(const bf16* p, vf& a, vf& b) {
  uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16((const uint16_t*)p));
  a = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
  b = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000)));
}
INLINE vi zero_integers() { return vdupq_n_s32(0); }
INLINE vs load_shorts(const int8_t* p) { return vmovl_s8(vld1_s8(p)); }
INLINE vs set_pair(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return vreinterpretq_s16_s32(vdupq_n_s32(pair));
}
INLINE vi dot_shorts(vi acc, vs a, vs b) {
  int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
  return vaddq_s32(acc, vpaddq_s32(low, vmull_high_s16(a, b)));
}
INLINE vf to_floats(vi x) { return vcvtq_f32_s32(x); }
typedef int8x16_t vb;
struct va { int16x8_t low, high; };
INLINE void load_codes(const uint8_t* p, vb& low, vb& high) {
  uint8x16_t both = vld1q_u8(p);
  low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
  high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
}
INLINE vb load_quads(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
INLINE vb add_bits(vb codes, vb from, int shift, uint8_t mask) {
  uint8x16_t moved = vshlq_u8(vreinterpretq_u8_s8(from), vdupq_n_s8((int8_t)-shift));
  return vorrq_s8(codes, vreinterpretq_s8_u8(vandq_u8(moved, vdupq_n_u8(mask))));
}
INLINE vb look_up(const uint8_t* table, vb codes) {
  return vreinterpretq_s8_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_s8(codes)));
}
INLINE vb set_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}
INLINE va no_sums() { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
INLINE va dot_codes(va acc, vb codes, vb x) {
  return {vmlal_s8(acc.low, vget_low_s8(codes), vget_low_s8(x)), vmlal_high_s8(acc.high, codes, x)};
}
INLINE vi total(va x) { return vpaddq_s32(vpaddlq_s16(x.low), vpaddlq_s16(x.high)); }
INLINE vi load_bytes(const uint8_t* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, 4);
  uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
}
INLINE vi set_integers(int32_t x) { return vdupq_n_s32(x); }
INLINE vi less_product(vi a, vi b, int32_t x) { return vmlsq_n_s32(a, b, x); }
INLINE vi add_sixteenfold(vi a, vi b) { return vaddq_s32(a, vshlq_n_s32(b, 4)); }
INLINE vf round_even(vf x) { return vrndnq_f32(x); }
INLINE vf scale_by_pow2(vf x, vf n) {
  int32x4_t biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  return mul(x, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
}
INLINE float hmax(vf x) { return vmaxvq_f32(x); }
INLINE float hsum(vf x) {
  vf pairs = vpaddq_f32(x, x);
  return vgetq_lane_f32(vpaddq_f32(pairs, pairs), 0);
}
INLINE void sum4(vf a, vf b, vf c, vf d, float* out) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
