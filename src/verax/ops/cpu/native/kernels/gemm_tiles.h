// The matmul of many rows by AMX, where 16 x 16 sums are a tile and one instruction adds 32 products to each of them.
//
// for each strip of 32 columns, which are rows of W:
//   pack W of the strip                                        (into a cache)
//   for each 32 rows of x:
//     y = x . W^T                                              (in tiles)
//     * scale + bias
//
// An instruction takes its first operand by rows: x. Its second operand has pairs of K below each other: W, packed for
// each block of rows. So sums lie as y does. The other way round, as in gemm_few_rows.h, each tile of them is
// transposed, which takes half as long as the products at K = 384. Each number of y takes its products in the order of
// K, whatever else is computed, in both.
#pragma once

#if defined(VERAX_TILES)

#include "blocks.h"
#include "cells.h"
#include "gemm.h"
#include "gemm_few_rows.h"
#include "tiles.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Tiles [begin, end) of 16 rows of x, each one after the other along K; rows past the last are zero.
void pack_rows(const GemmTask& t, int64_t begin, int64_t end) {
  const auto* x = static_cast<const bf16*>(t.x);
  for (int64_t m = begin * SIDE; m < end * SIDE; ++m) {
    auto* to = static_cast<char*>(t.packed) + m / SIDE * (t.K / 32) * TILE_BYTES + m % SIDE * ROW_BYTES;
    for (int64_t k = 0; k < t.K; k += 32, to += TILE_BYTES) {
      _mm512_store_si512(to, m < t.M ? _mm512_loadu_si512(x + m * t.K + k) : _mm512_setzero_si512());
    }
  }
}

// Sums of 16 rows and columns of y.
inline void finish_rows(const GemmTask& t, const float* sums, int64_t m, int64_t n) {
  const int64_t count = t.M - m < SIDE ? t.M - m : SIDE;
  const F32 scales = t.scales ? load(t.scales + n) : zero(), bias = t.bias ? load(t.bias + n) : zero();
  for (int64_t i = 0; i < count; ++i) {
    F32 row = load(sums + SIDE * i);
    if (t.scales) row = mul(row, scales);
    if (t.bias) row = add(row, bias);
    store(t.y + (m + i) * t.N + n, row);
  }
}

// 16 rows of W from the n-th on, `values` of each from the k-th on, as tiles with pairs of K below each other.
template <class Kind>
void pack_columns(char* to, const GemmTask& t, int64_t n, int64_t k, int64_t values) {
  const auto* w = static_cast<const typename Kind::Element*>(t.weight) + n * t.K + k;
  for (int64_t at = 0; at < values; at += 32, to += TILE_BYTES) {
    F32 pairs[SIDE];
    for (int64_t i = 0; i < SIDE; ++i) pairs[i] = Kind::of_row(w + i * t.K + at);
    transpose(pairs);
    for (int64_t i = 0; i < SIDE; ++i) store(reinterpret_cast<float*>(to) + SIDE * i, pairs[i]);
  }
}

// 16 rows of blocks, which have the rows of W in their lanes.
template <class Format>
void unpack_columns(char* to, const GemmTask& t, int64_t n, int64_t k, int64_t values) {
  const int64_t units = (t.K + Format::UNIT - 1) / Format::UNIT;
  const auto* words = static_cast<const uint32_t*>(t.weight) + n / BLOCK * units * Format::WORDS * BLOCK;
  for (int64_t at = k; at < k + values; at += CHUNK, to += TILE_BYTES) {
    const auto* unit = words + at / Format::UNIT * Format::WORDS * BLOCK;
    unpack_chunk<Format>(unit, static_cast<int>(at % Format::UNIT / CHUNK), [&](int h, F32 even, F32 odd) {
      store(reinterpret_cast<float*>(to) + SIDE * (h / 2), Pairs::joined(even, odd));
    });
  }
}

void pack_strip(char* to, const GemmTask& t, int64_t n, int64_t k, int64_t values) {
  if (t.kind == Weights::bf16) return pack_columns<Pairs>(to, t, n, k, values);
  if (t.kind == Weights::int8) return pack_columns<Int8Pairs>(to, t, n, k, values);
  with_format(t.block, [&](auto format) { unpack_columns<decltype(format)>(to, t, n, k, values); });
}

// R x C tiles of y from row m and column n on: values of K from the k-th on.
template <int R, int C>
void multiply_tiles(const GemmTask& t, const char* w, int64_t m, int64_t n, int64_t k, int64_t values, char* sums) {
  const int64_t next = t.K / 32 * TILE_BYTES;
  const char* x = static_cast<const char*>(t.packed) + m / SIDE * next + k / 32 * TILE_BYTES;
  begin_tiles<R, C>(sums, k == 0);
  add_tiles<false, R, C>({x, next, ROW_BYTES, TILE_BYTES, false}, w, values / 32 * TILE_BYTES, values / 32);
  end_tiles<R, C>(sums);
  if (k + values < t.K) return;
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      finish_rows(t, reinterpret_cast<const float*>(sums + (2 * r + c) * TILE_BYTES), m + r * SIDE, n + c * SIDE);
    }
}

template <int C>
void multiply_rows(const GemmTask& t, const GemmBlock& block, const char* w, int64_t n, int64_t k, int64_t values,
                   char* sums) {
  for (int64_t i = 0; i < block.rows; i += 2 * SIDE, sums += 4 * TILE_BYTES) {
    const auto multiply = block.rows - i > SIDE ? multiply_tiles<2, C> : multiply_tiles<1, C>;
    multiply(t, w, block.m + i, n, k, values, sums);
  }
}

void multiply_many_rows(const GemmTask& t, const GemmBlock& block, void* scratch) {
  const Tiles tiles;
  auto* w = static_cast<char*>(scratch);
  char* sums = w + GEMM_TILE_DEPTH * 2 * SIDE * 2;
  for (int64_t n = block.n; n < block.n + block.columns; n += 2 * SIDE) {
    const bool two = block.n + block.columns - n > SIDE;
    for (int64_t k = 0; k < t.K; k += GEMM_TILE_DEPTH) {
      const int64_t values = t.K - k < GEMM_TILE_DEPTH ? t.K - k : GEMM_TILE_DEPTH;
      pack_strip(w, t, n, k, values);
      if (two) pack_strip(w + values / 32 * TILE_BYTES, t, n + SIDE, k, values);
      const auto multiply = two ? multiply_rows<2> : multiply_rows<1>;
      multiply(t, block, w, n, k, values, sums);
    }
  }
}

// Rows of x up to which packing W takes longer than transposing the sums.
constexpr int64_t FEW_ROWS = 64;
bool has_few_rows(const GemmTask& t) { return t.kind == Weights::bf16 && t.M <= FEW_ROWS; }

void pack_tiles(const GemmTask& t, int64_t begin, int64_t end) {
  return has_few_rows(t) ? pack_pairs(t, begin, end) : pack_rows(t, begin, end);
}

void multiply_block_by_tiles(const GemmTask& t, const GemmBlock& block, void* scratch) {
  return has_few_rows(t) ? multiply_few_rows(t, block) : multiply_many_rows(t, block, scratch);
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax

#endif
