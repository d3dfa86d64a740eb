// More vector operations for each level, as softmax needs them: maxima, masks, powers of two, transposes.
#pragma once

#include "vec.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// For each level:
//   sub(a, b), div(a, b), max(a, b): by lane. Where a is NaN, max is b; where b is NaN, it is b on x86.
//   largest_lane(a): the largest lane.
//   pick(sign, a, b): lanes of b where `sign` has its sign bit set, of a elsewhere.
//   whole(x): to the nearest integer; power(n): 2^n for integers -127 <= n < 128, where 2^-127 counts as 0.
//   transpose(x): F32::lanes registers as a square matrix; moves bits, whatever they stand for.
//   join<n>(a, b): each holds partial sums of n numbers in its lanes; what is returned, of those 2 n. Joining
//     F32::lanes registers pair by pair, n = 1, 2, 4 ..., gives the sum of each register in the lane of its number.

#if defined(VERAX_PORTABLE)

inline F32 sub(const F32& a, const F32& b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F32 div(const F32& a, const F32& b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline F32 max(const F32& a, const F32& b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline float largest_lane(const F32& a) {
  float most = a.v[0];
  for (int i = 1; i < F32::lanes; ++i) most = a.v[i] > most ? a.v[i] : most;
  return most;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline F32 pick(const F32& sign, const F32& a, const F32& b) {
  return each([&](int i) { return bits_of(sign.v[i]) >> 31 ? b.v[i] : a.v[i]; });
}
// Added to a small number, it leaves no bits for a fraction, and the integer in the low bits of the mantissa.
constexpr float ROUNDER = 12582912;  // 1.5 x 2^23
inline F32 whole(const F32& x) {
  return each([&](int i) { return (x.v[i] + ROUNDER) - ROUNDER; });
}
inline F32 power(const F32& n) {
  return each([&](int i) {
    const uint32_t bits = (bits_of(n.v[i] + ROUNDER) - bits_of(ROUNDER) + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  });
}
inline void transpose(F32 (&x)[F32::lanes]) {
  for (int i = 0; i < F32::lanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float other = x[i].v[j];
      x[i].v[j] = x[j].v[i];
      x[j].v[i] = other;
    }
  }
}
template <int n>
inline F32 join(const F32& a, const F32& b) {
  return each([&](int i) {
    const float* from = (i % (2 * n) < n ? a.v : b.v) + i / (2 * n) * (2 * n) + i % n;
    return from[0] + from[n];
  });
}

#elif defined(__AVX512F__)

inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline float largest_lane(F32 a) { return _mm512_reduce_max_ps(a.v); }
inline F32 pick(F32 sign, F32 a, F32 b) {
  return {_mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign.v)), a.v, b.v)};
}
inline F32 whole(F32 x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F32 power(F32 n) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
inline void transpose(F32 (&x)[16]) {
  __m512 pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    pairs[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  // quads[4 i + c]: in its 128-bit part p, column 4 p + c of rows 4 i to 4 i + 3
  for (int i = 0; i < 16; i += 4) {
    for (int c = 0; c < 4; c += 2) {
      const __m512d low = _mm512_castps_pd(pairs[i + c / 2]), high = _mm512_castps_pd(pairs[i + 2 + c / 2]);
      quads[i + c] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      quads[i + c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 even_low = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xdd);
    const __m512 even_high = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xdd);
    x[c].v = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    x[4 + c].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    x[8 + c].v = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    x[12 + c].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}
template <int n>
inline F32 join(F32 a, F32 b) {
  if constexpr (n == 1) {
    return {_mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v))};
  } else if constexpr (n == 2) {
    const __m512d x = _mm512_castps_pd(a.v), y = _mm512_castps_pd(b.v);
    return {_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)))};
  } else {
    return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x88), _mm512_shuffle_f32x4(a.v, b.v, 0xdd))};
  }
}

#elif defined(__AVX2__)

inline F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline float largest_lane(F32 a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline F32 pick(F32 sign, F32 a, F32 b) { return {_mm256_blendv_ps(a.v, b.v, sign.v)}; }
inline F32 whole(F32 x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F32 power(F32 n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
}
inline void transpose(F32 (&x)[8]) {
  __m256 pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(x[i].v, x[i + 1].v);
    pairs[i + 1] = _mm256_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  // quads[4 i + c]: in its 128-bit half p, column 4 p + c of rows 4 i to 4 i + 3
  for (int i = 0; i < 8; i += 4) {
    for (int c = 0; c < 4; c += 2) {
      const __m256d low = _mm256_castps_pd(pairs[i + c / 2]), high = _mm256_castps_pd(pairs[i + 2 + c / 2]);
      quads[i + c] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
      quads[i + c + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
    }
  }
  for (int c = 0; c < 4; ++c) {
    x[c].v = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x20);
    x[4 + c].v = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x31);
  }
}
template <int n>
inline F32 join(F32 a, F32 b) {
  if constexpr (n == 1) {
    return {_mm256_add_ps(_mm256_unpacklo_ps(a.v, b.v), _mm256_unpackhi_ps(a.v, b.v))};
  } else if constexpr (n == 2) {
    const __m256d x = _mm256_castps_pd(a.v), y = _mm256_castps_pd(b.v);
    return {_mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)))};
  } else {
    return {_mm256_add_ps(_mm256_permute2f128_ps(a.v, b.v, 0x20), _mm256_permute2f128_ps(a.v, b.v, 0x31))};
  }
}

#elif defined(__ARM_NEON)

inline F32 sub(F32 a, F32 b) { return {vsubq_f32(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {vdivq_f32(a.v, b.v)}; }
inline F32 max(F32 a, F32 b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
inline float largest_lane(F32 a) { return vmaxvq_f32(a.v); }
inline F32 pick(F32 sign, F32 a, F32 b) {
  return {vbslq_f32(vcltzq_s32(vreinterpretq_s32_f32(sign.v)), b.v, a.v)};
}
inline F32 whole(F32 x) { return {vrndnq_f32(x.v)}; }
inline F32 power(F32 n) {
  return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v), vdupq_n_s32(127)), 23))};
}
inline void transpose(F32 (&x)[4]) {
  const float32x4x2_t low = vtrnq_f32(x[0].v, x[1].v), high = vtrnq_f32(x[2].v, x[3].v);
  x[0].v = vcombine_f32(vget_low_f32(low.val[0]), vget_low_f32(high.val[0]));
  x[1].v = vcombine_f32(vget_low_f32(low.val[1]), vget_low_f32(high.val[1]));
  x[2].v = vcombine_f32(vget_high_f32(low.val[0]), vget_high_f32(high.val[0]));
  x[3].v = vcombine_f32(vget_high_f32(low.val[1]), vget_high_f32(high.val[1]));
}
template <int n>
inline F32 join(F32 a, F32 b) {
  return {vpaddq_f32(a.v, b.v)};  // twice, this is in order
}

#endif

// 2^x for x < 127, to a unit in the last place; exactly 1 at 0, exactly 0 below -126.5; NaN stays NaN.
// 2^x = 2^n 2^r with |r| <= 1/2, where 2^r = 1 + r g(r): g interpolates (2^r - 1) / r at Chebyshev points.
inline F32 exp2(F32 x) {
  x = max(broadcast(-127), x);
  const F32 n = whole(x), r = sub(x, n);
  constexpr float rest[] = {1.3390867e-3f, 9.6180569e-3f, 5.5503570e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
  F32 g = broadcast(1.5461448e-4f);
  for (float coefficient : rest) g = fma(g, r, broadcast(coefficient));
  return mul(g, power(n));
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
