// The blocks of GGUF files as code_tiles.h multiplies them, a unit of words at a time: those with a scale for each 32
// inputs. (With one for each 16, half of a tile is empty, and row by row is faster.)
#pragma once

#include "block_inputs.h"
#include "blocks.h"
#include "code_tiles.h"

#if defined(VERAX_TILES)

namespace verax {
namespace VERAX_LEVEL {
namespace {

template <class Format>
struct BlockCodes {
  static constexpr int CHUNKS = Format::UNIT / CHUNK;
  static_assert(Format::GROUP == CHUNK, "a tile for each scale and digit");

  static int64_t add(const LinearTask& t, F32 (&sums)[SIDE], int64_t m, int64_t rows, int64_t n, int64_t k, int64_t) {
    const int64_t units = (t.K + Format::UNIT - 1) / Format::UNIT;
    const auto* unit =
        static_cast<const uint32_t*>(t.weights) + (n * units + k / Format::UNIT) * Format::WORDS * BLOCK;
    alignas(64) char codes[CHUNKS * CODE_TILE_BYTES];
    alignas(64) int32_t high[CHUNKS][SIDE * BLOCK], low[CHUNKS][SIDE * BLOCK];
    const auto factors = Format::factors(unit);
    F32 scales[CHUNKS], minimums[CHUNKS];
    for (int c = 0; c < CHUNKS; ++c) {
      unpack(unit, c, codes + c * CODE_TILE_BYTES);
      scales[c] = Format::scales(unit, factors, c, 0);
      if constexpr (Format::MINIMUMS) minimums[c] = Format::minimums(unit, factors, c);
    }
    for (int c = 0; c < CHUNKS; ++c) {
      const int8_t* x = integers(t, m, k + c * CHUNK);
      multiply_codes<0>(x, INPUT_BYTES, 0, codes + c * CODE_TILE_BYTES, 1, high[c]);
      multiply_codes<1>(x + CHUNK, INPUT_BYTES, 0, codes + c * CODE_TILE_BYTES, 1, low[c]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      F32 sum = sums[r];
      VERAX_UNROLL
      for (int c = 0; c < CHUNKS; ++c) {
        const Inputs& with = *inputs(t, m + r, k + c * CHUNK);
        const Words part = less_offset<Format>(total({load_parts(high[c], r), load_parts(low[c], r)}), with, 0);
        sum = fma(to_f32(part), mul(scales[c], broadcast(with.scale)), sum);
        if constexpr (Format::MINIMUMS) sum = fma(minimums[c], broadcast(with.sum), sum);
      }
      sums[r] = sum;
    }
    return k + Format::UNIT;
  }

 private:
  // The codes of 32 inputs; what comes two units later is asked for.
  static void unpack(const uint32_t* unit, int c, char* to) {
    VERAX_UNROLL
    for (int q = 0; q < CHUNK / 4; ++q) _mm512_store_si512(to + q * ROW_BYTES, Format::codes(unit, c, q).v);
    constexpr int LINES = (Format::WORDS + CHUNKS - 1) / CHUNKS;
    VERAX_UNROLL
    for (int line = 0; line < LINES; ++line) prefetch(unit + (2 * Format::WORDS + c * LINES + line) * BLOCK);
  }
};

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax

#endif
