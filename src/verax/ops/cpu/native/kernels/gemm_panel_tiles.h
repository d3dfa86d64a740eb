// The matmul with panels by AMX.
//
// for each piece of K whose x fits the second cache level:
//   for each 32 columns:
//     for each 16 steps of the piece:                        (W of these fits the first cache level: 32 KB)
//       for each 32 rows:
//         sums += x . W                                      (in tiles)
//   after the last piece: y = sums * scale + bias, GELU
//
// A panel has the cells of 48 columns side by side, so a tile of W is 16 rows of a panel, 192 bytes apart. x is packed in
// the order in which it is read: both tiles of 32 rows step by step, 16 steps of all rows after each other.
//
// Limits, with 2 x 2 tiles of sums: 4 instructions of 16 cycles for 4 KB of operands. Half of those, W, come from the
// first cache level; x comes from the second at 32 bytes a cycle.
#pragma once

#if defined(VERAX_TILES)

#include "cells.h"
#include "gemm.h"
#include "gemm_strip.h"
#include "tiles.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Bytes between the rows of a tile of W; of a step of W; of a step of two tiles of x.
constexpr int64_t PANEL_ROW = GEMM_STRIP * 4, PANEL_STEP = SIDE * PANEL_ROW, PAIR_STEP = 2 * TILE_BYTES;

// Bytes of x that are asked for ahead.
constexpr int64_t X_AHEAD = 4 * PAIR_STEP;

// Cells of row m of x, from the first of some 16 steps on: 16 of them, then each 16 of the next step PAIR_STEP bytes on.
inline char* tiled_row(char* x, int64_t pairs, int64_t m, int64_t step, int64_t steps) {
  const int64_t here = steps - step < GEMM_TILE_STEPS ? steps - step : GEMM_TILE_STEPS;
  return x + (step * pairs + m / (2 * SIDE) * here) * PAIR_STEP + m % (2 * SIDE) / SIDE * TILE_BYTES + m % SIDE * ROW_BYTES;
}

// Calls `put(to, cell)` for each 16 cells of row m, with where they go.
template <class Put>
void tile_row(void* x, int64_t M, int64_t m, int64_t steps, const Put& put) {
  const int64_t pairs = (M + 2 * SIDE - 1) / (2 * SIDE);
  for (int64_t step = 0; step < steps; step += GEMM_TILE_STEPS) {
    char* to = tiled_row(static_cast<char*>(x), pairs, m, step, steps);
    for (int64_t i = step; i < steps && i < step + GEMM_TILE_STEPS; ++i, to += PAIR_STEP) put(to, i * SIDE);
  }
}

// Where W of 16 columns lies, from a step on.
inline const char* panel_tile(const GemmTask& t, int64_t n, int64_t step) {
  const int64_t steps = t.K / gemm_cell_values(t.kind) / SIDE;
  return static_cast<const char*>(t.weight) + (n / GEMM_STRIP * steps + step) * PANEL_STEP + n % GEMM_STRIP * 4;
}

// Bytes of x are signed, bytes of W are not.
#define VERAX_PANEL_DOT(sums, x, w)        \
  do {                                     \
    if constexpr (INTEGERS) {              \
      VERAX_TILE(dpbsud)(sums, x, w);      \
    } else {                               \
      VERAX_TILE(dpbf16ps)(sums, x, w);    \
    }                                      \
  } while (0)

// Sums of 16 R rows and 16 C columns over `steps`; what is asked for of the next W, and how many of its rows in each step.
template <bool INTEGERS, int R, int C>
inline void add_panel_tiles(const char* x, const char* first, const char* second, int64_t steps, char* sums, bool begins,
                            const char* next, int64_t next_second, int64_t rows_ahead) {
  begin_tiles<R, C>(sums, begins);
  for (int64_t i = 0; i < steps; ++i, x += PAIR_STEP, first += PANEL_STEP, second += PANEL_STEP) {
    VERAX_TILE(loadd)(4, x, ROW_BYTES);
    VERAX_TILE(loadd)(6, first, PANEL_ROW);
    for (int64_t line = 0; line < R * TILE_BYTES; line += 64) _mm_prefetch(x + X_AHEAD + line, _MM_HINT_T0);
    VERAX_PANEL_DOT(0, 4, 6);
    if constexpr (C == 2) {
      VERAX_TILE(loadd)(7, second, PANEL_ROW);
      VERAX_PANEL_DOT(1, 4, 7);
    }
    if constexpr (R == 2) {
      VERAX_TILE(loadd)(5, x + TILE_BYTES, ROW_BYTES);
      VERAX_PANEL_DOT(2, 5, 6);
      if constexpr (C == 2) VERAX_PANEL_DOT(3, 5, 7);
    }
    for (int64_t row = 0; row < rows_ahead; ++row, next += PANEL_ROW) {
      _mm_prefetch(next, _MM_HINT_T1);
      if constexpr (C == 2) _mm_prefetch(next + next_second, _MM_HINT_T1);
    }
  }
  end_tiles<R, C>(sums);
}

