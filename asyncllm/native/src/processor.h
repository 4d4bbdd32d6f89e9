// The instruction sets of an x86-64 processor whose registers the operating system keeps.
#pragma once
#include <cpuid.h>
#include <stdint.h>

struct InstructionSets {
  bool avx2, avx512, avx512bf16;
};

// Queries the processor. The compiler's runtime could, but a cross-compiled library has none.
inline InstructionSets ask_processor() {
#if defined(ASYNCLLM_EMULATED)
  return {true, true, true};
#endif
  InstructionSets found = {};
  uint32_t a, b, c, d;
  constexpr uint32_t FMA = 1u << 12, OSXSAVE = 1u << 27, AVX = 1u << 28, F16C = 1u << 29;
  constexpr uint32_t FIRST = FMA | OSXSAVE | AVX | F16C;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & FIRST) != FIRST) return found;
  uint32_t kept, high;
  asm volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  constexpr uint32_t YMM = 0x06, AVX2 = 1u << 5;
  found.avx2 = (kept & YMM) == YMM && (b & AVX2);
  constexpr uint32_t ZMM = 0xe6, VNNI = 1u << 11, BF16 = 1u << 5;
  constexpr uint32_t F_DQ_BW_VL = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  found.avx512 = found.avx2 && (kept & ZMM) == ZMM && (b & F_DQ_BW_VL) == F_DQ_BW_VL && (c & VNNI);
  found.avx512bf16 = found.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & BF16);
  return found;
}
