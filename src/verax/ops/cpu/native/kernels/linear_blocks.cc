// Lanes are rows of W, of which a tile takes C blocks of 16:
//
//   for each unit of W's words:
//     for each 32 inputs of it:
//       for each group of them (all 32, or 16):
//         parts = codes[16 rows, group] . x[m..m+R, group]     in integers
//         sums += parts * (the group's scales) * (x's scale)
//       sums += (the minimums) * (the sum of x)
//   y[m..m+R, 16 rows] += sums
//
// x is taken in integers of 16 bits, with a scale for each 32 inputs.
#include "block_inputs.h"
#include "block_tiles.h"
#include "blocks.h"
#include "linear_steps.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

template <class Format>
struct BlockTile {
  static constexpr int ROWS = LANE_ROWS;
  static constexpr int columns(int rows) { return lane_columns(rows); }
  static constexpr int ahead(int columns) { return columns; }
  static constexpr int64_t UNIT_WORDS = Format::WORDS * BLOCK;
  static int64_t units(int64_t K) { return (K + Format::UNIT - 1) / Format::UNIT; }
  static const void* at(const LinearTask& t, int64_t n, int64_t k) {
    return static_cast<const uint32_t*>(t.weights) + (n * units(t.K) + k / Format::UNIT) * UNIT_WORDS;
  }

  // Products of 32 inputs, chunk c of a unit, with C blocks of W, whose words lie `block` apart: the words for these lanes
  // begin at `unit`.
  template <int R, int C>
  static void add_chunk(F32 (&sums)[C][R], const uint32_t* unit, int64_t block,
                        const typename Format::Factors (&factors)[C], int c, const int8_t* x, const Inputs* with) {
    constexpr int GROUPS = CHUNK / Format::GROUP, QUADS = Format::GROUP / 4;
    VERAX_UNROLL
    for (int h = 0; h < GROUPS; ++h) {
      CodeSums parts[C][R];
      VERAX_UNROLL
      for (int i = 0; i < C * R; ++i) parts[i / R][i % R] = no_sums();
      VERAX_UNROLL
      for (int q = h * QUADS; q < (h + 1) * QUADS; ++q) {
        Codes codes[C];
        VERAX_UNROLL
        for (int i = 0; i < C; ++i) codes[i] = split<Format::OFFSET>(Format::codes(unit + i * block, c, q));
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) {
          const InputPair inputs = load_inputs(x + r * INPUT_BYTES, q);
          VERAX_UNROLL
          for (int i = 0; i < C; ++i) parts[i][r] = add_products(parts[i][r], codes[i], inputs);
        }
      }
      VERAX_UNROLL
      for (int i = 0; i < C; ++i) {
        const F32 scales = Format::scales(unit + i * block, factors[i], c, h);
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) {
          const Words part = less_offset<Format>(total(parts[i][r]), with[r], h);
          sums[i][r] = fma(to_f32(part), mul(scales, broadcast(with[r].scale)), sums[i][r]);
        }
      }
    }
    if constexpr (Format::MINIMUMS) {
      VERAX_UNROLL
      for (int i = 0; i < C; ++i) {
        const F32 minimums = Format::minimums(unit + i * block, factors[i], c);
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) sums[i][r] = fma(minimums, broadcast(with[r].sum), sums[i][r]);
      }
    }
  }

  // R rows of x from m on, C blocks of W: n and those apart from it.
  template <int R, int C>
  [[gnu::noinline]] static void run(const LinearTask& t, int64_t m, int64_t n, const Segment& segment) {
    const int64_t apart = segment.apart, block = units(t.K) * UNIT_WORDS * apart;
    const auto* w = static_cast<const uint32_t*>(at(t, n, segment.begin));
    const auto* next = static_cast<const uint32_t*>(segment.next);
    F32 sums[V][C][R];
    VERAX_UNROLL
    for (int i = 0; i < C * V * R; ++i) (&sums[0][0][0])[i] = zero();

    constexpr int CHUNKS = Format::UNIT / CHUNK, LINES = (Format::WORDS + CHUNKS - 1) / CHUNKS;
    for (int64_t k = segment.begin; k < segment.end; k += Format::UNIT, w += UNIT_WORDS, next += UNIT_WORDS) {
      typename Format::Factors factors[V][C];
      VERAX_UNROLL
      for (int i = 0; i < C * V; ++i) factors[i / C][i % C] = Format::factors(w + i % C * block + i / C * F32::lanes);
      for (int c = 0; c < CHUNKS; ++c) {
        const int8_t* x = integers(t, m, k + c * CHUNK);
        const Inputs* with = inputs(t, m, k + c * CHUNK);
        VERAX_UNROLL
        for (int i = 0; i < C; ++i) {
          VERAX_UNROLL
          for (int line = 0; line < LINES; ++line) prefetch(next + i * block + (c * LINES + line) * BLOCK);
        }
        VERAX_UNROLL
        for (int v = 0; v < V; ++v) {
          add_chunk<R, C>(sums[v], w + v * F32::lanes, block, factors[v], c, read_anew(x), with);
        }
      }
    }

    VERAX_UNROLL
    for (int r = 0; r < R; ++r)
      VERAX_UNROLL
      for (int i = 0; i < C; ++i) {
        const int64_t column = (n + i * apart) * BLOCK;
        F32 registers[V];
        VERAX_UNROLL
        for (int v = 0; v < V; ++v) registers[v] = sums[v][i][r];
        add_to(t.y + (m + r) * t.N + column, registers, t.N - column, segment.begin == 0);
      }
  }
};

}  // namespace

void linear_blocks_pack(const LinearTask& t, int64_t begin, int64_t end) {
  for (int64_t k = 0; k < padded(t.K); k += CHUNK) {
    for (int64_t m = begin; m < end; ++m) {
      const float* x = t.x + m * t.K + k;
      float rest[CHUNK] = {};
      if (t.K - k < CHUNK) {
        if (k < t.K) std::memcpy(rest, x, (t.K - k) * sizeof(float));
        x = rest;
      }
      pack_chunk(x, integers(t, m, k), inputs(t, m, k));
    }
  }
}

void linear_blocks_columns(const LinearTask& t, int64_t begin, int64_t end) {
  const int64_t first = begin / BLOCK, last = (end + BLOCK - 1) / BLOCK;
  with_format(t.block, [&](auto format) {
#if defined(VERAX_TILES)
    if constexpr (decltype(format)::GROUP == CHUNK) {
      if (t.M >= CODE_ROWS) return code_columns<BlockCodes<decltype(format)>>(t, first, last);
    }
#endif
    linear_units<BlockTile<decltype(format)>>(t, first, last);
  });
}

}  // namespace VERAX_LEVEL
}  // namespace verax
