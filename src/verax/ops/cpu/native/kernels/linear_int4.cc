// Lanes are rows of W, of which a tile takes C blocks of 16, whose words lie side by side: nothing is added up across
// lanes, and a group's scales are one register.
//
//   for each group of inputs:
//     parts = -8 * (the sum of x's bytes)
//     for each word of 8 inputs: parts += (codes of W[16 rows, word]) . x[m..m+R, word]     in integers
//     sums += (parts - (the zero points) * (the sum of x's bytes)) * (x's scale) * (the group's scales)
//   y[m..m+R, 16 rows] += sums
//
// x is taken in bytes, with a scale for each group.
#include <cstring>

#include "code_tiles.h"
#include "linear_integers.h"
#include "linear_lanes.h"
#include "linear_steps.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int WORD = 8;  // inputs of a word

// Where the scales and zero points of a group are, of 16 rows.
int64_t group_at(const LinearTask& t, int64_t n, int64_t k) { return (n * (t.K / t.group) + k / t.group) * BLOCK; }

F32 load_scales(const LinearTask& t, int64_t at) {
  return t.half_scales ? load(static_cast<const half*>(t.scales) + at) : load(static_cast<const float*>(t.scales) + at);
}

// Factor of a group's sum of (code) * (byte of x), and the sum of its bytes. Codes are values plus 8: `less`, -8 times the
// sum, is what their products are too much.
struct Group {
  float scale;
  int32_t sum, less;
};

// They follow all bytes: [K / group, M].
Group* input_groups(const LinearTask& t, int64_t k) {
  return reinterpret_cast<Group*>(static_cast<int8_t*>(t.packed) + linear_packed_at(t, 0, t.K)) + k / t.group * t.M;
}

// The lower four bytes with room for another one above each.
inline uint64_t spread(uint64_t bytes) {
  bytes = (bytes | bytes << 16) & 0x0000FFFF0000FFFF;
  return (bytes | bytes << 8) & 0x00FF00FF00FF00FF;
}

// Four inputs that are neighbours in a register are multiplied at once: low halves of a word's bytes, then high ones.
inline void store_in_order(int8_t* to, const int8_t (&bytes)[CHUNK]) {
  uint64_t words[CHUNK / WORD];
  std::memcpy(words, bytes, CHUNK);
  for (uint64_t& word : words) word = spread(word & 0xFFFFFFFF) | spread(word >> 32) << 8;
  std::memcpy(to, words, CHUNK);
}

void pack(const LinearTask& t, int64_t begin, int64_t end) {
  for (int64_t g = 0; g < t.K; g += t.group) {
    for (int64_t m = begin; m < end; ++m) {
      const float* x = t.x + m * t.K + g;
      const float scale = integer_scale(x, t.group, 127);
      const F32 factor = broadcast(integer_factor(scale));
      F32 sums = zero();
      for (int64_t k = 0; k < t.group; k += CHUNK) {
        int8_t bytes[CHUNK];
        for (int i = 0; i < CHUNK; i += F32::lanes) {
          const F32 integers = whole(mul(load(x + k + i), factor));
          store_low_bytes(bytes + i, to_words(integers));
          sums = add(sums, integers);
        }
        store_in_order(static_cast<int8_t*>(t.packed) + linear_packed_at(t, m, g + k), bytes);
      }
      const auto total = scale == scale ? static_cast<int32_t>(sum(sums)) : 0;  // exact, if x is finite
      input_groups(t, g)[m] = {scale, total, -8 * total};
    }
  }
}

#if defined(VERAX_TILES)

// As code_tiles.h multiplies them, 128 inputs at a time.
struct Int4Codes {
  static constexpr int INPUTS = 128, PARTS = INPUTS / 32, PAIRS = CHUNK / 8;

