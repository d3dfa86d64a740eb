// Lanes are rows of W: a tile takes C blocks of 16 rows, whose words lie side by side, so nothing is added up across
// lanes and a group's scales are one register:
//
//   for each group of inputs:
//     parts = -(the group's zero points) * sum of x[m..m+R, group]
//     for each word of 8 inputs: parts += W[16 rows, word] * x[m..m+R, word], a lane for each row of W
//     sums += parts * the group's scales
//   y[m..m+R, 16 rows] += sums
//
// Processors that multiply integers get x in bytes, with a scale for each group; the others get float32.
#include <cstring>

#include "code_tiles.h"
#include "linear_integers.h"
#include "linear_lanes.h"
#include "linear_steps.h"
#include "vec.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int WORDS = 2 * BLOCK;  // of 8 inputs

// Where the scales and zero points of a group are, of 16 rows.
int64_t group_at(const LinearTask& t, int64_t n, int64_t k) { return (n * (t.K / t.group) + k / t.group) * BLOCK; }

F32 load_scales(const LinearTask& t, int64_t at) {
  return t.half_scales ? load(static_cast<const half*>(t.scales) + at) : load(static_cast<const float*>(t.scales) + at);
}

#ifdef VERAX_INTEGER_DOT

// Factor of a group's sum of (code) * (byte of x), and the sum of its bytes: codes are values plus 8.
struct Group {
  float scale;
  int32_t sum;
};

// They lie behind all bytes: [K / group, M].
Group* input_groups(const LinearTask& t, int64_t k) {
  return reinterpret_cast<Group*>(static_cast<int8_t*>(t.packed) + linear_packed_at(t, 0, t.K)) + k / t.group * t.M;
}

void pack(const LinearTask& t) {
  // The dot product takes four inputs that are neighbours in a register: low halves of bytes, then high ones.
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  auto* to = static_cast<int8_t*>(t.packed);
  for (int64_t g = 0; g < t.K; g += t.group) {
    for (int64_t m = 0; m < t.M; ++m) {
      const float* x = t.x + m * t.K + g;
      const float scale = integer_scale(x, t.group, 127), factor = integer_factor(scale);
      int32_t sum = 0;
      for (int64_t k = 0; k < t.group; k += 16) {
        const __m512i wide = integers(x + k, 16, factor);
        sum += _mm512_reduce_add_epi32(wide);
        const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(wide), order);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + linear_packed_at(t, m, g + k) + (g + k) % CHUNK), bytes);
      }
      input_groups(t, g)[m] = {scale, sum};
    }
  }
}

// The sums of one group: R rows of x, C blocks of W.
template <int R, int C>
struct Parts {
  __m512i v[R][C];
  const Group* groups;

  Parts(const LinearTask& t, int64_t m, int64_t n, int64_t apart, int64_t g) : groups(input_groups(t, g) + m) {
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) {
      if (t.zeros) {
        const auto* at = reinterpret_cast<const __m128i*>(t.zeros + group_at(t, n + c * apart, g));
        const __m512i codes = _mm512_add_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)), _mm512_set1_epi32(8));
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) v[r][c] = _mm512_mullo_epi32(codes, _mm512_set1_epi32(-groups[r].sum));
      } else {
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) v[r][c] = _mm512_set1_epi32(-8 * groups[r].sum);
      }
    }
  }
  void add_word(const LinearTask& t, int64_t m, int64_t k, const uint16_t* w, int c) {
    const auto* x = static_cast<const int8_t*>(t.packed) + linear_packed_at(t, m, k) + k % CHUNK;
    const __m512i words = _mm512_loadu_si512(w), mask = _mm512_set1_epi8(15);
    const __m512i low = _mm512_and_si512(words, mask), high = _mm512_and_si512(_mm512_srli_epi32(words, 4), mask);
    VERAX_UNROLL
    for (int r = 0; r < R; ++r) {
      int32_t inputs[2];
      std::memcpy(inputs, x + r * CHUNK, sizeof inputs);
      v[r][c] = _mm512_dpbusd_epi32(v[r][c], low, _mm512_set1_epi32(inputs[0]));
      v[r][c] = _mm512_dpbusd_epi32(v[r][c], high, _mm512_set1_epi32(inputs[1]));
    }
  }
  F32 total(int r, int c, int) const {
    return mul({_mm512_cvtepi32_ps(v[r][c])}, broadcast(groups[r].scale));
  }
};

#if defined(__AMX_BF16__)

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
      multiply(x + g * chunks * next_x, next_x, codes + g * chunks * CODE_TILE_BYTES, static_cast<int>(chunks), parts[g]);
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

#else

// The sums of x's groups lie behind it: [K / group, M].
float* input_sums(const LinearTask& t, int64_t k) {
  return static_cast<float*>(t.packed) + linear_packed_at(t, 0, t.K) + k / t.group * t.M;
}

