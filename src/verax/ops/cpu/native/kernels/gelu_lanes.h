// y = max(x, 0) - |x| / 2 erfc(|x| / sqrt 2) in each lane, which is GELU.
//
// erfc(a) = exp(-a^2) t P(t) with t = 1 / (1 + 0.4 a), the form of Abramowitz and Stegun (1964), 7.1.26. P is fitted here,
// for the least absolute error of y: 1.4e-8, and 2.4e-7 with the rounding of float32. No digits cancel where x < 0.
//
// And its approximation x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as x times a logistic function.
#pragma once

#include "silu_lanes.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

inline F32 gelu_of(F32 x) {
  constexpr float most = 20;  // from here on erfc is 0, and infinity times it would be NaN
  const F32 magnitude = max(sub(zero(), x), x), size = sub(zero(), max(broadcast(-most), sub(zero(), magnitude)));
  constexpr float sqrt_half = 0.70710678f, half_log2_e = 0.72134752f;
  const F32 t = div(broadcast(1), fma(size, broadcast(0.4f * sqrt_half), broadcast(1)));
  constexpr float rest[] = {0.71870422f, -0.38708318f, 0.48182311f, 0.15620637f, 0.23284424f};
  F32 p = broadcast(-0.20249451f);
  for (float coefficient : rest) p = fma(p, t, broadcast(coefficient));
  const F32 power = exp2(mul(mul(size, size), broadcast(-half_log2_e)));
  return fma(mul(mul(size, broadcast(-0.5f)), mul(t, p)), power, max(zero(), x));
}

inline F32 gelu_tanh_of(F32 x) {
  constexpr float twice_sqrt = 1.59576912f;  // 2 sqrt(2 / pi)
  const F32 slope = fma(mul(x, x), broadcast(0.044715f * twice_sqrt), broadcast(twice_sqrt));
  return div(x, one_more(mul(x, slope)));
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