  static int64_t add(const LinearTask& t, F32 (&sums)[SIDE], int64_t m, int64_t rows, int64_t n, int64_t k, int64_t to) {
    alignas(64) char codes[PARTS * CODE_TILE_BYTES];
    alignas(64) int32_t parts[PARTS][SIDE * BLOCK];
    const int64_t end = to - k < INPUTS ? to : k + INPUTS;
    const auto* w = static_cast<const uint32_t*>(t.weights) + (n * (t.K / 8) + k / 8) * BLOCK;
    const auto* from = w;
    const __m512i mask = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < (end - k) / 8; ++i, from += BLOCK) {
      const __m512i eight = _mm512_loadu_si512(from);
      prefetch(from + 2 * INPUTS / 8 * BLOCK);
      _mm512_store_si512(codes + 2 * i * ROW_BYTES, _mm512_and_si512(eight, mask));
      _mm512_store_si512(codes + (2 * i + 1) * ROW_BYTES, _mm512_and_si512(_mm512_srli_epi32(eight, 4), mask));
    }
    const int64_t chunks = t.group / CHUNK, groups = (end - k) / t.group, next_x = t.M * CHUNK;
    const auto* x = static_cast<const int8_t*>(t.packed) + linear_packed_at(t, m, k);
    for (int64_t g = 0; g < groups; ++g) {
      const auto multiply = g % 2 ? multiply_codes<1> : multiply_codes<0>;
      const char* tiles = codes + g * chunks * CODE_TILE_BYTES;
      multiply(x + g * chunks * next_x, CHUNK, next_x, tiles, static_cast<int>(chunks), parts[g]);
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = group_at(t, n, k + g * t.group);
      const F32 scales = load_scales(t, at);
      const Group* with = input_groups(t, k + g * t.group) + m;
      __m512i zeros = _mm512_set1_epi32(8);
      if (t.zeros) {
        const auto* points = reinterpret_cast<const __m128i*>(t.zeros + at);
        zeros = _mm512_add_epi32(zeros, _mm512_cvtepi8_epi32(_mm_loadu_si128(points)));
      }
      for (int64_t r = 0; r < rows; ++r) {
        const __m512i less = _mm512_mullo_epi32(zeros, _mm512_set1_epi32(with[r].sum));
        const __m512i part = _mm512_sub_epi32(load_parts(parts[g], r).v, less);
        sums[r] = fma(mul({_mm512_cvtepi32_ps(part)}, broadcast(with[r].scale)), scales, sums[r]);
      }
    }
    return end;
  }
};

#endif

struct Int4Tile {
  static constexpr int ROWS = LANE_ROWS;
  static constexpr int columns(int rows) { return lane_columns(rows); }
  static constexpr int ahead(int columns) { return columns; }
  static const void* at(const LinearTask& t, int64_t n, int64_t k) {
    return static_cast<const uint32_t*>(t.weights) + (n * (t.K / WORD) + k / WORD) * BLOCK;
  }

  // A group of inputs, and where what belongs to it lies.
  struct At {
    const uint32_t* w;
    int64_t scales;  // and zero points, of these words
    const int8_t* x;
    const Group* groups;
  };

