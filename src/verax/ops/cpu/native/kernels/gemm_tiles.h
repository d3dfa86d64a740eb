// The matmul of many rows by AMX, where 16 x 16 sums are a tile and one instruction adds 32 products to each of them.
//
// for each strip of 32 columns, which are rows of W:
//   for each 32 rows of x:
//     y^T = W . x^T                                            (in tiles)
//     transpose, * scale + bias
//
// An instruction takes its first operand by rows: W, as it is stored. So a weight that is used by few rows is read once
// and copied nowhere. Its second operand has pairs of K below each other: x, packed once for all columns. Each number of
// y takes its products in the order of K, whatever is computed beside it.
#pragma once

#if defined(__AMX_BF16__) && !defined(VERAX_PORTABLE)

#include "blocks.h"
#include "cells.h"
#include "gemm.h"
#include "tiles.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Rows of x up to which W is read where it lies. With more, each strip is used so often that a copy of it pays, without
// the gaps between rows that leave most of a cache unused.
constexpr int64_t DIRECT_ROWS = 64;

// Tiles [begin, end) of 16 rows of x, packed; rows past the last are zero.
void pack_tiles(const GemmTask& t, int64_t begin, int64_t end) {
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
inline void finish_tile(const GemmTask& t, const float* sums, int64_t m, int64_t n) {
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

// The same as `copy_strip` of blocks, which have the rows of W in their lanes.
template <class Format>
void unpack_strip(char* to, const GemmTask& t, int64_t n, int64_t columns, int64_t k, int64_t values) {
  const int64_t units = (t.K + Format::UNIT - 1) / Format::UNIT;
  for (int64_t i = 0; i < columns; i += BLOCK) {
    const auto* words = static_cast<const uint32_t*>(t.weight) + (n + i) / BLOCK * units * Format::WORDS * BLOCK;
    for (int64_t at = 0; at < values; at += CHUNK) {
      const auto* unit = words + (k + at) / Format::UNIT * Format::WORDS * BLOCK;
      F32 pairs[SIDE];
      unpack_chunk<Format>(unit, static_cast<int>((k + at) % Format::UNIT / CHUNK),
                           [&](int h, F32 even, F32 odd) { pairs[h / 2] = Pairs::joined(even, odd); });
      transpose(pairs);
      char* place = to + at / CHUNK * columns * ROW_BYTES + i * ROW_BYTES;
      for (int64_t r = 0; r < SIDE; ++r) store(reinterpret_cast<float*>(place + r * ROW_BYTES), pairs[r]);
    }
  }
}

// `values` of W rows from the k-th on, as tiles: the strip's, one after the other, for each 32 of K.
inline void copy_strip(char* to, const GemmTask& t, int64_t n, int64_t columns, int64_t k, int64_t values) {
  if (t.kind == Weights::blocks) {
    return with_format(t.block, [&](auto format) { unpack_strip<decltype(format)>(to, t, n, columns, k, values); });
  }
  const int64_t step = columns * 64;
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t at = 0; at < values; at += 32) {
      char* place = to + at / 32 * step + i * 64;
      if (t.kind == Weights::bf16) {
        const auto* row = static_cast<const bf16*>(t.weight) + (n + i) * t.K + k;
        _mm512_store_si512(place, _mm512_loadu_si512(row + at));
      } else {
        const auto* row = static_cast<const int8_t*>(t.weight) + (n + i) * t.K + k;
        const Bf16Chunk chunk = load_bf16_chunk(row + at);
        _mm512_store_si512(place, reinterpret_cast<const __m512i&>(chunk.v));
      }
    }
  }
}

template <int W, int X>
void multiply_tiles(const GemmTask& t, const Strip& strip, int64_t m, int64_t n, int64_t k, int64_t steps, char* sums) {
  const int64_t next_x = t.K / 32 * TILE_BYTES;
  const char* x = static_cast<const char*>(t.packed) + m / SIDE * next_x + k / 32 * TILE_BYTES;
  begin_tiles<W, X>(sums, k == 0);
  add_tiles<false, W, X>(strip, x, next_x, steps);
  end_tiles<W, X>(sums);
  if (k + 32 * steps < t.K) return;
  for (int w = 0; w < W; ++w)
    for (int i = 0; i < X; ++i) finish_tile(t, reinterpret_cast<const float*>(sums + (2 * w + i) * TILE_BYTES), m + i * SIDE, n + w * SIDE);
}

template <int W>
void multiply_rows_by_tiles(const GemmTask& t, const GemmBlock& block, Strip strip, int64_t n, int64_t k, int64_t steps,
                            char* sums) {
  for (int64_t i = 0; i < block.rows; i += 2 * SIDE) {
    if (block.rows - i > SIDE) {
      multiply_tiles<W, 2>(t, strip, block.m + i, n, k, steps, sums + i / SIDE * 2 * TILE_BYTES);
    } else {
      multiply_tiles<W, 1>(t, strip, block.m + i, n, k, steps, sums + i / SIDE * 2 * TILE_BYTES);
    }
    strip.streamed = false;
  }
}

void multiply_block_by_tiles(const GemmTask& t, const GemmBlock& block, void* scratch) {
  const Tiles tiles;
  auto* copy = static_cast<char*>(scratch);
  char* sums = copy + GEMM_TILE_DEPTH * 2 * SIDE * 2;
  const bool direct = t.kind == Weights::bf16 && block.rows <= DIRECT_ROWS;
  for (int64_t n = block.n; n < block.n + block.columns; n += 2 * SIDE) {
    const int64_t left = block.n + block.columns - n, columns = left < 2 * SIDE ? left : 2 * SIDE;
    const int64_t most = direct ? t.K : GEMM_TILE_DEPTH;
    for (int64_t k = 0; k < t.K; k += most) {
      const int64_t values = t.K - k < most ? t.K - k : most;
      Strip strip{copy, TILE_BYTES, 64, columns * 64, false};
      if (direct) {
        strip = {static_cast<const char*>(t.weight) + n * t.K * 2, SIDE * t.K * 2, t.K * 2, 64, true};
      } else {
        copy_strip(copy, t, n, columns, k, values);
      }
      const auto multiply = columns > SIDE ? multiply_rows_by_tiles<2> : multiply_rows_by_tiles<1>;
      multiply(t, block, strip, n, k, values / 32, sums);
    }
  }
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax

#endif
