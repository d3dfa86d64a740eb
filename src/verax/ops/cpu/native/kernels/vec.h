// The few vector operations that kernels are written in, for each level. Included by units in kernels/ only.
//
// F32 is a register of float32. Chunk is 32 float32 values in registers. Bf16Chunk is 32 bfloat16 values, ready for the
// processor's bfloat16 dot product where it has one, and a Chunk elsewhere. Order within a chunk is memory order, so
// that a dot product adds the same terms to the same lanes wherever it is called from.
#pragma once

#include <cstdint>
#include <cstring>

#include "../levels.h"

#if defined(VERAX_PORTABLE)
#elif defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// Before a loop over registers: only when all of it is unrolled do they stay registers.
#if defined(__clang__)
#define VERAX_UNROLL _Pragma("clang loop unroll(full)")
#else
#define VERAX_UNROLL _Pragma("GCC unroll 32")
#endif

namespace verax {

using bf16 = uint16_t;  // the bits
struct half {
  uint16_t bits;
};
struct float8 {  // E4M3: as a half, but for three bits of exponent and of fraction less
  uint8_t bits;
};

constexpr int CHUNK = 32;  // values in a chunk: one AVX-512 register of bfloat16

namespace VERAX_LEVEL {
namespace {

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  const uint32_t bits = uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To nearest, ties to even; a NaN stays one.
inline bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float widen(half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 0x1p-24f;
  const uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void prefetch(const void* at) { __builtin_prefetch(at); }
// Cache lines of `count` values that will be written.
template <class Element>
inline void prefetch_row(Element* at, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(Element)) __builtin_prefetch(at + i, 1);
  __builtin_prefetch(at + count - 1, 1);
}

#if defined(VERAX_PORTABLE)

// Plain loops, of a length that compilers turn into whatever vectors the target has.
struct F32 {
  static constexpr int lanes = 8;
  float v[8];
};
template <typename Lane>
inline F32 each(Lane lane) {
  F32 result;
  for (int i = 0; i < F32::lanes; ++i) result.v[i] = lane(i);
  return result;
}
inline F32 broadcast(float x) {
  return each([=](int) { return x; });
}
inline F32 zero() { return broadcast(0); }
inline F32 load(const float* p) {
  return each([=](int i) { return p[i]; });
}
inline F32 load(const bf16* p) {
  return each([=](int i) { return widen(p[i]); });
}
inline F32 load(const int8_t* p) {
  return each([=](int i) { return static_cast<float>(p[i]); });
}
inline F32 load(const half* p) {
  return each([=](int i) { return widen(p[i]); });
}
inline void store(float* p, F32 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F32 add(const F32& a, const F32& b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F32 mul(const F32& a, const F32& b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F32 fma(const F32& a, const F32& b, const F32& c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline float sum(const F32& a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}

#elif defined(__AVX512F__)

struct F32 {
  static constexpr int lanes = 16;
  __m512 v;
};
inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32 load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F32 load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F32 load(const half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Lane i of the result: the sum of the i-th register.
inline __m128 sums_of(F32 a, F32 b, F32 c, F32 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline float sum(F32 a) { return _mm_cvtss_f32(sums_of(a, a, a, a)); }

#elif defined(__AVX2__)

struct F32 {
  static constexpr int lanes = 8;
  __m256 v;
};
inline F32 zero() { return {_mm256_setzero_ps()}; }
inline F32 broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F32 load(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline F32 load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline F32 load(const half* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline void store(float* p, F32 a) { _mm256_storeu_ps(p, a.v); }
inline F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline float sum(F32 a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

#elif defined(__ARM_NEON)

struct F32 {
  static constexpr int lanes = 4;
  float32x4_t v;
};
inline F32 zero() { return {vdupq_n_f32(0)}; }
inline F32 broadcast(float x) { return {vdupq_n_f32(x)}; }
inline F32 load(const float* p) { return {vld1q_f32(p)}; }
inline F32 load(const bf16* p) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))}; }
inline F32 load(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)))};
}
inline F32 load(const half* p) { return {vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(p)))}; }
inline void store(float* p, F32 a) { vst1q_f32(p, a.v); }
inline F32 add(F32 a, F32 b) { return {vaddq_f32(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {vmulq_f32(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline float sum(F32 a) { return vaddvq_f32(a.v); }

#endif

// Stores past the caches, at multiples of a register's size. `end_stream` comes before other threads read.
#if defined(__AVX512F__) && !defined(VERAX_PORTABLE)
inline void stream(float* p, F32 a) { _mm512_stream_ps(p, a.v); }
inline void end_stream() { _mm_sfence(); }
#elif defined(__AVX2__) && !defined(VERAX_PORTABLE)
inline void stream(float* p, F32 a) { _mm256_stream_ps(p, a.v); }
inline void end_stream() { _mm_sfence(); }
#else
inline void stream(float* p, const F32& a) { store(p, a); }
inline void end_stream() {}
#endif

// to[i] = the sum of a[i], the same to the last bit for any N.
template <int N>
inline void sum_each(const F32 (&a)[N], float (&to)[N]) {
#if defined(__AVX512F__) && !defined(VERAX_PORTABLE)
  if constexpr (N == 4) {
    _mm_storeu_ps(to, sums_of(a[0], a[1], a[2], a[3]));
    return;
  }
#endif
  VERAX_UNROLL
  for (int i = 0; i < N; ++i) to[i] = sum(a[i]);
}

struct Chunk {
  static constexpr int parts = CHUNK / F32::lanes;
  F32 part[parts];
};

template <typename T>  // float, bf16, int8_t, half
inline Chunk load_chunk(const T* p) {
  Chunk chunk;
  VERAX_UNROLL
  for (int i = 0; i < Chunk::parts; ++i) chunk.part[i] = load(p + i * F32::lanes);
  return chunk;
}
// The values divided by 256, which is exact: sign, exponent and fraction moved to where a half has them. Not for NaN.
inline Chunk load_chunk(const float8* p) {
  half wide[CHUNK];
  for (int i = 0; i < CHUNK; ++i) {
    wide[i].bits = static_cast<uint16_t>(static_cast<int8_t>(p[i].bits) * 128) & 0xBFFF;
  }
  return load_chunk(wide);
}
inline void store_chunk(float* p, const Chunk& chunk) {
  VERAX_UNROLL
  for (int i = 0; i < Chunk::parts; ++i) store(p + i * F32::lanes, chunk.part[i]);
}
// accumulator + a . b, where each lane of the accumulator takes every F32::lanes-th product, in order.
inline F32 dot(F32 accumulator, const Chunk& a, const Chunk& b) {
  VERAX_UNROLL
  for (int i = 0; i < Chunk::parts; ++i) accumulator = fma(a.part[i], b.part[i], accumulator);
  return accumulator;
}

#if defined(__AVX512BF16__) && !defined(VERAX_PORTABLE)
#define VERAX_BF16_DOT

struct Bf16Chunk {
  using Stored = bf16;  // how a chunk lies in memory between uses
  __m512bh v;
};
inline Bf16Chunk load_bf16_chunk(const bf16* p) {
  const __m512i bits = _mm512_loadu_si512(p);
  return {reinterpret_cast<const __m512bh&>(bits)};
}
inline Bf16Chunk to_bf16_chunk(const Chunk& chunk) {
  return {_mm512_cvtne2ps_pbh(chunk.part[1].v, chunk.part[0].v)};
}
template <typename T>  // float8
inline Bf16Chunk load_bf16_chunk(const T* p) {
  return to_bf16_chunk(load_chunk(p));
}
inline void store_bf16_chunk(bf16* p, const Bf16Chunk& chunk) {
  _mm512_storeu_si512(p, reinterpret_cast<const __m512i&>(chunk.v));
}
inline F32 dot(F32 accumulator, const Bf16Chunk& a, const Bf16Chunk& b) {
  return {_mm512_dpbf16_ps(accumulator.v, a.v, b.v)};
}

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(VERAX_PORTABLE)
#define VERAX_BF16_DOT

struct Bf16Chunk {
  using Stored = bf16;
  bfloat16x8_t v[CHUNK / 8];
};
inline Bf16Chunk load_bf16_chunk(const bf16* p) {
  Bf16Chunk chunk;
  VERAX_UNROLL
  for (int i = 0; i < CHUNK / 8; ++i) chunk.v[i] = vreinterpretq_bf16_u16(vld1q_u16(p + 8 * i));
  return chunk;
}
inline Bf16Chunk to_bf16_chunk(const Chunk& chunk) {
  Bf16Chunk rounded;
  VERAX_UNROLL
  for (int i = 0; i < CHUNK / 8; ++i) {
    rounded.v[i] = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(chunk.part[2 * i].v), chunk.part[2 * i + 1].v);
  }
  return rounded;
}
template <typename T>  // float8
inline Bf16Chunk load_bf16_chunk(const T* p) {
  return to_bf16_chunk(load_chunk(p));
}
inline void store_bf16_chunk(bf16* p, const Bf16Chunk& chunk) {
  VERAX_UNROLL
  for (int i = 0; i < CHUNK / 8; ++i) vst1q_u16(p + 8 * i, vreinterpretq_u16_bf16(chunk.v[i]));
}
inline F32 dot(F32 accumulator, const Bf16Chunk& a, const Bf16Chunk& b) {
  VERAX_UNROLL
  for (int i = 0; i < CHUNK / 8; ++i) accumulator.v = vbfdotq_f32(accumulator.v, a.v[i], b.v[i]);
  return accumulator;
}

#else

struct Bf16Chunk : Chunk {
  using Stored = float;
};
template <typename T>  // of values that bfloat16 holds
inline Bf16Chunk load_bf16_chunk(const T* p) {
  return {load_chunk(p)};
}
inline Bf16Chunk to_bf16_chunk(const Chunk& chunk) {
  float values[CHUNK];
  store_chunk(values, chunk);
  for (float& value : values) value = widen(narrow(value));
  return {load_chunk(values)};
}
inline void store_bf16_chunk(float* p, const Bf16Chunk& chunk) { store_chunk(p, chunk); }

#endif

// Values unchanged or rounded to bfloat16: of a register, and `count` of them.
inline void round_to(float* to, const F32& a) { store(to, a); }
inline void round_to(bf16* to, const F32& a) {
#if defined(VERAX_BF16_DOT) && defined(__ARM_NEON)
  vst1_u16(to, vreinterpret_u16_bf16(vcvt_bf16_f32(a.v)));
#elif defined(VERAX_BF16_DOT)
  const __m256bh rounded = _mm512_cvtneps_pbh(a.v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<const __m256i&>(rounded));
#else
  float values[F32::lanes];
  store(values, a);
  for (int i = 0; i < F32::lanes; ++i) to[i] = narrow(values[i]);
#endif
}
inline void round_row(float* to, const float* from, int64_t count) { std::memcpy(to, from, count * sizeof(float)); }
inline void round_row(bf16* to, const float* from, int64_t count) {
  int64_t i = 0;
#if defined(VERAX_BF16_DOT)
  for (; i + F32::lanes <= count; i += F32::lanes) round_to(to + i, load(from + i));
#endif
  for (; i < count; ++i) to[i] = narrow(from[i]);
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
