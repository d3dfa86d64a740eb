// x in integers of 16 bits with a scale. Included by the linear kernels.
//
// Against bytes of W, along K:
//   Int16Chunk: 32 integers in registers. store_int16s(p, a): whole numbers of -32,768 to 32,767.
//   dot(sums, a, b): a lane's sum + its products, of which a lane takes every F32::lanes-th pair.
//
// Against codes (bytes without a sign) that have a row of W in each lane and 4 inputs in its word:
//   store_inputs(p, x): a chunk of whole numbers of at most LARGEST_INTEGER, in INPUT_BYTES. Where an instruction multiplies
//     4 bytes of a lane, these are two digits of 8 bits: all high ones, then all low ones. Elsewhere they are integers of
//     16 bits, the 0th and the 2nd of each 4 next to each other, as codes lie that are taken apart by a mask.
//   Codes: split<OFFSET>(words), an operand of products, of codes whose values are OFFSET less; it takes off the OFFSET
//     itself if LEFT_OFFSET<OFFSET> is 0. InputPair: load_inputs(p, q), the q-th 4 of a chunk's inputs.
//   CodeSums: no_sums(); add_products(sums, codes, inputs); total(sums): a lane's sum, which is exact.
#pragma once

#include "vec_math.h"
#include "words.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// The largest of 16 bits: 127 * 256 + 127, two digits of 8 bits.
constexpr float LARGEST_INTEGER = 32639;

// The scale by which integers of at most `largest` hold `count` values. NaN if a value is not finite, so that every
// output which that value has a part in is NaN.
inline float integer_scale(const float* x, int64_t count, float largest) {
  F32 peaks = zero(), wrong = zero();
  const auto look = [&](F32 values) {
    peaks = max(max(values, sub(zero(), values)), peaks);
    wrong = fma(values, zero(), wrong);  // NaN where a value is not finite
  };
  int64_t i = 0;
  for (; i + F32::lanes <= count; i += F32::lanes) look(load(x + i));
  if (i < count) {
    float rest[F32::lanes] = {};
    std::memcpy(rest, x + i, (count - i) * sizeof(float));
    look(load(rest));
  }
  return largest_lane(peaks) / largest + sum(wrong);
}

// What to multiply values by to get their integers: 0 where the inverse of a scale would not be finite.
inline float integer_factor(float scale) { return scale > 1e-37f ? 1 / scale : 0; }

// 32 values as whole numbers of at most 16 bits. The scale is NaN if a value is not finite.
struct RoundedChunk {
  Chunk integers;
  float scale;
  float sums[2];  // of the first 16 integers and of the others; NaN where the scale is
};
inline RoundedChunk round_chunk(const float* x) {
  RoundedChunk to{load_chunk(x), 0, {}};
  F32 peaks = zero(), wrong = zero();
  VERAX_UNROLL
  for (int i = 0; i < Chunk::parts; ++i) {
    peaks = max(max(to.integers.part[i], sub(zero(), to.integers.part[i])), peaks);
    wrong = fma(to.integers.part[i], zero(), wrong);
  }
  to.scale = largest_lane(peaks) / LARGEST_INTEGER;
  const F32 factor = broadcast(integer_factor(to.scale));
  F32 numbers[4] = {zero(), zero(), wrong, wrong};
  VERAX_UNROLL
  for (int i = 0; i < Chunk::parts; ++i) {
    to.integers.part[i] = whole(mul(to.integers.part[i], factor));
    numbers[i * 2 / Chunk::parts] = add(numbers[i * 2 / Chunk::parts], to.integers.part[i]);
  }
  float sums[4];
  sum_each(numbers, sums);
  to.scale += sums[2];
  to.sums[0] = sums[0], to.sums[1] = sums[1];
  return to;
}

constexpr int INPUT_BYTES = 2 * CHUNK;

#if defined(VERAX_PORTABLE)

