// x / (1 + e^-x) in each lane, which is SiLU.
#pragma once

#include "vec_math.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// 1 + e^-x, finite.
inline F32 one_more(F32 x) {
  constexpr float log2_e = 1.44269504f;
  const F32 y = max(mul(x, broadcast(log2_e)), broadcast(-126));
  return add(broadcast(1), exp2(sub(zero(), y)));
}

inline F32 silu_of(F32 x) { return div(x, one_more(x)); }

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
