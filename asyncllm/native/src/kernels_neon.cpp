#include "kernels.h"
#include <arm_neon.h>
namespace {
#include "simd.h"
#include "simd_neon.h"
#include "kernels_body.h"
}  // namespace

extern const Kernels kernels_neon = KERNELS("neon");
