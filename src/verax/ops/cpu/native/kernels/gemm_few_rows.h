// The matmul of few rows by AMX, where W comes from memory once and is copied nowhere.
//
// for each strip of 32 columns, which are rows of W:
//   for each 32 rows of x:
//     y^T = W . x^T                                            (in tiles)
//     transpose, * scale + bias
#pragma once

#if defined(VERAX_TILES)

#include "cells.h"
#include "gemm.h"
#include "tiles.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Tiles [begin, end) of 16 rows of x with pairs of K below each other; rows past the last are zero.
void pack_pairs(const GemmTask& t, int64_t begin, int64_t end) {
  const auto* x = static_cast<const bf16*>(t.x);
  auto* to = static_cast<char*>(t.packed) + begin * (t.K / 32) * TILE_BYTES;
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t k = 0; k < t.K; k += 32, to += TILE_BYTES) {
      F32 pairs[SIDE];
      for (int64_t i = 0; i < SIDE; ++i) {
        const int64_t m = tile * SIDE + i;
        pairs[i] = m < t.M ? Pairs::of_row(x + m * t.K + k) : zero();
      }
      transpose(pairs);
      for (int64_t i = 0; i < SIDE; ++i) store(reinterpret_cast<float*>(to) + SIDE * i, pairs[i]);
    }
  }
}

// Sums of 16 columns and as many rows of y, from a tile that has them transposed.
inline void finish_columns(const GemmTask& t, const float* sums, int64_t m, int64_t n) {
  F32 rows[SIDE];
  for (int64_t i = 0; i < SIDE; ++i) rows[i] = load(sums + SIDE * i);
  transpose(rows);
  const int64_t count = t.M - m < SIDE ? t.M - m : SIDE;
  for (int64_t i = 0; i < count; ++i) {
    if (t.scales) rows[i] = mul(rows[i], load(t.scales + n));
    if (t.bias) rows[i] = add(rows[i], load(t.bias + n));
    store(t.y + (m + i) * t.N + n, rows[i]);
  }
}

template <int W, int X>
void multiply_columns(const GemmTask& t, const Strip& strip, int64_t m, int64_t n, char* sums) {
  const int64_t next_x = t.K / 32 * TILE_BYTES;
  begin_tiles<W, X>(sums, true);
  add_tiles<false, W, X>(strip, static_cast<const char*>(t.packed) + m / SIDE * next_x, next_x, t.K / 32);
  end_tiles<W, X>(sums);
  for (int w = 0; w < W; ++w)
    for (int i = 0; i < X; ++i) {
      finish_columns(t, reinterpret_cast<const float*>(sums + (2 * w + i) * TILE_BYTES), m + i * SIDE, n + w * SIDE);
    }
}

template <int W>
void multiply_strip(const GemmTask& t, const GemmBlock& block, int64_t n) {
  alignas(64) char sums[4 * TILE_BYTES];
  Strip strip{static_cast<const char*>(t.weight) + n * t.K * 2, SIDE * t.K * 2, t.K * 2, 64, true};
  for (int64_t i = 0; i < block.rows; i += 2 * SIDE) {
    const auto multiply = block.rows - i > SIDE ? multiply_columns<W, 2> : multiply_columns<W, 1>;
    multiply(t, strip, block.m + i, n, sums);
    strip.streamed = false;
  }
}

void multiply_few_rows(const GemmTask& t, const GemmBlock& block) {
  const Tiles tiles;
  const int64_t end = block.n + block.columns;
  int64_t n = block.n;
  for (; n + 2 * SIDE <= end; n += 2 * SIDE) multiply_strip<2>(t, block, n);
  if (n < end) multiply_strip<1>(t, block, n);
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax

#endif
