// y = x / sqrt(mean(x^2) + eps) * weight by rows, or SiLU of it.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

struct RmsNormTask {
  int64_t D;
  const void* x;       // [M, D]
  bool x_bf16;         // else float32, as for the weight and y
  const void* weight;  // [D]
  bool weight_bf16;
  float eps;
  bool silu;
  void* y;             // [M, D]
  bool y_bf16;
};

// Rows [begin, end).
VERAX_DECLARE_KERNEL(rms_norm, const RmsNormTask& task, int64_t begin, int64_t end)

// Heads, normalised by themselves; then the halves (x1, x2) of their first 2 h numbers are rotated to
// (x1 cos - x2 sin, x2 cos + x1 sin).
struct NormRotaryTask {
  RmsNormTask norm;  // of rows that are heads, M = tokens * heads; x and y are float32
  int64_t heads, h;
  const float *cos, *sin;  // [tokens, h]
};

// Heads [begin, end).
VERAX_DECLARE_KERNEL(norm_rotary, const NormRotaryTask& task, int64_t begin, int64_t end)

}  // namespace verax
