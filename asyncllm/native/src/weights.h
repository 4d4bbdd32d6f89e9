// The packed weight of a linear layer.
#pragma once
#include "context.h"

// Owner of the panels' memory: the weights, which allocated or mapped it, or another object.
enum class Memory { allocated, mapped, borrowed };

struct Weights {
  PackedView view;
  const Kernels* kernels;
  int64_t bytes;
  Memory memory;
};

// Largest integer to which the elements of a row [k] may be rounded, if the sum of their products
// with 8-bit weights has to fit 32 bits.
inline float largest_integer(int64_t k) { return float(least(32767, INT32_MAX / (127 * k))); }