void pack(const LinearTask& t) {
  auto* to = static_cast<float*>(t.packed);
  for (int64_t k = 0; k < t.K; k += CHUNK) {
    for (int64_t m = 0; m < t.M; ++m, to += CHUNK) {
      store_bf16_chunk(to, to_bf16_chunk(load_chunk(t.x + m * t.K + k)));
      float sum = 0;
      for (int i = 0; i < CHUNK; ++i) sum += to[i];
      float& total = input_sums(t, k)[m];
      total = k % t.group ? total + sum : sum;
    }
  }
}

// The sums of one group: R rows of x, C blocks of W. Even and odd inputs have a sum of their own, which halves the wait
// for an instruction's result.
template <int R, int C>
struct Parts {
  F32 v[R][C][V][2];

  Parts(const LinearTask& t, int64_t m, int64_t n, int64_t apart, int64_t g) {
    VERAX_UNROLL
    for (int i = 0; i < R * C * V * 2; ++i) (&v[0][0][0][0])[i] = zero();
    if (!t.zeros) return;
    VERAX_UNROLL
    for (int c = 0; c < C; ++c)
      VERAX_UNROLL
      for (int b = 0; b < V; ++b) {
        const F32 zeros = load(t.zeros + group_at(t, n + c * apart, g) + b * F32::lanes);
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) v[r][c][b][0] = mul(zeros, broadcast(-input_sums(t, g)[m + r]));
      }
  }
  void add_word(const LinearTask& t, int64_t m, int64_t k, const uint16_t* w, int c) {
    const auto* x = static_cast<const float*>(t.packed) + linear_packed_at(t, m, k) + k % CHUNK;
    VERAX_UNROLL
    for (int i = 0; i < 8; ++i)
      VERAX_UNROLL
      for (int b = 0; b < V; ++b) {
        const F32 cells = nibbles(reinterpret_cast<const uint32_t*>(w) + b * F32::lanes, i / 2 * 4 + i % 2 * 16);
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) v[r][c][b][i % 2] = fma(cells, broadcast(x[r * CHUNK + i]), v[r][c][b][i % 2]);
      }
  }
  F32 total(int r, int c, int b) const { return add(v[r][c][b][0], v[r][c][b][1]); }
};

#endif

struct Int4Tile {
  static constexpr int ROWS = V == 1 ? 8 : 2;  // R at most: sums are kept in registers
  static constexpr int columns(int rows) { return V > 1 || rows > 4 ? 1 : rows > 2 ? 2 : 4; }
  static constexpr int ahead(int columns) { return columns; }
  static const void* at(const LinearTask& t, int64_t n, int64_t k) {
    return static_cast<const uint16_t*>(t.weights) + (n * (t.K / 8) + k / 8) * WORDS;
  }

  // R rows of x from m on, C blocks of W: n and those apart from it.
  template <int R, int C>
  [[gnu::noinline]] static void run(const LinearTask& t, int64_t m, int64_t n, const Segment& segment) {
    const int64_t apart = segment.apart, block = t.K / 8 * WORDS * apart;
    const auto* w = static_cast<const uint16_t*>(at(t, n, segment.begin));
    const auto* next = static_cast<const uint16_t*>(segment.next);
    F32 sums[R][C][V];
    VERAX_UNROLL
    for (int r = 0; r < R; ++r)
      VERAX_UNROLL
      for (int c = 0; c < C; ++c)
        VERAX_UNROLL
        for (int b = 0; b < V; ++b) sums[r][c][b] = zero();

    for (int64_t g = segment.begin; g < segment.end; g += t.group) {
      Parts<R, C> parts(t, m, n, apart, g);
      for (int64_t k = g; k < g + t.group; k += 8, w += WORDS, next += WORDS) {
        VERAX_UNROLL
        for (int c = 0; c < C; ++c) {
          parts.add_word(t, m, k, w + c * block, c);
          prefetch(next + c * block);
        }
      }
      VERAX_UNROLL
      for (int c = 0; c < C; ++c)
        VERAX_UNROLL
        for (int b = 0; b < V; ++b) {
          const F32 scales = load_scales(t, group_at(t, n + c * apart, g) + b * F32::lanes);
          VERAX_UNROLL
          for (int r = 0; r < R; ++r) sums[r][c][b] = fma(parts.total(r, c, b), scales, sums[r][c][b]);
        }
    }

    VERAX_UNROLL
    for (int r = 0; r < R; ++r)
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        const int64_t column = (n + c * apart) * BLOCK;
        add_to(t.y + (m + r) * t.N + column, sums[r][c], t.N - column, segment.begin == 0);
      }
  }
};

}  // namespace

void linear_int4_pack(const LinearTask& t) { pack(t); }

void linear_int4_columns(const LinearTask& t, int64_t begin, int64_t end) {
  const int64_t first = begin / BLOCK, last = (end + BLOCK - 1) / BLOCK;
#if defined(__AMX_BF16__)
  if (t.M >= CODE_ROWS) return code_columns<Int4Codes>(t, first, last);
#endif
  linear_units<Int4Tile>(t, first, last);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
