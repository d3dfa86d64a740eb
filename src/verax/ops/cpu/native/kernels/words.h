// Registers of 32-bit words, for each level: packed integers are taken apart in them, a row of a weight in each lane.
//
//   words(x): x in every lane. word_at(p): the word that lies at p. load_words(p): F32::lanes words.
//   shift_left, shift_right (zeros come in): by `n` bits, which need not be known when compiling.
//   both(a, b): a & b. merge(a, b, mask): a | b & mask.
//   byte(w, i), signed_byte(w, i): a lane's i-th byte, the lowest being the 0-th.
//   to_f32(w): of signed integers. half_to_f32(w): of float16 in the lower 16 bits.
//   look_up(table, w): table[byte] for each byte, 0 to 15.
//   upper_bytes(w): a lane's byte 1 in its lower 16 bits, and byte 3 in its upper 16. add(a, b): modulo 2^32.
//   to_words(a): whole numbers as signed integers. store_low_bytes(p, w): the lowest byte of each lane.
//   input_word(p, i): the i-th word of x from p on, of eight that lie there, for products of all lanes.
//   dot_pairs(pairs, codes, x): a lane's sum + its 4 codes (without a sign, of 4 bits) * 4 bytes of x (signed, at least
//   -127), in lanes that are twice as many where the processor adds up two products: at most eight times from zero on.
//   add_pairs(sums, pairs): into sums.
//
// With vectors, where floats may be the bits of words:
//   exclusive_or(a, b). as_words(a), as_floats(w): the same bits.
// Where pairs of integers of 16 bits are multiplied (x86 with vectors), VERAX_HALF_DOT is defined, and:
//   load_halves(p): two signed bytes in a lane, as integers of 16 bits.
//   load_byte_halves(p): the same of bytes without a sign.
//   byte_halves<OFFSET>(w, i): a lane's bytes 2 i and 2 i + 1 less OFFSET, as integers of 16 bits.
//   dot_halves(sums, a, b): a lane's sum + its two products of signed integers of 16 bits.
// Where the processor has an instruction for them, VERAX_BYTE_DOT is defined, and:
//   each_lane(bits): a word in all lanes; on ARM in one of a register, from which instructions take it for all.
//   dot_bytes(sums, a, b): a lane's sum + its four products of bytes of `a` (0 to 127) and of b (signed), which is an
//   InputWord or each_lane(bits).
//   dot_operand(a): bytes of 0 to 255 as an `a`, less DOT_OFFSET: 128 where the instruction takes signed ones, else 0.
#pragma once

#include "vec.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

#if defined(__AVX2__) && !defined(VERAX_PORTABLE)
#define VERAX_HALF_DOT
// Where byte_halves finds its bytes, in each 128 bits: -1 is a zero.
inline __m128i byte_halves_order(int i) {
  const __m128i order = _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1);
  return i ? _mm_add_epi8(order, _mm_set1_epi16(2)) : order;
}
#endif

#if defined(VERAX_PORTABLE)

