// Weights of 8-bit integers by AMX, for 4 rows of x and more. x's integers of 16 bits are two digits of 8 bits each:
//
// for each strip of 32 rows of W:
//   for each segment of 1,024 inputs:
//     for each 16 rows of x:
//       high, low = W . (high digits), W . (low digits)          (in tiles)
//       transpose
//       y += (256 high + low) * (x's scale)
//
// A segment's sum is exact and rounded once, as linear.cc does it: a row of y is the same to the last bit by either.
#pragma once

#include "linear.h"

#if defined(VERAX_TILES)

#include "linear_integers.h"
#include "linear_steps.h"
#include "tiles.h"
#include "vec_math.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Rows from which tiles are faster than rows of x one by one, and values of K that a tile takes.
constexpr int64_t TILED_ROWS = 4, TILED_INPUTS = 64, HALF_SIDE = SIDE / 2;

// The number of columns has no say: products of the same x, which is packed once, differ in it.
bool takes_tiles(const LinearTask& t) {
  return t.kind == Weights::int8 && !t.group && t.M >= TILED_ROWS && t.K > 0 && t.K % TILED_INPUTS == 0;
}

// Packed x: for each 16 rows a tile of high digits and one of low digits, along all of K; the last 8 rows or fewer share
// one tile. The scales follow: [K / 1,024, M].
int64_t tiled_row_bytes(const LinearTask& t) { return t.K / TILED_INPUTS * TILE_BYTES; }
char* tiled_rows(const LinearTask& t, int64_t m) {
  return static_cast<char*>(t.packed) + m / SIDE * 2 * tiled_row_bytes(t);
}
float* tiled_scales(const LinearTask& t, int64_t begin) {
  const int64_t whole = t.M / SIDE * SIDE, rest = t.M - whole;
  char* end = tiled_rows(t, whole) + (rest > HALF_SIDE ? 2 : rest > 0 ? 1 : 0) * tiled_row_bytes(t);
  return reinterpret_cast<float*>(end) + begin / SEGMENT * t.M;
}

void pack_digits(const LinearTask& t, int64_t first, int64_t last) {
  const int64_t tile = tiled_row_bytes(t);
  for (int64_t m = first; m < last; ++m) {
    const bool half = t.M - m / SIDE * SIDE <= HALF_SIDE;
    char* high = tiled_rows(t, m) + m % SIDE * 4;
    char* low = high + (half ? HALF_SIDE * 4 : tile);
    for_each_segment(t, [&](int64_t begin, int64_t end) {
      const float* x = t.x + m * t.K;
      const float scale = integer_scale(x + begin, end - begin, LARGEST_INTEGER), factor = integer_factor(scale);
      tiled_scales(t, begin)[m] = scale;
      for (int64_t k = begin; k < end; k += SIDE) {
        const __m512i wide = _mm512_cvtps_epi32(mul(load(x + k), broadcast(factor)).v);
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(wide, _mm512_set1_epi32(128)), 8);
        uint32_t fours[2][4];  // of inputs, for four rows of a tile
        _mm_storeu_si128(reinterpret_cast<__m128i*>(fours[0]), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(fours[1]), _mm512_cvtepi32_epi8(wide));  // the low bits
        const int64_t at = k / TILED_INPUTS * TILE_BYTES + k % TILED_INPUTS / 4 * ROW_BYTES;
        for (int64_t i = 0; i < 4; ++i) {
          std::memcpy(high + at + i * ROW_BYTES, &fours[0][i], 4);
          std::memcpy(low + at + i * ROW_BYTES, &fours[1][i], 4);
        }
      }
    });
  }
}

// W's scales of the columns from n on that are `there`.
__m512 tiled_row_scales(const LinearTask& t, int64_t n, __mmask16 there) {
  if (!t.half_scales) return _mm512_maskz_loadu_ps(there, static_cast<const float*>(t.scales) + n);
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, static_cast<const half*>(t.scales) + n));
}

// 16 x 16 sums as registers, whose lanes are rows of W.
void load_sums(const char* sums, F32 (&to)[SIDE]) {
  for (int i = 0; i < SIDE; ++i) to[i] = load(reinterpret_cast<const float*>(sums) + SIDE * i);
  transpose(to);
  for (F32& lane : to) lane = {_mm512_cvtepi32_ps(_mm512_castps_si512(lane.v))};
}