// Sums of `count` rows from the m-th on and of 16 columns: with scales and bias, to y.
template <bool INTEGERS>
inline void finish_tile(const GemmTask& t, const float* sums, int64_t m, int64_t count, int64_t n, Matrix y) {
  const F32 scales = t.scales ? load(t.scales + n) : zero(), bias = t.bias ? load(t.bias + n) : zero();
  for (int64_t r = 0; r < count; ++r) {
    F32 row = load(sums + SIDE * r);
    if constexpr (INTEGERS) {
      row = fma(IntegerCells::total(row, t.row_sums[m + r]), mul(broadcast(t.row_scales[m + r]), scales), bias);
    } else if (t.bias) {
      row = add(row, bias);
    }
    store(y.row(r), activated(row, t.activation));
  }
}

// C x 16 columns of all rows of the block: the sums of a piece of K, and y if it is the last.
template <bool INTEGERS, int C>
void multiply_tile_columns(const GemmTask& t, const GemmBlock& block, int64_t n, int64_t begin, int64_t end, char* sums,
                           Matrix y) {
  const int64_t steps = t.K / gemm_cell_values(t.kind) / SIDE, all = (t.M + 2 * SIDE - 1) / (2 * SIDE);
  const int64_t pairs = (block.rows + 2 * SIDE - 1) / (2 * SIDE);
  auto* x = static_cast<char*>(const_cast<void*>(t.x));
  for (int64_t step = begin; step < end; step += GEMM_TILE_STEPS) {
    const int64_t here = end - step < GEMM_TILE_STEPS ? end - step : GEMM_TILE_STEPS;
    const char *first = panel_tile(t, n, step), *second = C == 2 ? panel_tile(t, n + SIDE, step) : first;
    // The next W: of the same columns or, at the end of the piece, of those that follow, whose tiles may be in two panels.
    const bool stays = step + here < end, follows = !stays && n + 2 * C * SIDE <= block.n + block.columns;
    const char* next = stays ? first + here * PANEL_STEP : follows ? panel_tile(t, n + C * SIDE, begin) : first;
    const char* next_second = stays     ? second + here * PANEL_STEP
                              : follows ? panel_tile(t, n + (2 * C - 1) * SIDE, begin)
                                        : second;
    const int64_t rows_ahead = (SIDE + pairs - 1) / pairs;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const char* rows = tiled_row(x, all, block.m + pair * 2 * SIDE, step, steps);
      const int64_t asked = pair * here * rows_ahead, ahead = asked + here * rows_ahead <= here * SIDE ? rows_ahead : 0;
      const auto add = block.rows - pair * 2 * SIDE > SIDE ? add_panel_tiles<INTEGERS, 2, C> : add_panel_tiles<INTEGERS, 1, C>;
      add(rows, first, second, here, sums + pair * 4 * TILE_BYTES, step == 0, next + asked * PANEL_ROW, next_second - next,
          ahead);
    }
  }
  if (end < steps) return;
  for (int64_t m = 0; m < block.rows; m += SIDE) {
    const int64_t count = block.rows - m < SIDE ? block.rows - m : SIDE;
    for (int c = 0; c < C; ++c) {
      const char* at = sums + m / (2 * SIDE) * 4 * TILE_BYTES + (m % (2 * SIDE) / SIDE * 2 + c) * TILE_BYTES;
      finish_tile<INTEGERS>(t, reinterpret_cast<const float*>(at), block.m + m, count, n + c * SIDE,
                            {y.row(m) + n - block.n + c * SIDE, y.stride});
    }
  }
}

// The block of t's product, whose first number goes to y.at. `sums`: a part of gemm_panels_scratch_bytes.
template <bool INTEGERS>
void multiply_panel_tiles(Matrix y, const GemmTask& t, const GemmBlock& block, char* sums) {
  const Tiles tiles;
  const int64_t steps = t.K / gemm_cell_values(t.kind) / SIDE, piece = gemm_tile_piece(t);
  const int64_t of_columns = piece < steps ? (block.rows + 2 * SIDE - 1) / (2 * SIDE) * 4 * TILE_BYTES : 0;
  for (int64_t k = 0; k < steps; k += piece) {
    const int64_t end = steps - k < piece ? steps : k + piece;
    char* at = sums;
    for (int64_t n = block.n; n < block.n + block.columns; n += 2 * SIDE, at += of_columns) {
      const bool two = block.n + block.columns - n > SIDE;
      const auto multiply = two ? multiply_tile_columns<INTEGERS, 2> : multiply_tile_columns<INTEGERS, 1>;
      multiply(t, block, n, k, end, at, y);
    }
  }
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax

#endif
