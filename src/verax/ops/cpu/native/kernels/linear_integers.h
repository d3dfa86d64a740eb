// x in integers with a scale, for processors that multiply integers with each other. Included by the linear kernels.
#pragma once

#include "vec.h"

#ifdef VERAX_INTEGER_DOT

namespace verax {
namespace VERAX_LEVEL {
namespace {

// The largest of 16 bits: 127 * 256 + 127, two digits of 8 bits.
constexpr float LARGEST_INTEGER = 32639;

// The scale by which integers of at most `largest` hold `count` values. NaN if a value is not finite, so that every
// output which that value has a part in is NaN.
inline float integer_scale(const float* x, int64_t count, float largest) {
  __m512 peaks = _mm512_setzero_ps(), wrong = peaks;
  for (int64_t i = 0; i < count; i += 16) {
    const auto mask = static_cast<__mmask16>(count - i < 16 ? (1 << (count - i)) - 1 : 0xFFFF);
    const __m512 values = _mm512_maskz_loadu_ps(mask, x + i);
    peaks = _mm512_max_ps(_mm512_abs_ps(values), peaks);
    wrong = _mm512_fmadd_ps(values, _mm512_setzero_ps(), wrong);  // NaN where a value is not finite
  }
  return _mm512_reduce_max_ps(peaks) / largest + _mm512_reduce_add_ps(wrong);
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