struct Words {
  uint32_t v[F32::lanes];
};
template <typename Lane>
inline Words each_word(Lane lane) {
  Words result;
  for (int i = 0; i < F32::lanes; ++i) result.v[i] = lane(i);
  return result;
}
inline Words words(uint32_t x) {
  return each_word([=](int) { return x; });
}
inline Words load_words(const uint32_t* p) {
  return each_word([=](int i) { return p[i]; });
}
inline Words shift_left(const Words& a, int n) {
  return each_word([&](int i) { return a.v[i] << n; });
}
inline Words shift_right(const Words& a, int n) {
  return each_word([&](int i) { return a.v[i] >> n; });
}
inline Words both(const Words& a, const Words& b) {
  return each_word([&](int i) { return a.v[i] & b.v[i]; });
}
inline Words merge(const Words& a, const Words& b, const Words& mask) {
  return each_word([&](int i) { return a.v[i] | (b.v[i] & mask.v[i]); });
}
inline Words signed_byte(const Words& a, int i) {
  return each_word([&](int l) { return static_cast<uint32_t>(int32_t{static_cast<int8_t>(a.v[l] >> 8 * i)}); });
}
inline F32 to_f32(const Words& a) {
  return each([&](int i) { return static_cast<float>(static_cast<int32_t>(a.v[i])); });
}
inline F32 half_to_f32(const Words& a) {
  return each([&](int i) { return widen(half{static_cast<uint16_t>(a.v[i])}); });
}
inline Words look_up(const uint8_t* table, const Words& a) {
  return each_word([&](int i) {
    uint32_t result = 0;
    for (int b = 0; b < 32; b += 8) result |= uint32_t{table[a.v[i] >> b & 15]} << b;
    return result;
  });
}
inline Words upper_bytes(const Words& a) {
  return each_word([&](int i) { return a.v[i] >> 8 & 0x00FF00FF; });
}
inline Words add(const Words& a, const Words& b) {
  return each_word([&](int i) { return a.v[i] + b.v[i]; });
}
inline Words dot_pairs(const Words& pairs, const Words& codes, const Words& x) {
  return each_word([&](int i) {
    int32_t sum = static_cast<int32_t>(pairs.v[i]);
    for (int b = 0; b < 32; b += 8) {
      sum += static_cast<int32_t>(codes.v[i] >> b & 255) * static_cast<int8_t>(x.v[i] >> b & 255);
    }
    return static_cast<uint32_t>(sum);
  });
}
inline Words add_pairs(const Words& sums, const Words& pairs) { return add(sums, pairs); }
inline Words to_words(const F32& a) {
  return each_word([&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(a.v[i])); });
}
inline void store_low_bytes(int8_t* p, const Words& a) {
  for (int i = 0; i < F32::lanes; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}

#elif defined(__AVX512F__)

struct Words {
  __m512i v;
};
#if !defined(__AVX512VNNI__)
// The same, added to before what comes next: GCC would first compute all products of a sum, and keep them in memory.
inline Words in_order(Words a) {
  asm("" : "+v"(a.v));
  return a;
}
#endif
inline Words words(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline Words load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Words shift_left(Words a, int n) { return {_mm512_slli_epi32(a.v, n)}; }
inline Words shift_right(Words a, int n) { return {_mm512_srli_epi32(a.v, n)}; }
inline Words both(Words a, Words b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Words merge(Words a, Words b, Words mask) { return {_mm512_ternarylogic_epi32(a.v, b.v, mask.v, 0xF8)}; }
inline Words signed_byte(Words a, int i) { return {_mm512_srai_epi32(_mm512_slli_epi32(a.v, 24 - 8 * i), 24)}; }
inline F32 to_f32(Words a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F32 half_to_f32(Words a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v))}; }
inline Words look_up(const uint8_t* table, Words a) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), a.v)};
}
inline Words upper_bytes(Words a) { return {_mm512_srli_epi16(a.v, 8)}; }
inline Words add(Words a, Words b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Words to_words(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline void store_low_bytes(int8_t* p, Words a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
inline Words exclusive_or(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Words as_words(F32 a) { return {_mm512_castps_si512(a.v)}; }
inline F32 as_floats(Words a) { return {_mm512_castsi512_ps(a.v)}; }
inline Words load_halves(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
template <int OFFSET>
inline Words byte_halves(Words a, int i) {
  const __m512i wide = _mm512_shuffle_epi8(a.v, _mm512_broadcast_i32x4(byte_halves_order(i)));
  return {_mm512_sub_epi16(wide, _mm512_set1_epi16(OFFSET))};
}
inline Words load_byte_halves(const uint8_t* p) {
  return {_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
#if defined(__AVX512VNNI__)
#define VERAX_BYTE_DOT
inline Words dot_bytes(Words sums, Words a, Words b) { return {_mm512_dpbusd_epi32(sums.v, a.v, b.v)}; }
inline Words dot_halves(Words sums, Words a, Words b) { return {_mm512_dpwssd_epi32(sums.v, a.v, b.v)}; }
#else
inline Words dot_halves(Words sums, Words a, Words b) { return in_order(add(sums, {_mm512_madd_epi16(a.v, b.v)})); }
inline Words dot_pairs(Words pairs, Words codes, Words x) {
  return in_order({_mm512_add_epi16(pairs.v, _mm512_maddubs_epi16(codes.v, x.v))});
}
#endif

#elif defined(__AVX2__)

struct Words {
  __m256i v;
};
// The same, added to before what comes next: GCC would first compute all products of a sum, and keep them in memory.
inline Words in_order(Words a) {
  asm("" : "+x"(a.v));
  return a;
}
inline Words words(uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x))}; }
inline Words load_words(const uint32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline Words shift_left(Words a, int n) { return {_mm256_slli_epi32(a.v, n)}; }
inline Words shift_right(Words a, int n) { return {_mm256_srli_epi32(a.v, n)}; }
inline Words both(Words a, Words b) { return {_mm256_and_si256(a.v, b.v)}; }
inline Words merge(Words a, Words b, Words mask) { return {_mm256_or_si256(a.v, _mm256_and_si256(b.v, mask.v))}; }
inline Words signed_byte(Words a, int i) { return {_mm256_srai_epi32(_mm256_slli_epi32(a.v, 24 - 8 * i), 24)}; }
inline F32 to_f32(Words a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline F32 half_to_f32(Words a) {
  const __m256i low = _mm256_and_si256(a.v, _mm256_set1_epi32(0xFFFF));
  return {_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)))};
}
inline Words look_up(const uint8_t* table, Words a) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), a.v)};
}
inline Words upper_bytes(Words a) { return {_mm256_srli_epi16(a.v, 8)}; }
inline Words add(Words a, Words b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Words to_words(F32 a) { return {_mm256_cvtps_epi32(a.v)}; }
inline void store_low_bytes(int8_t* p, Words a) {
  const __m128i low = _mm_set1_epi32(0x0C080400);
  const __m128i first = _mm_shuffle_epi8(_mm256_castsi256_si128(a.v), low);
  const __m128i second = _mm_shuffle_epi8(_mm256_extracti128_si256(a.v, 1), low);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi32(first, second));
}
inline Words exclusive_or(Words a, Words b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline Words as_words(F32 a) { return {_mm256_castps_si256(a.v)}; }
inline F32 as_floats(Words a) { return {_mm256_castsi256_ps(a.v)}; }
inline Words load_halves(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
template <int OFFSET>
inline Words byte_halves(Words a, int i) {
  const __m256i wide = _mm256_shuffle_epi8(a.v, _mm256_broadcastsi128_si256(byte_halves_order(i)));
  return {_mm256_sub_epi16(wide, _mm256_set1_epi16(OFFSET))};
}
inline Words load_byte_halves(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
#if defined(__AVXVNNI__)
#define VERAX_BYTE_DOT
inline Words dot_bytes(Words sums, Words a, Words b) { return {_mm256_dpbusd_avx_epi32(sums.v, a.v, b.v)}; }
inline Words dot_halves(Words sums, Words a, Words b) { return {_mm256_dpwssd_avx_epi32(sums.v, a.v, b.v)}; }
#else
inline Words dot_halves(Words sums, Words a, Words b) { return in_order(add(sums, {_mm256_madd_epi16(a.v, b.v)})); }
inline Words dot_pairs(Words pairs, Words codes, Words x) {
  return in_order({_mm256_add_epi16(pairs.v, _mm256_maddubs_epi16(codes.v, x.v))});
}
#endif

#elif defined(__ARM_NEON)

struct Words {
  uint32x4_t v;
};
inline Words words(uint32_t x) { return {vdupq_n_u32(x)}; }
inline Words load_words(const uint32_t* p) { return {vld1q_u32(p)}; }
inline Words shift_left(Words a, int n) { return {vshlq_u32(a.v, vdupq_n_s32(n))}; }
inline Words shift_right(Words a, int n) { return {vshlq_u32(a.v, vdupq_n_s32(-n))}; }
inline Words both(Words a, Words b) { return {vandq_u32(a.v, b.v)}; }
inline Words merge(Words a, Words b, Words mask) { return {vorrq_u32(a.v, vandq_u32(b.v, mask.v))}; }
inline Words signed_byte(Words a, int i) {
  return {vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(shift_left(a, 24 - 8 * i).v), 24))};
}
inline F32 to_f32(Words a) { return {vcvtq_f32_s32(vreinterpretq_s32_u32(a.v))}; }
inline F32 half_to_f32(Words a) { return {vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(a.v)))}; }
inline Words look_up(const uint8_t* table, Words a) {
  return {vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_u32(a.v)))};
}
inline Words upper_bytes(Words a) { return {vreinterpretq_u32_u16(vshrq_n_u16(vreinterpretq_u16_u32(a.v), 8))}; }
inline Words add(Words a, Words b) { return {vaddq_u32(a.v, b.v)}; }
inline Words exclusive_or(Words a, Words b) { return {veorq_u32(a.v, b.v)}; }
inline Words as_words(F32 a) { return {vreinterpretq_u32_f32(a.v)}; }
inline F32 as_floats(Words a) { return {vreinterpretq_f32_u32(a.v)}; }
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define VERAX_BYTE_DOT
inline Words dot_bytes(Words sums, Words a, int8x8_t b) {
  return {vreinterpretq_u32_s32(vusdotq_lane_s32(vreinterpretq_s32_u32(sums.v), vreinterpretq_u8_u32(a.v), b, 0))};
}
template <int lane>
inline Words dot_lane(Words sums, Words a, int8x16_t b) {
  const uint8x16_t x = vreinterpretq_u8_u32(a.v);
  return {vreinterpretq_u32_s32(vusdotq_laneq_s32(vreinterpretq_s32_u32(sums.v), x, b, lane))};
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define VERAX_BYTE_DOT
#define VERAX_SIGNED_DOT
inline Words dot_bytes(Words sums, Words a, int8x8_t b) {
  return {vreinterpretq_u32_s32(vdotq_lane_s32(vreinterpretq_s32_u32(sums.v), vreinterpretq_s8_u32(a.v), b, 0))};
}
template <int lane>
inline Words dot_lane(Words sums, Words a, int8x16_t b) {
  const int8x16_t x = vreinterpretq_s8_u32(a.v);
  return {vreinterpretq_u32_s32(vdotq_laneq_s32(vreinterpretq_s32_u32(sums.v), x, b, lane))};
}
#else
inline Words dot_pairs(Words pairs, Words codes, Words x) {
  const int8x16_t inputs = vreinterpretq_s8_u32(x.v), weights = vreinterpretq_s8_u32(codes.v);
  const int16x8_t low = vmull_s8(vget_low_s8(weights), vget_low_s8(inputs)), high = vmull_high_s8(weights, inputs);
  return {vreinterpretq_u32_s16(vaddq_s16(vreinterpretq_s16_u32(pairs.v), vpaddq_s16(low, high)))};
}
inline Words add_pairs(Words sums, Words pairs) {
  return {vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(sums.v), vreinterpretq_s16_u32(pairs.v)))};
}
#endif
inline Words to_words(F32 a) { return {vreinterpretq_u32_s32(vcvtq_s32_f32(a.v))}; }
inline void store_low_bytes(int8_t* p, Words a) {
  const uint16x4_t pairs = vmovn_u32(a.v);
  const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(pairs, pairs))), 0);
  std::memcpy(p, &four, sizeof four);
}

