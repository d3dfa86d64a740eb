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
// x is taken in bytes, with a scale for each 32 inputs.
#include "blocks.h"
#include "linear_steps.h"
#include "vec_math.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Numbers beside 32 bytes of x: their scale, the sum of what they stand for, and less the sums of the bytes: of all, of
// the first 16, of the last 16.
struct Inputs {
  float scale, sum;
  int32_t less[3];
};

// x ends in zeros, up to a whole unit of the smallest.
int64_t padded(int64_t K) { return (K + 63) / 64 * 64; }

int8_t* bytes(const LinearTask& t, int64_t m, int64_t k) {
  return static_cast<int8_t*>(t.packed) + linear_packed_at(t, m, k);
}

// They lie behind all bytes: [K / 32, M].
Inputs* inputs(const LinearTask& t, int64_t m, int64_t k) {
  return reinterpret_cast<Inputs*>(bytes(t, 0, padded(t.K))) + k / CHUNK * t.M + m;
}

// 32 values, of which the scale is NaN if one is not finite: every output that they have a part in is then NaN.
void pack_chunk(const float* x, int8_t* to, Inputs* with) {
  const Chunk chunk = load_chunk(x);
  F32 peaks = zero(), wrong = zero();
  VERAX_UNROLL
  for (int i = 0; i < Chunk::parts; ++i) {
    peaks = max(max(chunk.part[i], sub(zero(), chunk.part[i])), peaks);
    wrong = fma(chunk.part[i], zero(), wrong);
  }
  const float peak = largest_lane(peaks), scale = peak / 127;
  const F32 factor = broadcast(scale > 1e-37f ? 1 / scale : 0);  // the inverse must be finite
  F32 numbers[4] = {zero(), zero(), wrong, wrong};
  VERAX_UNROLL
  for (int i = 0; i < Chunk::parts; ++i) {
    const F32 here = whole(mul(chunk.part[i], factor));
    store_bytes(to + i * F32::lanes, here);
    numbers[i * 2 / Chunk::parts] = add(numbers[i * 2 / Chunk::parts], here);
  }
  float sums[4];
  sum_each(numbers, sums);
  const bool finite = sums[2] == 0;
  with->scale = scale + sums[2];
  with->sum = with->scale * (sums[0] + sums[1]);
  for (int i = 0; i < 2; ++i) with->less[1 + i] = finite ? -static_cast<int32_t>(sums[i]) : 0;
  with->less[0] = with->less[1] + with->less[2];
}

template <class Format>
struct BlockTile {
  static constexpr int ROWS = V == 1 ? 8 : 4;  // R at most: sums are kept in registers
  static constexpr int columns(int rows) {
    if (V > 1) return rows > 2 ? 1 : 2;
    return rows > 4 ? 1 : rows > 2 ? 2 : 4;
  }
  static constexpr int ahead(int columns) { return columns; }
  static constexpr int64_t UNIT_WORDS = Format::WORDS * BLOCK;
  static int64_t units(int64_t K) { return (K + Format::UNIT - 1) / Format::UNIT; }
  static const void* at(const LinearTask& t, int64_t n, int64_t k) {
    return static_cast<const uint32_t*>(t.weights) + (n * units(t.K) + k / Format::UNIT) * UNIT_WORDS;
  }

