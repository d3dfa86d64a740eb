// The block formats of GGUF files, as ops/block_quantized.py lays them out: [N/16 rounded up, units, words, 16] words,
// where a unit is 64 inputs, or a super-block's 256. What a unit's words hold is said there, at BlockKind.
#pragma once

#include "linear.h"
#include "linear_lanes.h"
#include "words.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// How a format scales its codes: by float16 numbers, or by integers of 8 bits times a factor; with minimums or without.
enum class Scaling { halves, halves_and_minimums, factors, factors_and_minimums };

// `TABLE`: codes are indices of it.
template <int CODE_BITS, int CODE_OFFSET, Scaling SCALING, const uint8_t* TABLE = nullptr>
struct Format {
  static constexpr bool MINIMUMS = SCALING == Scaling::halves_and_minimums || SCALING == Scaling::factors_and_minimums;
  static constexpr bool FACTORS = SCALING == Scaling::factors || SCALING == Scaling::factors_and_minimums;
  static constexpr int OFFSET = CODE_OFFSET;  // of what codes() returns
  static constexpr int UNIT = FACTORS ? 256 : 64, GROUP = SCALING == Scaling::factors ? 16 : 32;
  static constexpr int CODES = UNIT / (CODE_BITS == 8 ? 4 : 8), HIGH = CODE_BITS == 8 ? 0 : CODE_BITS - 4;
  static constexpr int FIRST_SCALES = CODES + UNIT / 32 * HIGH;
  static constexpr int SCALES = FACTORS ? UNIT / GROUP / 4 : 1;  // words of them
  static constexpr int WORDS = FIRST_SCALES + SCALES * (1 + MINIMUMS) + FACTORS;

  // Factors of a super-block's scales and of its minimums.
  struct Factors {
    F32 scale, minimum;
  };
  static Factors factors(const uint32_t* unit) {
    if constexpr (!FACTORS) return {zero(), zero()};
    const Words pair = load_words(unit + (WORDS - 1) * BLOCK);
    return {half_to_f32(pair), mul(half_to_f32(shift_right(pair, 16)), broadcast(-1))};
  }

  // The scales of inputs [32 c + GROUP h, ... + GROUP) of the unit; the minimums.
  static F32 scales(const uint32_t* unit, const Factors& factors, int c, int h) {
    if constexpr (!FACTORS) return half_to_f32(shift_right(load_words(unit + FIRST_SCALES * BLOCK), 16 * c));
    const int at = c * (32 / GROUP) + h;
    const Words four = load_words(unit + (FIRST_SCALES + at / 4) * BLOCK);
    return mul(factors.scale, to_f32(MINIMUMS ? byte(four, at % 4) : signed_byte(four, at % 4)));
  }
  static F32 minimums(const uint32_t* unit, const Factors& factors, int c) {
    if constexpr (!FACTORS) return half_to_f32(shift_right(load_words(unit + (FIRST_SCALES + 1) * BLOCK), 16 * c));
    const Words four = load_words(unit + (FIRST_SCALES + SCALES + c / 4) * BLOCK);
    return mul(factors.minimum, to_f32(byte(four, c % 4)));
  }

  // The codes of inputs [32 c + 4 q, ... + 4) of the unit, in a lane's bytes.
  static Words codes(const uint32_t* unit, int c, int q) {
    if constexpr (CODE_BITS == 8) return load_words(unit + (c * 8 + q) * BLOCK);
    const Words eight = load_words(unit + (c * 4 + q / 2) * BLOCK);
    Words low = both(q % 2 ? shift_right(eight, 4) : eight, words(0x0F0F0F0F));
    if constexpr (TABLE != nullptr) return look_up(TABLE, low);
    if constexpr (HIGH == 1) {
      const Words high = load_words(unit + (CODES + c) * BLOCK);
      return merge(low, q <= 4 ? shift_left(high, 4 - q) : shift_right(high, q - 4), words(0x10101010));
    }
    if constexpr (HIGH == 2) {
      const Words high = load_words(unit + (CODES + 2 * c + q / 4) * BLOCK);
      const int s = 2 * (q % 4);
      return merge(low, s <= 4 ? shift_left(high, 4 - s) : shift_right(high, s - 4), words(0x30303030));
    }
    return low;
  }
};

// The values of the codes plus 128.
constexpr uint8_t IQ4_NL_TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

using Q4_0 = Format<4, 8, Scaling::halves>;
using Q4_1 = Format<4, 0, Scaling::halves_and_minimums>;
using Q5_0 = Format<5, 16, Scaling::halves>;
using Q5_1 = Format<5, 0, Scaling::halves_and_minimums>;
using Q8_0 = Format<8, 128, Scaling::halves>;
using Q4_K = Format<4, 0, Scaling::factors_and_minimums>;
using Q5_K = Format<5, 0, Scaling::factors_and_minimums>;
using Q6_K = Format<6, 32, Scaling::factors>;
using IQ4_NL = Format<4, 128, Scaling::halves, IQ4_NL_TABLE>;

// `body(h, even, odd)` with the weights of inputs 32 c + h and 32 c + h + 1 of a unit, for h = 0, 2, 4 and so on.
template <class Format, typename Body>
inline void unpack_chunk(const uint32_t* unit, int c, const Body& body) {
  const auto factors = Format::factors(unit);
  F32 minimums = zero();
  if constexpr (Format::MINIMUMS) minimums = Format::minimums(unit, factors, c);
  VERAX_UNROLL
  for (int h = 0; h < CHUNK / Format::GROUP; ++h) {
    const F32 scales = Format::scales(unit, factors, c, h);
    if constexpr (!Format::MINIMUMS) minimums = mul(scales, broadcast(-Format::OFFSET));
    VERAX_UNROLL
    for (int q = h * Format::GROUP / 4; q < (h + 1) * Format::GROUP / 4; ++q) {
      const Words codes = Format::codes(unit, c, q);
      VERAX_UNROLL
      for (int i = 0; i < 4; i += 2) {
        const F32 even = to_f32(byte(codes, i)), odd = to_f32(byte(codes, i + 1));
        body(4 * q + i, fma(even, scales, minimums), fma(odd, scales, minimums));
      }
    }
  }
}

// `body(format)` with the format of a kind.
template <typename Body>
inline void with_format(BlockKind kind, const Body& body) {
  switch (kind) {
    case BlockKind::q4_0: return body(Q4_0{});
    case BlockKind::q4_1: return body(Q4_1{});
    case BlockKind::q5_0: return body(Q5_0{});
    case BlockKind::q5_1: return body(Q5_1{});
    case BlockKind::q8_0: return body(Q8_0{});
    case BlockKind::q4_k: return body(Q4_K{});
    case BlockKind::q5_k: return body(Q5_K{});
    case BlockKind::q6_k: return body(Q6_K{});
    case BlockKind::iq4_nl: return body(IQ4_NL{});
  }
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
