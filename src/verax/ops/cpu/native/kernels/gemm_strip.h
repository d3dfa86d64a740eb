// Tiles of a product of many rows, in registers: strips of packed columns by all rows of a block.
#pragma once

#include <type_traits>

#include "cells.h"
#include "gelu_lanes.h"
#include "gemm.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Registers of sums in all, and the most vectors of columns that they are for. AVX2 has 16 registers, the others 32.
#if defined(VERAX_PORTABLE) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr int SUMS = 12, VECTORS = 2;
#else
constexpr int SUMS = 24, VECTORS = 3;
#endif
static_assert(VECTORS * F32::lanes <= GEMM_STRIP, "a strip holds the vectors of a tile");
constexpr int STRIP = VECTORS * F32::lanes;

constexpr int64_t BYTES_AHEAD = 12 * 1024;  // of W, from those that are multiplied to those that a single tile asks for

inline F32 activated(F32 y, Activation activation) {
  if (activation == Activation::gelu) return gelu_of(y);
  return activation == Activation::gelu_tanh ? gelu_tanh_of(y) : y;
}

template <int C>
constexpr int TILE = SUMS / C < 12 ? SUMS / C : 12;

// X and W are Matrix or Strided.
template <class X, class W>
struct Tile {
  X x;
  W weight;
  Matrix y;
  bool first, last;
  const float *row_scales, *scales, *bias;  // null, also unless y ends here; row_scales of WIDE cells are the piece's
  const int32_t* row_sums;  // with row_scales
  int64_t ahead = 0;  // if W is STREAMED: bytes from this strip to the one that is multiplied next
};

template <class X, class W>
Tile<X, W> begin_tile(const GemmTask& t, const GemmBlock& block, int64_t n, X x, W weight, Matrix y, bool first,
                      bool last) {
  return {x,
          weight,
          y,
          first,
          last,
          last && t.row_scales ? t.row_scales + block.m : nullptr,
          last && t.scales ? t.scales + n : nullptr,
          last && t.bias ? t.bias + n : nullptr,
          last && t.row_sums ? t.row_sums + block.m : nullptr};
}

template <class Kind>
constexpr bool INTEGERS = std::is_same_v<Kind, IntegerCells>;
#if defined(VERAX_HALF_DOT) && !defined(VERAX_BYTE_DOT)
template <>
constexpr bool INTEGERS<OffsetCells> = true;
#endif

// True for cells that have scales within a piece, which multiply a tile by a function of their own.
template <class Kind>
constexpr bool SCALED = false;

// Bytes that a tile asks for while it multiplies: in each step those from `at` on, which advances by `step`.
struct Ahead {
  const char* at;
  int64_t step;
};

// add_products, where W comes from memory.
template <class Kind, int R, int C, class X, class W>
inline void add_streamed(F32 (&sums)[R][C], X x, W weight, int64_t depth, Ahead ahead) {
  for (int64_t d = 0; d < depth; ++d, ahead.at += ahead.step) {
    F32 columns[C];
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) {
      columns[c] = load(weight.row(d) + c * F32::lanes);
      if (c * 64 < C * F32::lanes * int64_t{sizeof(*weight.at)}) prefetch(ahead.at + c * 64);
    }
    VERAX_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto cell = Kind::cell(x.row(r)[d]);
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) sums[r][c] = Kind::multiply(sums[r][c], cell, columns[c]);
    }
  }
}

template <class Kind, bool STREAMED, int R, int C, class X, class W>
void multiply(const Tile<X, W>& t, int64_t depth, Ahead ahead) {
  F32 sums[R][C];
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) sums[r][c] = t.first || WIDE<Kind> ? zero() : load(t.y.row(r) + c * F32::lanes);
  if constexpr (STREAMED) {
    add_streamed<Kind, R, C>(sums, t.x, t.weight, depth, ahead);
  } else {
    add_products<Kind, R, C>(sums, t.x, t.weight, depth);
  }
  VERAX_UNROLL
  for (int c = 0; c < C; ++c) {
    const int at = c * F32::lanes;
    VERAX_UNROLL
    for (int r = 0; r < R; ++r) {
      F32 y = sums[r][c];
      if constexpr (WIDE<Kind>) {
        const F32 scale = broadcast(t.row_scales[r]);
        y = t.first ? mul(Kind::total(y), scale) : fma(Kind::total(y), scale, load(t.y.row(r) + at));
      }
      if constexpr (!INTEGERS<Kind>) {
        if (t.scales) y = mul(y, load(t.scales + at));
        if (t.bias) y = add(y, load(t.bias + at));
      }
      store(t.y.row(r) + at, y);
    }
  }
}

