#include "kernels.h"
#include <immintrin.h>
namespace {
#include "simd.h"
#include "simd_avx2.h"
#include "kernels_body.h"
}  // namespace

extern const Kernels kernels_avx2 = KERNELS("avx2");
