#include "kernels.h"
#include <immintrin.h>
#define PAIRED_BFLOAT16
namespace {
#include "simd.h"
#include "simd_avx512.h"
#include "kernels_body.h"
}  // namespace

extern const Kernels kernels_avx512bf16 = KERNELS("avx512bf16");