  // Products of a group of inputs with C blocks of words, and how far these and their scales lie apart.
  template <int R, int C>
  static void add_group(F32 (&sums)[C][R], const LinearTask& t, At at, int64_t block, int64_t scales) {
    const Words mask = words(0x0F0F0F0F);
    Words parts[C][R];
    VERAX_UNROLL
    for (int i = 0; i < C * R; ++i) parts[i / R][i % R] = word_at(&at.groups[i % R].less);
    for (int64_t k = 0; k < t.group; k += CHUNK, at.x += t.M * CHUNK) {
      Words pairs[C][R];
      VERAX_UNROLL
      for (int i = 0; i < C * R; ++i) pairs[i / R][i % R] = words(0);
      VERAX_UNROLL
      for (int i = 0; i < CHUNK; i += WORD, at.w += BLOCK) {
        Words low[C], high[C];
        VERAX_UNROLL
        for (int c = 0; c < C; ++c) {
          const Words codes = load_words(at.w + c * block);
          low[c] = both(codes, mask), high[c] = both(shift_right(codes, 4), mask);
        }
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) {
          const int8_t* x = at.x + r * CHUNK;
          const InputWord first = input_word(x, i / 4), second = input_word(x, i / 4 + 1);
          VERAX_UNROLL
          for (int c = 0; c < C; ++c) pairs[c][r] = dot_pairs(dot_pairs(pairs[c][r], low[c], first), high[c], second);
        }
      }
      VERAX_UNROLL
      for (int i = 0; i < C * R; ++i) parts[i / R][i % R] = add_pairs(parts[i / R][i % R], pairs[i / R][i % R]);
    }
    VERAX_UNROLL
    for (int c = 0; c < C; ++c, at.scales += scales) {
      const F32 factors = load_scales(t, at.scales);
      F32 totals[R];
      VERAX_UNROLL
      for (int r = 0; r < R; ++r) totals[r] = to_f32(parts[c][r]);
      if (t.zeros) {
        const F32 zeros = load(t.zeros + at.scales);
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) {
          totals[r] = fma(zeros, broadcast(static_cast<float>(-at.groups[r].sum)), totals[r]);  // exact
        }
      }
      VERAX_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[c][r] = fma(mul(totals[r], broadcast(at.groups[r].scale)), factors, sums[c][r]);
      }
    }
  }

  // R rows of x from m on, C blocks of W: n and those apart from it.
  template <int R, int C>
  [[gnu::noinline]] static void run(const LinearTask& t, int64_t m, int64_t n, const Segment& segment) {
    const int64_t apart = segment.apart, groups = t.K / t.group, words = t.group / WORD * BLOCK;
    const int64_t block = groups * words * apart, scales = groups * BLOCK * apart;
    const auto* next = static_cast<const uint32_t*>(segment.next);
    At at = {static_cast<const uint32_t*>(Int4Tile::at(t, n, segment.begin)), group_at(t, n, segment.begin),
             static_cast<const int8_t*>(t.packed) + linear_packed_at(t, m, segment.begin),
             input_groups(t, segment.begin) + m};
    F32 sums[V][C][R];
    VERAX_UNROLL
    for (int i = 0; i < V * C * R; ++i) (&sums[0][0][0])[i] = zero();

    for (int64_t k = segment.begin; k < segment.end; k += t.group) {
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        for (int64_t line = 0; line < words; line += BLOCK) prefetch(next + c * block + line);
      }
      VERAX_UNROLL
      for (int v = 0; v < V; ++v) {
        const int64_t first = v * F32::lanes;
        add_group<R, C>(sums[v], t, {at.w + first, at.scales + first, at.x, at.groups}, block, scales);
      }
      next += words;
      at = {at.w + words, at.scales + BLOCK, at.x + t.group * t.M, at.groups + t.M};
    }

    VERAX_UNROLL
    for (int r = 0; r < R; ++r)
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        const int64_t column = (n + c * apart) * BLOCK;
        F32 registers[V];
        VERAX_UNROLL
        for (int v = 0; v < V; ++v) registers[v] = sums[v][c][r];
        add_to(t.y + (m + r) * t.N + column, registers, t.N - column, segment.begin == 0);
      }
  }
};

}  // namespace

void linear_int4_pack(const LinearTask& t, int64_t begin, int64_t end) { pack(t, begin, end); }

void linear_int4_columns(const LinearTask& t, int64_t begin, int64_t end) {
  const int64_t first = begin / BLOCK, last = (end + BLOCK - 1) / BLOCK;
#if defined(VERAX_TILES)
  if (t.M >= CODE_ROWS) return code_columns<Int4Codes>(t, first, last);
#endif
  linear_units<Int4Tile>(t, first, last);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