struct Int16Chunk {
  int16_t v[CHUNK];
};
template <typename T>  // int16_t, int8_t
inline Int16Chunk load_int16_chunk(const T* p) {
  Int16Chunk chunk;
  for (int i = 0; i < CHUNK; ++i) chunk.v[i] = p[i];
  return chunk;
}
inline void store_int16s(int16_t* p, const F32& a) {
  for (int i = 0; i < F32::lanes; ++i) p[i] = static_cast<int16_t>(a.v[i]);
}
inline Words dot(const Words& sums, const Int16Chunk& a, const Int16Chunk& b) {
  return each_word([&](int l) {
    auto sum = static_cast<int32_t>(sums.v[l]);
    for (int i = l; i < CHUNK; i += F32::lanes) sum += int32_t{a.v[i]} * b.v[i];
    return static_cast<uint32_t>(sum);
  });
}

#elif defined(__AVX512F__)

struct Int16Chunk {
  __m512i v;
};
inline Int16Chunk load_int16_chunk(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
inline Int16Chunk load_int16_chunk(const int8_t* p) { return {load_halves(p).v}; }
inline void store_int16s(int16_t* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
inline Words dot(Words sums, Int16Chunk a, Int16Chunk b) { return dot_halves(sums, {a.v}, {b.v}); }

// Sums of the lanes of 16 registers, rounded once, where eight lanes add up to a number of 32 bits. What is left of a sum
// without its last 8 bits, and these, are integers that float32 holds.
inline void sum_each_integer(const Words (&a)[16], float* to) {
  __m512i pairs[8], fours[4], eights[2];
  VERAX_UNROLL
  for (int i = 0; i < 8; ++i) {
    const __m512i x = a[2 * i].v, y = a[2 * i + 1].v;
    pairs[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
  }
  VERAX_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512i x = pairs[2 * i], y = pairs[2 * i + 1];
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
  }
  VERAX_UNROLL
  for (int i = 0; i < 2; ++i) {
    const __m512i x = fours[2 * i], y = fours[2 * i + 1];
    eights[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xDD));
  }
  const __m512i x = _mm512_shuffle_i32x4(eights[0], eights[1], 0x88);
  const __m512i y = _mm512_shuffle_i32x4(eights[0], eights[1], 0xDD), last = _mm512_set1_epi32(255);
  const __m512i high = _mm512_add_epi32(_mm512_srai_epi32(x, 8), _mm512_srai_epi32(y, 8));
  const __m512i low = _mm512_add_epi32(_mm512_and_si512(x, last), _mm512_and_si512(y, last));
  _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256), _mm512_cvtepi32_ps(low)));
}

#elif defined(__AVX2__)

struct Int16Chunk {
  __m256i low, high;
};
inline Int16Chunk load_int16_chunk(const int16_t* p) {
  const auto* at = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Int16Chunk load_int16_chunk(const int8_t* p) { return {load_halves(p).v, load_halves(p + 16).v}; }
inline void store_int16s(int16_t* p, F32 a) {
  const __m256i wide = _mm256_cvtps_epi32(a.v);
  const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pairs);
}
inline Words dot(Words sums, Int16Chunk a, Int16Chunk b) {
  return dot_halves(dot_halves(sums, {a.low}, {b.low}), {a.high}, {b.high});
}

#elif defined(__ARM_NEON)

struct Int16Chunk {
  int16x8_t v[4];
};
inline Int16Chunk load_int16_chunk(const int16_t* p) {
  return {{vld1q_s16(p), vld1q_s16(p + 8), vld1q_s16(p + 16), vld1q_s16(p + 24)}};
}
inline Int16Chunk load_int16_chunk(const int8_t* p) {
  const int8x16_t low = vld1q_s8(p), high = vld1q_s8(p + 16);
  return {{vmovl_s8(vget_low_s8(low)), vmovl_high_s8(low), vmovl_s8(vget_low_s8(high)), vmovl_high_s8(high)}};
}
inline void store_int16s(int16_t* p, F32 a) { vst1_s16(p, vqmovn_s32(vcvtq_s32_f32(a.v))); }
inline Words dot(Words sums, const Int16Chunk& a, const Int16Chunk& b) {
  int32x4_t total = vreinterpretq_s32_u32(sums.v);
  VERAX_UNROLL
  for (int i = 0; i < 4; ++i) {
    total = vmlal_s16(total, vget_low_s16(a.v[i]), vget_low_s16(b.v[i]));
    total = vmlal_high_s16(total, a.v[i], b.v[i]);
  }
  return {vreinterpretq_u32_s32(total)};
}

