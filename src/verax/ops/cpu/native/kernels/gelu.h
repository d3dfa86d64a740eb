// y = x / 2 (1 + erf(x / sqrt 2)) by elements.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

struct GeluTask {
  const float* x;
  float* y;
};

// Elements [begin, end).
VERAX_DECLARE_KERNEL(gelu, const GeluTask& task, int64_t begin, int64_t end)

}  // namespace verax
