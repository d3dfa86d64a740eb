// y = x / sqrt(mean(x^2) + eps) * weight by rows.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

struct RmsNormTask {
  int64_t D;
  const float* x;      // [M, D]
  const void* weight;  // [D]
  bool weight_bf16;    // else float32
  float eps;
  float* y;            // [M, D]
};

// Rows [begin, end).
VERAX_DECLARE_KERNEL(rms_norm, const RmsNormTask& task, int64_t begin, int64_t end)

}  // namespace verax
