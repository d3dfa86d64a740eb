// Products by AMX of x in bytes, or in digits that are bytes, with codes that have 16 rows of W side by side: these are an
// instruction's second operand as they lie, 4 inputs of 16 rows in each 64 bytes.
//
// for each 16 rows of x:
//   for each block of 16 rows of W:
//     for each segment of 1,024 inputs:
//       for some groups of inputs at a time:
//         unpack their codes                                       (into the first cache level)
//         parts of each group = x . codes                          (in tiles, exact)
//         sums += parts * (the group's scales) * (x's scale)
//       y += sums
//
// Sums take the groups in their order, with the operations of the kernels for fewer rows: a row of y is the same to the
// last bit by either.
#pragma once

#include "linear_steps.h"

#if defined(VERAX_TILES)

#include "linear_lanes.h"
#include "tiles.h"
#include "words.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Rows of x from which tiles are faster than row by row: unpacked codes make a way through the first cache level.
constexpr int64_t CODE_ROWS = 16;

constexpr int CODE_TILE_BYTES = CHUNK / 4 * ROW_BYTES;  // codes of 32 inputs

// Tiles 0 to 3 have sums, 4 and 5 rows of x, 6 and 7 codes.
constexpr TileShapes code_shapes(uint8_t rows) {
  return {1, 0, {}, {ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, CHUNK, CHUNK, ROW_BYTES, ROW_BYTES},
          {rows, rows, rows, rows, rows, rows, CHUNK / 4, CHUNK / 4}};
}
constexpr TileShapes CODE_SHAPES[SIDE] = {
    code_shapes(1), code_shapes(2),  code_shapes(3),  code_shapes(4),  code_shapes(5),  code_shapes(6),
    code_shapes(7), code_shapes(8),  code_shapes(9),  code_shapes(10), code_shapes(11), code_shapes(12),
    code_shapes(13), code_shapes(14), code_shapes(15), code_shapes(16)};

// sums[rows of x, 16] = x . codes of `chunks` times 32 inputs; a chunk's rows of x are `row` bytes apart, chunks `next_x`.
template <int T>
inline void multiply_codes(const int8_t* x, int64_t row, int64_t next_x, const char* codes, int chunks, int32_t* sums) {
  static_assert(T == 0 || T == 1, "two sums under way");
  if constexpr (T == 0) {
    VERAX_TILE(zero)(0);
  } else {
    VERAX_TILE(zero)(1);
  }
  for (int c = 0; c < chunks; ++c, x += next_x, codes += CODE_TILE_BYTES) {
    if constexpr (T == 0) {
      VERAX_TILE(loadd)(4, x, row);
      VERAX_TILE(loadd)(6, codes, ROW_BYTES);
      VERAX_TILE(dpbsud)(0, 4, 6);
    } else {
      VERAX_TILE(loadd)(5, x, row);
      VERAX_TILE(loadd)(7, codes, ROW_BYTES);
      VERAX_TILE(dpbsud)(1, 5, 7);
    }
  }
  if constexpr (T == 0) {
    VERAX_TILE(stored)(0, sums, ROW_BYTES);
  } else {
    VERAX_TILE(stored)(1, sums, ROW_BYTES);
  }
}

inline Words load_parts(const int32_t* sums, int64_t row) {
  return {_mm512_load_si512(sums + row * BLOCK)};
}

// Blocks [begin, end) of 16 columns of y. `Kind::add(t, sums, m, rows, n, k)` adds the products of the inputs from k on
// and returns where they end.
template <class Kind>
void code_columns(const LinearTask& t, int64_t begin, int64_t end) {
  for (int64_t m = 0; m < t.M; m += SIDE) {
    const int64_t rows = t.M - m < SIDE ? t.M - m : SIDE;
    const Tiles tiles(CODE_SHAPES[rows - 1]);
    for (int64_t n = begin; n < end; ++n) {
      for_each_segment(t, [&](int64_t from, int64_t to) {
        F32 sums[SIDE];
        for (int64_t r = 0; r < rows; ++r) sums[r] = zero();
        for (int64_t k = from; k < to;) k = Kind::add(t, sums, m, rows, n, k, to);
        for (int64_t r = 0; r < rows; ++r) {
          add_to(t.y + (m + r) * t.N + n * BLOCK, {sums[r]}, t.N - n * BLOCK, from == 0);
        }
      });
    }
  }
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax

#endif