#endif

#if defined(VERAX_BYTE_DOT)

inline void store_inputs(int8_t* p, const Chunk& x) {
  VERAX_UNROLL
  for (int i = 0; i < Chunk::parts; ++i) {
    const Words wide = to_words(x.part[i]);
    store_low_bytes(p + i * F32::lanes, shift_right(add(wide, words(128)), 8));
    store_low_bytes(p + CHUNK + i * F32::lanes, wide);
  }
}
using Codes = Words;
template <int OFFSET>
inline Codes split(Words codes) {
  return OFFSET == 128 ? dot_operand(codes) : codes;
}
template <int OFFSET>
constexpr int LEFT_OFFSET = OFFSET == 128 ? OFFSET - DOT_OFFSET : OFFSET;
struct CodeSums {
  Words high, low;
};
inline CodeSums no_sums() { return {words(0), words(0)}; }
struct InputPair {
  InputWord high, low;
};
inline InputPair load_inputs(const int8_t* x, int q) { return {input_word(x, q), input_word(x + CHUNK, q)}; }
inline CodeSums add_products(CodeSums sums, Codes codes, InputPair x) {
  return {dot_bytes(sums.high, codes, x.high), dot_bytes(sums.low, codes, x.low)};
}
inline Words total(CodeSums sums) { return add(shift_left(sums.high, 8), sums.low); }

#else

inline void store_inputs(int8_t* p, const Chunk& x) {
  int16_t integers[CHUNK], ordered[CHUNK];
  for (int i = 0; i < Chunk::parts; ++i) store_int16s(integers + i * F32::lanes, x.part[i]);
  for (int i = 0; i < CHUNK; i += 4) {
    ordered[i] = integers[i], ordered[i + 1] = integers[i + 2];
    ordered[i + 2] = integers[i + 1], ordered[i + 3] = integers[i + 3];
  }
  std::memcpy(p, ordered, sizeof ordered);
}
struct Codes {
  Words even, odd;  // the 0th and 2nd of a lane's bytes, and the others, in 16 bits each
};
template <int OFFSET>
inline Codes split(const Words& codes) {
  return {both(codes, words(0x00FF00FF)), upper_bytes(codes)};
}
template <int OFFSET>
constexpr int LEFT_OFFSET = OFFSET;
#if defined(__ARM_NEON) && !defined(VERAX_PORTABLE)
struct CodeSums {
  int32x4_t first, second;  // of the first two lanes and of the others, by their halves
};
inline CodeSums no_sums() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline CodeSums add_halves(CodeSums sums, Words codes, Words x) {
  const int16x8_t a = vreinterpretq_s16_u32(codes.v), b = vreinterpretq_s16_u32(x.v);
  return {vmlal_s16(sums.first, vget_low_s16(a), vget_low_s16(b)), vmlal_high_s16(sums.second, a, b)};
}
inline Words total(CodeSums sums) { return {vreinterpretq_u32_s32(vpaddq_s32(sums.first, sums.second))}; }
#else
using CodeSums = Words;
inline CodeSums no_sums() { return words(0); }
inline CodeSums add_halves(const CodeSums& sums, const Words& codes, const Words& x) {
#if defined(VERAX_PORTABLE)
  return each_word([&](int i) {
    const auto half = [](uint32_t word, int shift) { return int32_t{static_cast<int16_t>(word >> shift & 0xFFFF)}; };
    const int32_t products = half(codes.v[i], 0) * half(x.v[i], 0) + half(codes.v[i], 16) * half(x.v[i], 16);
    return sums.v[i] + static_cast<uint32_t>(products);
  });
#else
  return dot_halves(sums, codes, x);
#endif
}
inline Words total(const CodeSums& sums) { return sums; }
#endif
struct InputPair {
  Words even, odd;
};
inline InputPair load_inputs(const int8_t* x, int q) { return {word_at(x + 8 * q), word_at(x + 8 * q + 4)}; }
inline CodeSums add_products(const CodeSums& sums, const Codes& codes, const InputPair& x) {
  return add_halves(add_halves(sums, codes.even, x.even), codes.odd, x.odd);
}

#endif

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
