// x in integers with a scale, for processors that multiply integers with each other. Included by the linear kernels.
#pragma once

#include <cfloat>
#include <cmath>
#include <limits>

#include "vec.h"

#ifdef VERAX_INTEGER_DOT

namespace verax {
namespace VERAX_LEVEL {
namespace {

// The scale by which integers of at most `largest` hold `count` values. NaN if a value is not finite, so that every
// output which that value has a part in is NaN.
inline float integer_scale(const float* x, int64_t count, float largest) {
  float peak = 0;
  int wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float size = std::fabs(x[i]);
    peak = size > peak ? size : peak;
    wrong |= !(size <= FLT_MAX);
  }
  return wrong ? std::numeric_limits<float>::quiet_NaN() : peak / largest;
}

// What to multiply values by to get their integers: 0 where the inverse of a scale would not be finite.
inline float integer_factor(float scale) { return scale > 1e-37f ? 1 / scale : 0; }

// 16 values as integers, to nearest; values from `count` on are zeros.
inline __m512i integers(const float* x, int64_t count, float factor) {
  const auto mask = static_cast<__mmask16>(count < 16 ? (1 << (count < 0 ? 0 : count)) - 1 : 0xFFFF);
  return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x), _mm512_set1_ps(factor)));
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax

#endif
