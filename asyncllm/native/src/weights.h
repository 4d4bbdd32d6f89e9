// The packed weight of a linear layer.
#pragma once
#include "context.h"

struct Weights {
  PackedView view;
  const Kernels* kernels;
  int64_t bytes;
  bool mapped;
};

// The largest integers that rows of k elements may be rounded to: no sum of their products with
// weights of 8 bits leaves 32 bits.
inline float largest_integer(int64_t k) { return float(least(32767, INT32_MAX / (127 * k))); }
