// Small products by AMX out of the first cache levels, where operands are cells of two bfloat16 as in cells.h.
#pragma once

#if defined(VERAX_TILES)

#include "cells.h"
#include "tiles.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Rows of a product at a time.
constexpr int TILE_ROWS = 2 * SIDE;

// Shapes for products of at most SIDE rows: sums and operand `a` have that many, operand `b` is full.
struct ShapesOfRows {
  TileShapes of[SIDE + 1];
  constexpr ShapesOfRows() : of() {
    for (int n = 1; n <= SIDE; ++n) {
      of[n] = FULL;
      for (int tile = 0; tile < 6; ++tile) of[n].rows[tile] = static_cast<uint8_t>(n);
    }
  }
};
constexpr ShapesOfRows SHAPES_OF_ROWS;

// The shapes of a thread's tiles, changed where the number of rows asks for it.
class TilesOfRows {
 public:
  TilesOfRows() = default;
  ~TilesOfRows() {
    if (rows_) VERAX_TILE(release)();
  }
  TilesOfRows(const TilesOfRows&) = delete;
  TilesOfRows& operator=(const TilesOfRows&) = delete;
  void set(int64_t rows) {
    if (rows == rows_) return;
    VERAX_TILE(loadconfig)(&SHAPES_OF_ROWS.of[rows]);
    rows_ = rows;
  }

 private:
  int64_t rows_ = 0;
};

// R x C tiles of out = a . b, or of out + a . b; `depth` cells, a multiple of SIDE.
template <int R, int C>
inline void tile_sums(Matrix a, Matrix b, int64_t depth, Matrix out, bool adds) {
  const int64_t a_row = a.stride * 4, b_row = b.stride * 4, out_row = out.stride * 4;
  if (adds) {
    VERAX_TILE(loadd)(0, out.at, out_row);
    if constexpr (C == 2) VERAX_TILE(loadd)(1, out.at + SIDE, out_row);
    if constexpr (R == 2) VERAX_TILE(loadd)(2, out.row(SIDE), out_row);
    if constexpr (R == 2 && C == 2) VERAX_TILE(loadd)(3, out.row(SIDE) + SIDE, out_row);
  } else {
    VERAX_TILE(zero)(0);
    if constexpr (C == 2) VERAX_TILE(zero)(1);
    if constexpr (R == 2) VERAX_TILE(zero)(2);
    if constexpr (R == 2 && C == 2) VERAX_TILE(zero)(3);
  }
  for (int64_t d = 0; d < depth; d += SIDE) {
    VERAX_TILE(loadd)(4, a.at + d, a_row);
    VERAX_TILE(loadd)(6, b.row(d), b_row);
    VERAX_TILE(dpbf16ps)(0, 4, 6);
    if constexpr (C == 2) {
      VERAX_TILE(loadd)(7, b.row(d) + SIDE, b_row);
      VERAX_TILE(dpbf16ps)(1, 4, 7);
    }
    if constexpr (R == 2) {
      VERAX_TILE(loadd)(5, a.row(SIDE) + d, a_row);
      VERAX_TILE(dpbf16ps)(2, 5, 6);
      if constexpr (C == 2) VERAX_TILE(dpbf16ps)(3, 5, 7);
    }
  }
  VERAX_TILE(stored)(0, out.at, out_row);
  if constexpr (C == 2) VERAX_TILE(stored)(1, out.at + SIDE, out_row);
  if constexpr (R == 2) VERAX_TILE(stored)(2, out.row(SIDE), out_row);
  if constexpr (R == 2 && C == 2) VERAX_TILE(stored)(3, out.row(SIDE) + SIDE, out_row);
}

template <int R>
void tile_rows(Matrix a, Matrix b, int64_t depth, Matrix out, int64_t vectors, bool adds) {
  for (; vectors >= 2; vectors -= 2, b.at += 2 * SIDE, out.at += 2 * SIDE) tile_sums<R, 2>(a, b, depth, out, adds);
  if (vectors) tile_sums<R, 1>(a, b, depth, out, adds);
}

// out[rows, vectors] = a . b, or out + a . b. At most TILE_ROWS rows; `depth` cells, of which whole tiles are read.
inline void tile_product(TilesOfRows& tiles, int64_t rows, Matrix a, Matrix b, int64_t depth, Matrix out, int64_t vectors,
                         bool adds) {
  depth = (depth + SIDE - 1) / SIDE * SIDE;
  tiles.set(rows < SIDE ? rows : SIDE);
  if (rows == TILE_ROWS) return tile_rows<2>(a, b, depth, out, vectors, adds);
  tile_rows<1>(a, b, depth, out, vectors, adds);
  if (rows <= SIDE) return;
  tiles.set(rows - SIDE);
  tile_rows<1>({a.row(SIDE), a.stride}, b, depth, {out.row(SIDE), out.stride}, vectors, adds);
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax

#endif
