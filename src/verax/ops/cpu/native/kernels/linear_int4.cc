// for each segment of 1,024 inputs:               (x's segment stays in the first cache level)
//   for n in steps of C blocks of 16 rows of W:   (they stream from memory, once)
//     for m in steps of R rows of x:
//       for each group of inputs:
//         for each cell of inputs: parts += W[16 rows, cell] * x[m..m+R, cell], a lane for each row of W
//         sums += parts * the group's scales
//       y[m..m+R, 16 rows] += sums
//
// A lane is an output, so nothing is added up across lanes and a group's scales are one register. Even and odd cells
// have a part of their own, which halves the wait for an instruction's result. The order of additions is the same for
// all R and C: a row of y does not depend on what is computed beside it.
#include "linear.h"

#include "vec.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int BLOCK = 16;            // rows of W whose words lie side by side
constexpr int WORDS = 2 * BLOCK;     // of 8 inputs
constexpr int64_t SEGMENT = 1024;    // inputs
constexpr int V = BLOCK / F32::lanes;
constexpr int ROWS = V == 1 ? 8 : 2;  // R at most: sums are kept in registers

#if defined(__AVX512BF16__) && !defined(VERAX_PORTABLE)
using Stored = bf16;
constexpr int DEPTH = 2;  // inputs in a cell: a pair for the dot product
struct Words {
  __m512i v;
};
inline Words load_words(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
// parts[v] += the i-th cell of 16 rows times that of x, at `x`.
inline void multiply(F32 (&parts)[V], const Words& cells, const Stored* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  const __m512i inputs = _mm512_set1_epi32(pair);
  parts[0] = {_mm512_dpbf16_ps(parts[0].v, reinterpret_cast<const __m512bh&>(cells.v),
                               reinterpret_cast<const __m512bh&>(inputs))};
}
inline Words unpack(const Words& words, int i) {
  // -8 to 7 as bfloat16, twice: the permutation looks at the index's low 5 bits, of which the value has 4.
  const __m512i table = _mm512_broadcast_i64x4(
      _mm256_setr_epi16(static_cast<short>(0xC100), static_cast<short>(0xC0E0), static_cast<short>(0xC0C0),
                        static_cast<short>(0xC0A0), static_cast<short>(0xC080), static_cast<short>(0xC040),
                        static_cast<short>(0xC000), static_cast<short>(0xBF80), 0, 0x3F80, 0x4000, 0x4040, 0x4080,
                        0x40A0, 0x40C0, 0x40E0));
  return {_mm512_permutexvar_epi16(_mm512_srli_epi16(words.v, 4 * i), table)};
}
#else
using Stored = float;
constexpr int DEPTH = 1;
struct Words {
  const uint32_t* at;
};
struct Cells {
  F32 v[V];
};
inline Words load_words(const uint16_t* p) { return {reinterpret_cast<const uint32_t*>(p)}; }
inline Cells unpack(const Words& words, int i) {
  Cells cells;
  VERAX_UNROLL
  for (int v = 0; v < V; ++v) cells.v[v] = nibbles(words.at + v * F32::lanes, i / 2 * 4 + i % 2 * 16);
  return cells;
}
inline void multiply(F32 (&parts)[V], const Cells& cells, const Stored* x) {
  const F32 input = broadcast(*x);
  VERAX_UNROLL
  for (int v = 0; v < V; ++v) parts[v] = fma(cells.v[v], input, parts[v]);
}
#endif

F32 load_scales(const LinearTask& t, int64_t at) {
  return t.half_scales ? load(static_cast<const half*>(t.scales) + at) : load(static_cast<const float*>(t.scales) + at);
}

// y[0..16] = or += sums, where only `count` may be touched.
void add_to(float* y, const F32 (&sums)[V], int64_t count, bool first) {
  float whole[BLOCK] = {};
  float* at = count < BLOCK ? whole : y;
  if (count < BLOCK && !first) std::memcpy(whole, y, count * sizeof(float));
  VERAX_UNROLL
  for (int v = 0; v < V; ++v) {
    float* part = at + v * F32::lanes;
    store(part, first ? sums[v] : add(load(part), sums[v]));
  }
  if (count < BLOCK) std::memcpy(y, whole, count * sizeof(float));
}

// R rows of x from m on, C blocks of W from n on, inputs [begin, end). `next` is asked for meanwhile.
template <int R, int C>
void tile(const LinearTask& t, int64_t m, int64_t n, int64_t begin, int64_t end, const uint16_t* next) {
  const int64_t block = t.K / 8 * WORDS, groups = t.K / t.group;
  const auto* w = static_cast<const uint16_t*>(t.weights) + n * block;
  F32 sums[R][C][V];
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C; ++c)
      VERAX_UNROLL
      for (int v = 0; v < V; ++v) sums[r][c][v] = zero();

  for (int64_t g = begin; g < end; g += t.group) {
    F32 parts[R][C][2][V];
    VERAX_UNROLL
    for (int r = 0; r < R; ++r)
      VERAX_UNROLL
      for (int c = 0; c < C; ++c)
        VERAX_UNROLL
        for (int v = 0; v < V; ++v) parts[r][c][0][v] = parts[r][c][1][v] = zero();
    for (int64_t k = g; k < g + t.group; k += 8) {
      const auto* x = static_cast<const Stored*>(t.packed) + linear_packed_at(t, m, k) + k % CHUNK;
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        const Words words = load_words(w + c * block + k / 8 * WORDS);
        prefetch(next + c * block + (k - begin) / 8 * WORDS);
        VERAX_UNROLL
        for (int i = 0; i < 8 / DEPTH; ++i) {
          const auto cells = unpack(words, i);
          VERAX_UNROLL
          for (int r = 0; r < R; ++r) multiply(parts[r][c][i % 2], cells, x + r * CHUNK + i * DEPTH);
        }
      }
    }
    VERAX_UNROLL
    for (int c = 0; c < C; ++c)
      VERAX_UNROLL
      for (int v = 0; v < V; ++v) {
        const F32 scales = load_scales(t, ((n + c) * groups + g / t.group) * BLOCK + v * F32::lanes);
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) {
          sums[r][c][v] = fma(add(parts[r][c][0][v], parts[r][c][1][v]), scales, sums[r][c][v]);
        }
      }
  }

  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) {
      const int64_t column = (n + c) * BLOCK;
      add_to(t.y + (m + r) * t.N + column, sums[r][c], t.N - column, begin == 0);
    }
}

