#include "kernels.h"
#include <immintrin.h>
namespace {
#include "simd.h"
#include "simd_avx512.h"
#include "kernels_body.h"
}  // namespace

extern const Kernels kernels_avx512 = KERNELS("avx512");