// The segment's part of y's rows [m, m + count) and 16 columns from n on, or those that there are, from a tile of both
// digits or one of each.
void add_segment(const LinearTask& t, const char* sums, int64_t m, int64_t count, int64_t n, int64_t begin, int64_t end) {
  F32 high[SIDE], low[SIDE];
  load_sums(sums, high);
  if (count > HALF_SIDE) load_sums(sums + TILE_BYTES, low);
  const auto there = static_cast<__mmask16>(t.N - n < SIDE ? (1 << (t.N - n)) - 1 : 0xFFFF);
  const __m512 scales = tiled_row_scales(t, n, there);
  for (int64_t i = 0; i < count; ++i) {
    const F32 rest = count > HALF_SIDE ? low[i] : high[HALF_SIDE + i];
    const F32 total = fma(high[i], broadcast(256), rest), scale = broadcast(tiled_scales(t, begin)[m + i]);
    float* y = t.y + (m + i) * t.N + n;
    F32 value = begin == 0 ? mul(total, scale) : fma(total, scale, {_mm512_maskz_loadu_ps(there, y)});
    if (end == t.K) value = mul(value, {scales});
    _mm512_mask_storeu_ps(y, there, value.v);
  }
}

template <int W, int X>
void add_tiled_rows(const LinearTask& t, const Strip& strip, int64_t m, int64_t n, int64_t begin, int64_t end) {
  alignas(64) char sums[4 * TILE_BYTES];
  const char* x = tiled_rows(t, m) + begin / TILED_INPUTS * TILE_BYTES;
  begin_tiles<W, X>(sums, true);
  add_tiles<true, W, X>(strip, x, tiled_row_bytes(t), (end - begin) / TILED_INPUTS);
  end_tiles<W, X>(sums);
  const int64_t count = t.M - m < SIDE ? t.M - m : SIDE;
  for (int w = 0; w < W; ++w) add_segment(t, sums + 2 * w * TILE_BYTES, m, count, n + w * SIDE, begin, end);
}

// All rows of x: W comes from memory for the first, then out of a cache.
template <int W>
void tiled_segment(const LinearTask& t, Strip strip, int64_t n, int64_t begin, int64_t end) {
  for (int64_t m = 0; m < t.M; m += SIDE, strip.streamed = false) {
    const auto add = t.M - m > HALF_SIDE ? add_tiled_rows<W, 2> : add_tiled_rows<W, 1>;
    add(t, strip, m, n, begin, end);
  }
}

template <int W>
void tiled_strip(const LinearTask& t, int64_t n) {
  for_each_segment(t, [&](int64_t begin, int64_t end) {
    const char* first = static_cast<const char*>(t.weights) + n * t.K + begin;
    tiled_segment<W>(t, {first, SIDE * t.K, t.K, TILED_INPUTS, true}, n, begin, end);
  });
}

// Fewer than 16 columns of y, the last: a tile's other rows are zeros after a copy of W's.
void tiled_rest(const LinearTask& t, int64_t n) {
  alignas(64) char rows[SIDE * SEGMENT] = {};
  for_each_segment(t, [&](int64_t begin, int64_t end) {
    for (int64_t i = n; i < t.N; ++i) {
      std::memcpy(rows + (i - n) * SEGMENT, static_cast<const char*>(t.weights) + i * t.K + begin, end - begin);
    }
    tiled_segment<1>(t, {rows, 0, SEGMENT, TILED_INPUTS, false}, n, begin, end);
  });
}

// Columns [begin, end) of y. `begin` is a multiple of 16.
void tiled_columns(const LinearTask& t, int64_t begin, int64_t end) {
  const Tiles tiles;
  int64_t n = begin;
  for (; n + 2 * SIDE <= end; n += 2 * SIDE) tiled_strip<2>(t, n);
  if (n + SIDE <= end) {
    tiled_strip<1>(t, n);
    n += SIDE;
  }
  if (n < end) tiled_rest(t, n);
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax

#endif