template <int C>
void all_rows(const LinearTask& t, int64_t n, int64_t begin, int64_t end, const uint16_t* next) {
  int64_t m = 0;
  if constexpr (ROWS * C <= 8) {  // never more: see linear_int4_columns
    for (; m + ROWS <= t.M; m += ROWS) tile<ROWS, C>(t, m, n, begin, end, next);
  }
  if constexpr (ROWS == 8) {
    switch (t.M - m) {
      case 7: return tile<7, C>(t, m, n, begin, end, next);
      case 6: return tile<6, C>(t, m, n, begin, end, next);
      case 5: return tile<5, C>(t, m, n, begin, end, next);
      case 4: return tile<4, C>(t, m, n, begin, end, next);
      case 3: return tile<3, C>(t, m, n, begin, end, next);
      case 2: return tile<2, C>(t, m, n, begin, end, next);
    }
  }
  if (t.M - m == 1) tile<1, C>(t, m, n, begin, end, next);
}

// Blocks [begin, end).
template <int C>
void in_steps(const LinearTask& t, int64_t begin, int64_t end) {
  const int64_t block = t.K / 8 * WORDS;
  const auto* w = static_cast<const uint16_t*>(t.weights);
  for (int64_t from = 0; from < t.K || from == 0; from += SEGMENT) {
    const int64_t to = t.K - from < SEGMENT ? t.K : from + SEGMENT;
    const auto place = [&](int64_t n, int64_t size) {
      // The blocks after these, or the first ones of the next segment; at the very end, what is at hand.
      if (n + 2 * size <= end) return w + (n + size) * block + from / 8 * WORDS;
      return to < t.K ? w + begin * block + to / 8 * WORDS : w + n * block + from / 8 * WORDS;
    };
    int64_t n = begin;
    for (; n + C <= end; n += C) all_rows<C>(t, n, from, to, place(n, C));
    for (; n < end; ++n) all_rows<1>(t, n, from, to, place(n, 1));
  }
}

}  // namespace

void linear_int4_columns(const LinearTask& t, int64_t begin, int64_t end) {
  const int64_t first = begin / BLOCK, last = (end + BLOCK - 1) / BLOCK;
  if constexpr (V == 1) {
    if (t.M <= 2) return in_steps<4>(t, first, last);
    if (t.M <= 4) return in_steps<2>(t, first, last);
  }
  in_steps<1>(t, first, last);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