#endif

#if defined(VERAX_SIGNED_DOT)
constexpr int DOT_OFFSET = 128;
inline Words dot_operand(Words a) { return exclusive_or(a, words(0x80808080)); }
#elif defined(VERAX_BYTE_DOT)
constexpr int DOT_OFFSET = 0;
inline Words dot_operand(Words a) { return a; }
#endif

// Each load by itself, so that compilers broadcast from memory: out of a register that is not a vector's, it costs more.
inline Words word_at(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return words(word);
}

#if defined(__ARM_NEON) && defined(VERAX_BYTE_DOT)

using EachLane = int8x8_t;
inline EachLane each_lane(float bits) {
  const float32x2_t front = {bits, 0};
  return vreinterpret_s8_f32(front);
}

// One of the four words of a register, by which the instruction multiplies without having it in each lane.
struct InputWord {
  int8x16_t four;
  int lane;
};
inline InputWord input_word(const int8_t* p, int i) { return {vld1q_s8(p + i / 4 * 16), i % 4}; }
inline Words dot_bytes(Words sums, Words a, InputWord b) {
  switch (b.lane) {  // known in loops that are unrolled
    case 0: return dot_lane<0>(sums, a, b.four);
    case 1: return dot_lane<1>(sums, a, b.four);
    case 2: return dot_lane<2>(sums, a, b.four);
    default: return dot_lane<3>(sums, a, b.four);
  }
}

#else

using InputWord = Words;
inline InputWord input_word(const int8_t* p, int i) { return word_at(p + 4 * i); }

#endif

#if defined(VERAX_BYTE_DOT) && !defined(__ARM_NEON)
using EachLane = Words;
inline EachLane each_lane(float bits) { return as_words(broadcast(bits)); }
#endif

#if defined(VERAX_BYTE_DOT)
inline Words dot_pairs(Words pairs, Words codes, InputWord x) { return dot_bytes(pairs, codes, x); }
inline Words add_pairs(Words sums, Words pairs) { return add(sums, pairs); }
#elif defined(VERAX_HALF_DOT)
inline Words add_pairs(Words sums, Words pairs) { return dot_halves(sums, pairs, words(0x00010001)); }
#endif

inline Words byte(Words a, int i) { return both(shift_right(a, 8 * i), words(255)); }

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
