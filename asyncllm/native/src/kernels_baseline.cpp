#include "kernels.h"

namespace {
#include "simd.h"
#include "simd_baseline.h"
#include "kernels_body.h"
}  // namespace

extern const Kernels kernels_baseline = KERNELS("baseline");