  // Products of 32 inputs: chunk c of a unit, whose words for these lanes begin at `unit`.
  template <int R>
  static void add_chunk(F32 (&sums)[R], const uint32_t* unit, const typename Format::Factors& factors, int c,
                        const int8_t* x, const Inputs* with) {
    constexpr int GROUPS = CHUNK / Format::GROUP, QUADS = Format::GROUP / 4;
    VERAX_UNROLL
    for (int h = 0; h < GROUPS; ++h) {
      Words parts[R];
      VERAX_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto less = static_cast<uint32_t>(with[r].less[GROUPS == 1 ? 0 : 1 + h]);
        parts[r] = Format::OFFSET ? times(words(less)) : words(0);
      }
      VERAX_UNROLL
      for (int q = h * QUADS; q < (h + 1) * QUADS; ++q) {
        const Words codes = Format::codes(unit, c, q);
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) {
          uint32_t four;
          std::memcpy(&four, x + r * CHUNK + 4 * q, sizeof four);
          parts[r] = dot<Format::BITS>(parts[r], codes, words(four));
        }
      }
      const F32 scales = Format::scales(unit, factors, c, h);
      VERAX_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[r] = fma(to_f32(parts[r]), mul(scales, broadcast(with[r].scale)), sums[r]);
      }
    }
    if constexpr (Format::MINIMUMS) {
      const F32 minimums = Format::minimums(unit, factors, c);
      VERAX_UNROLL
      for (int r = 0; r < R; ++r) sums[r] = fma(minimums, broadcast(with[r].sum), sums[r]);
    }
  }

  // R rows of x from m on, C blocks of W: n and those apart from it.
  template <int R, int C>
  [[gnu::noinline]] static void run(const LinearTask& t, int64_t m, int64_t n, const Segment& segment) {
    const int64_t apart = segment.apart, block = units(t.K) * UNIT_WORDS * apart;
    const auto* w = static_cast<const uint32_t*>(at(t, n, segment.begin));
    const auto* next = static_cast<const uint32_t*>(segment.next);
    F32 sums[C][V][R];
    VERAX_UNROLL
    for (int i = 0; i < C * V * R; ++i) (&sums[0][0][0])[i] = zero();

    constexpr int CHUNKS = Format::UNIT / CHUNK, LINES = (Format::WORDS + CHUNKS - 1) / CHUNKS;
    for (int64_t k = segment.begin; k < segment.end; k += Format::UNIT, w += UNIT_WORDS, next += UNIT_WORDS) {
      typename Format::Factors factors[C][V];
      VERAX_UNROLL
      for (int i = 0; i < C * V; ++i) (&factors[0][0])[i] = Format::factors(w + i / V * block + i % V * F32::lanes);
      for (int c = 0; c < CHUNKS; ++c) {
        const int8_t* x = bytes(t, m, k + c * CHUNK);
        const Inputs* with = inputs(t, m, k + c * CHUNK);
        VERAX_UNROLL
        for (int i = 0; i < C; ++i) {
          VERAX_UNROLL
          for (int line = 0; line < LINES; ++line) prefetch(next + i * block + (c * LINES + line) * BLOCK);
          VERAX_UNROLL
          for (int v = 0; v < V; ++v) {
            add_chunk<R>(sums[i][v], w + i * block + v * F32::lanes, factors[i][v], c, x, with);
          }
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
        for (int v = 0; v < V; ++v) registers[v] = sums[i][v][r];
        add_to(t.y + (m + r) * t.N + column, registers, t.N - column, segment.begin == 0);
      }
  }

 private:
  static Words times(Words less) {
    constexpr int OFFSET = Format::OFFSET;
    static_assert((OFFSET & (OFFSET - 1)) == 0, "a shift multiplies by it");
    int shift = 0;
    while (1 << shift < OFFSET) ++shift;
    return shift_left(less, shift);
  }
};

}  // namespace

void linear_blocks_pack(const LinearTask& t) {
  for (int64_t k = 0; k < padded(t.K); k += CHUNK) {
    for (int64_t m = 0; m < t.M; ++m) {
      const float* x = t.x + m * t.K + k;
      float rest[CHUNK] = {};
      if (t.K - k < CHUNK) {
        if (k < t.K) std::memcpy(rest, x, (t.K - k) * sizeof(float));
        x = rest;
      }
      pack_chunk(x, bytes(t, m, k), inputs(t, m, k));
    }
  }
}

void linear_blocks_columns(const LinearTask& t, int64_t begin, int64_t end) {
  with_format(t.block, [&](auto format) {
    linear_units<BlockTile<decltype(format)>>(t, begin / BLOCK, (end + BLOCK - 1) / BLOCK);
  });
}

}  // namespace VERAX_LEVEL
}  // namespace verax
