// What the fuzzers share: random numbers, arrays without a byte to spare, comparisons.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "interface.h"

extern std::mt19937_64 engine;
// Digest of the results, to compare two libraries' bits.
extern uint64_t digest;
inline int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(engine);
}
inline double normal() { return std::normal_distribution<double>()(engine); }

[[noreturn]] inline void fail(const std::string& what) {
  fprintf(stderr, "%s\n", what.c_str());
  exit(1);
}

inline float widen_bf16(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float out;
  memcpy(&out, &wide, 4);
  return out;
}
inline double widen_f16(uint16_t bits) {
  double sign = bits & 0x8000 ? -1 : 1, mantissa = bits & 1023;
  int exponent = bits >> 10 & 31;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24));
}

// An array of a dtype on the heap, with nothing behind its last element.
struct Array {
  int32_t dtype;
  int64_t count;
  std::unique_ptr<char[]> bytes;

  Array(int32_t dtype, int64_t count, double scale = 1.0)
      : dtype(dtype), count(count), bytes(new char[size() * (count ? count : 1)]) {
    for (int64_t i = 0; i < count; ++i) set(i, normal() * scale);
  }
  int64_t size() const { return dtype == DTYPE_F32 ? 4 : 2; }
  void* at(int64_t i = 0) { return bytes.get() + i * size(); }
  std::vector<double> row(int64_t first, int64_t length) const {
    std::vector<double> out(length);
    for (int64_t i = 0; i < length; ++i) out[i] = get(first + i);
    return out;
  }
  double get(int64_t i) const {
    if (dtype == DTYPE_F32) {
      float x;
      memcpy(&x, bytes.get() + 4 * i, 4);
      return x;
    }
    uint16_t bits;
    memcpy(&bits, bytes.get() + 2 * i, 2);
    return dtype == DTYPE_BF16 ? widen_bf16(bits) : widen_f16(bits);
  }
  // Truncates: any value will do as an input.
  void set(int64_t i, double value) {
    float x = float(value);
    uint32_t wide;
    memcpy(&wide, &x, 4);
    uint16_t bits = uint16_t(wide >> 16);
    if (dtype == DTYPE_F16) {
      int exponent = int(wide >> 23 & 255) - 112;
      bits = uint16_t(wide >> 16 & 0x8000);
      if (exponent > 0 && exponent < 31) bits |= uint16_t(exponent << 10 | (wide >> 13 & 1023));
    }
    if (dtype == DTYPE_F32)
      memcpy(bytes.get() + 4 * i, &x, 4);
    else
      memcpy(bytes.get() + 2 * i, &bits, 2);
  }
  void fill_nan() {
    for (int64_t i = 0; i < count; ++i) {
      if (dtype == DTYPE_F16) {
        uint16_t bits = 0x7e00;
        memcpy(bytes.get() + 2 * i, &bits, 2);
      } else {
        set(i, NAN);
      }
    }
  }
};

inline void note(double result) {
  uint64_t bits;
  memcpy(&bits, &result, sizeof(bits));
  digest = ((digest << 29 | digest >> 35) ^ bits) * 0x100000001b3u;
}
inline void expect(const Array& found, int64_t at, double wanted, const char* op, double more = 0) {
  double value = found.get(at), bound = found.dtype == DTYPE_F32    ? 2e-5
                                        : found.dtype == DTYPE_BF16 ? 2e-2
                                                                    : 4e-3;
  note(value);
  if (!(fabs(value - wanted) <= bound * (1 + fabs(wanted)) + more))
    fail(std::string(op) + ": " + std::to_string(value) + ", expected " + std::to_string(wanted));
}
// A row as kernels round it to 8 bits.
inline std::vector<double> rounded_in_spans(std::vector<double> x) {
  for (size_t start = 0; start < x.size(); start += SPAN) {
    size_t end = std::min<size_t>(x.size(), start + SPAN);
    float largest = 0;
    for (size_t i = start; i < end; ++i) largest = std::max(largest, fabsf(float(x[i])));
    float factor = largest > 1e-30f ? 127.0f / largest : 0.0f;
    for (size_t i = start; i < end; ++i)
      x[i] = double(rintf(float(x[i]) * factor)) * double(largest / 127.0f);
  }
  return x;
}
// Whether kernels round rows so for int8 weights with a scale per output.
inline bool rounds_int8_in_spans(const Context* context) {
  return !strncmp(asyncllm_isa(context), "avx512", 6);
}
inline void expect_ok(int32_t status, const char* op) {
  if (status) fail(std::string(op) + ": status " + std::to_string(status));
}

// Of the ops of sampling.
void fuzz_sampling(Context* context, int32_t dtype);
