// y = (x - mean) / sqrt(variance + eps) * weight + bias by rows, of x or of the sum of x and a residual.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

struct LayerNormTask {
  int64_t D;
  const float *x, *residual;   // [M, D]; the residual is null if there is none
  const void *weight, *bias;   // [D]
  bool bf16_weights;           // else float32
  float eps;
  float* y;                    // [M, D]
};

// Rows [begin, end).
VERAX_DECLARE_KERNEL(layer_norm, const LayerNormTask& task, int64_t begin, int64_t end)

}  // namespace verax