// y = sums * scales + bias of `columns` columns, where the sums are of integers. (In `multiply`, GCC 12 would keep copies of
// them in memory for it.)
template <class Kind, class X, class W>
void finish_integers(int64_t rows, const Tile<X, W>& t, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    float* y = t.y.row(r);
    for (int64_t i = 0; i < columns; i += F32::lanes) {
      // One instruction, so that a row is the same to the last bit in tiles of every height.
      const F32 factor = mul(broadcast(t.row_scales[r]), load(t.scales + i));
      const F32 total = Kind::total(load(y + i), t.row_sums[r]);
      store(y + i, fma(total, factor, t.bias ? load(t.bias + i) : zero()));
    }
  }
}

template <class Kind, bool STREAMED, int C, int R = TILE<C>, class X, class W>
void multiply_rows(int64_t rows, const Tile<X, W>& t, int64_t depth, Ahead ahead) {
  if (rows == R) {
    if constexpr (SCALED<Kind>) {
      return Kind::template multiply<R, C>(t, depth);
    } else {
      return multiply<Kind, STREAMED, R, C>(t, depth, ahead);
    }
  }
  if constexpr (R > 1) multiply_rows<Kind, STREAMED, C, R - 1>(rows, t, depth, ahead);
}

// All rows of the block, in tiles that are as even as can be. Where W is STREAMED from memory, a single tile asks for it a
// little ahead; of several, each asks for its share of what comes next, so that memory and arithmetic are busy all the time.
template <class Kind, bool STREAMED, int C, class X, class W>
void multiply_strip(int64_t rows, Tile<X, W> t, int64_t depth) {
  const int64_t tiles = (rows + TILE<C> - 1) / TILE<C>;
  const int64_t row = W::stride * sizeof(*t.weight.at), distance = tiles == 1 ? BYTES_AHEAD : t.ahead;
  Ahead ahead{reinterpret_cast<const char*>(t.weight.at) + distance, row / tiles};
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t here = rows / tiles + (i < rows % tiles);
    multiply_rows<Kind, STREAMED, C>(here, t, depth, ahead);
    ahead.at += depth * ahead.step;
    t.x.at = t.x.row(here);
    t.y.at = t.y.row(here);
    if (WIDE<Kind>) t.row_scales += here;
  }
}

// `columns` columns of all rows of the block.
template <class Kind, bool STREAMED, class X, class W>
void multiply_columns(int64_t rows, Tile<X, W> t, int64_t columns, int64_t depth) {
  const Tile<X, W> whole = t;
  int64_t vectors = columns / F32::lanes;
  const auto advance = [&](int by) {
    t.weight.at += by * F32::lanes;
    t.y.at += by * F32::lanes;
    if (t.scales) t.scales += by * F32::lanes;
    if (t.bias) t.bias += by * F32::lanes;
    vectors -= by;
  };
  if constexpr (STREAMED && SUMS == 12) {  // few rows leave registers for more columns: fewer passes over W
    for (; rows <= 2 && vectors >= 6; advance(6)) multiply_strip<Kind, STREAMED, 6>(rows, t, depth);
    for (; rows <= 4 && vectors >= 3; advance(3)) multiply_strip<Kind, STREAMED, 3>(rows, t, depth);
  }
  for (; vectors >= VECTORS; advance(VECTORS)) multiply_strip<Kind, STREAMED, VECTORS>(rows, t, depth);
  if (VECTORS > 2 && vectors >= 2) {
    multiply_strip<Kind, STREAMED, 2>(rows, t, depth);
    advance(2);
  }
  if (vectors) multiply_strip<Kind, STREAMED, 1>(rows, t, depth);
  if constexpr (INTEGERS<Kind>) {
    if (whole.last) finish_integers<Kind>(rows, whole, columns);
  }
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
