// y[M, N] = x[M, K] . W[N, K]^T + bias for many rows M, bound by arithmetic.
#pragma once

#include <cstdint>

#include "../levels.h"
#include "linear.h"

namespace verax {

enum class Activation { none, gelu, gelu_tanh };

// W is float32, bfloat16, of 8-bit integers with a scale for each row, or of blocks, whose weights are rounded to
// bfloat16 where the processor multiplies these (`gemm_rounds_blocks`). x is float32 with float32 weights and with blocks
// that are not rounded, bfloat16 with the others. Products are added in float32; x of blocks takes 16 bits with a scale for
// each 32 values where the processor multiplies such integers. K is a multiple of GEMM_DEPTH_STEP, N of GEMM_COLUMN_STEP.
//
// x of int8_pairs is of 8-bit integers as well, with a scale for each row (`gemm_round`), and products are added exactly:
// in 32-bit integers, or in float32, which holds them exactly up to K = 1,040.
struct GemmTask {
  Weights kind;
  int64_t M, N, K;
  const void *x, *weight;
  const float* scales;  // null, or [N]
  const float* row_scales;  // null, or [M] of int8_pairs, [pieces, M] of int8 in panels
  const int32_t* row_sums;  // null, or [M] of int8_pairs: of the integers of x
  const float* bias;    // null, or [N]
  float* y;
  void* packed;  // where tiles are multiplied, x as `gemm_pack` makes it: whole tiles of bfloat16
  BlockKind block;  // of blocks
  Activation activation;  // of panels: of x . W^T + bias
  uint16_t* rounded;  // of panels: null, or where y goes, rounded to bfloat16
  const GemmTask* gate;  // of panels: null, or a product of the same x and sizes whose SiLU y is multiplied by
};

// Rows [m, m + rows) and columns [n, n + columns) of y.
struct GemmBlock {
  int64_t m, rows, n, columns;
  const void* next = nullptr;  // of panels: where W is read from in the block after this one, if that is known
};

constexpr int64_t GEMM_DEPTH_STEP = 32, GEMM_COLUMN_STEP = 16;

// True at a level that multiplies bfloat16.
inline bool gemm_rounds_blocks() {
  return level() == Level::avx512_bf16 || level() == Level::amx || level() == Level::neon_bf16;
}

// Cells of K that are multiplied at a time, at most: half as many of 48 columns, or all of 16, fill three quarters of a first
// cache level of 48 KB, or of 32.
constexpr int64_t GEMM_DEPTH = 384;

// Most columns of W that are packed next to each other.
constexpr int64_t GEMM_STRIP = 48;

// The level amx multiplies tiles of 16 rows of x, unless they are float32: values of K that it copies of W at a time.
constexpr int64_t GEMM_TILE_ROWS = 16, GEMM_TILE_DEPTH = 1024;
inline bool gemm_has_tiles(const GemmTask& t) {
  return t.kind != Weights::f32 && t.kind != Weights::int8_pairs && level() == Level::amx;
}

// Bytes of the memory that a block works in: cells of x and of a strip of W, each 4 bytes, and for codes of blocks their
// scales, sums and minimums; or bfloat16 of 32 rows of W, and tiles of sums. Enough at every level.
inline int64_t gemm_scratch_bytes(int64_t rows) {
  const int64_t numbers = GEMM_DEPTH + 3 * GEMM_DEPTH / 16;
  const int64_t cells = 4 * (numbers * (rows + GEMM_STRIP) + 16);
  const int64_t tiles = 64 * GEMM_TILE_DEPTH + 128 * (rows + 2 * GEMM_TILE_ROWS);
  return cells > tiles ? cells : tiles;
}

// Most values of K whose products 32-bit integers hold.
constexpr int64_t GEMM_INTEGER_DEPTH = 1 << 17;

// Rows of 8-bit integers, -127..127, for int8_pairs: y[m, k] * scales[m] ~ x[m, k].
struct RoundTask {
  int64_t M, K, piece;  // y is [pieces, M, piece], or in tiles where piece is 0
  bool wide;            // y is of 16 bits, for panels where `gemm_widens_bytes`
  const float* x;
  int8_t* y;
  float* scales;  // NaN for a row with a value that is not finite
  int32_t* sums;  // of each row of y
};

// Rows [begin, end).
VERAX_DECLARE_KERNEL(gemm_round, const RoundTask& task, int64_t begin, int64_t end)
// Tiles [begin, end) of 16 rows of x, where `gemm_has_tiles`.
VERAX_DECLARE_KERNEL(gemm_pack, const GemmTask& task, int64_t begin, int64_t end)
// A block of y. Its rows begin at a tile where there are tiles.
VERAX_DECLARE_KERNEL(gemm_block, const GemmTask& task, const GemmBlock& block, void* scratch)

// Panels: W as the inner loops read it, packed once for all products. A panel is GEMM_STRIP rows of W, which are columns of
// the product, side by side: cells [N / GEMM_STRIP rounded up, K / values, GEMM_STRIP] of one float32, two bfloat16, two
// 8-bit integers or, of int8_pairs, four (two where none are multiplied at once) to which 128 is added. x is of such cells
// too, two integers in 16 bits each, in pieces of K:
// [pieces, M, gemm_piece]; x of int8 becomes integers of 16 bits with a scale for each piece of a row, and x of f32 is not
// packed: [M, K]. Where `gemm_tiles_panels`, x is in tiles instead (gemm_panel_tiles.h).
constexpr int64_t gemm_piece(Weights kind) { return kind == Weights::bf16 ? 512 : 384; }

// The largest integer of x with int8: 32 bits hold the products of a piece, 2 * 384 * 128 * GEMM_LARGEST.
constexpr float GEMM_LARGEST = 21845;

// True at a level that multiplies pairs of 16 bits, and no bytes.
inline bool gemm_widens_bytes() { return level() == Level::avx2 || level() == Level::avx512; }

// Values of a cell, for f32, bf16, int8 and int8_pairs.
inline int64_t gemm_cell_values(Weights kind) {
  return kind == Weights::f32 ? 1 : kind == Weights::int8_pairs && !gemm_widens_bytes() ? 4 : 2;
}

// Where W is read from column n on, a multiple of GEMM_STRIP, in panels.
inline const char* gemm_panel(const GemmTask& t, int64_t n) {
  const int64_t bytes = t.kind == Weights::f32 ? 4 : t.kind == Weights::bf16 ? 2 : 1;
  return static_cast<const char*>(t.weight) + n * t.K * bytes;
}

// True at a level whose instructions multiply such cells. Tiles take int8 as it lies (linear_tiles.h).
inline bool gemm_has_panels(Weights kind) {
  if (kind == Weights::f32) return true;
  const Level here = level();
  if (kind == Weights::bf16) return here == Level::avx512_bf16 || here == Level::amx || here == Level::neon_bf16;
  if (here == Level::avx512_bf16 || here == Level::avx512_vnni || here == Level::avx_vnni) return true;
  if (gemm_widens_bytes()) return true;
  return kind == Weights::int8_pairs && (here == Level::amx || here == Level::neon_bf16 || here == Level::neon_dot);
}

// True where panels are multiplied by tiles, of 16 cells of K in a step; steps in whose order x is packed.
constexpr int64_t GEMM_TILE_CELLS = 16, GEMM_TILE_STEPS = 16;
inline bool gemm_tiles_panels(Weights kind, int64_t K) {
  return kind != Weights::f32 && level() == Level::amx && K % (GEMM_TILE_CELLS * gemm_cell_values(kind)) == 0;
}

// Steps of a piece of K: 256 rows of x take 1 MB of the second cache level. A multiple of GEMM_TILE_STEPS.
inline int64_t gemm_tile_piece(const GemmTask& t) {
  constexpr int64_t MOST = 64;
  const int64_t steps = t.K / gemm_cell_values(t.kind) / GEMM_TILE_CELLS;
  return steps <= MOST ? steps : MOST;
}

// Pieces of a row of x.
inline int64_t gemm_pieces(Weights kind, int64_t K) {
  const int64_t values = gemm_piece(kind) * gemm_cell_values(kind);
  return (K + values - 1) / values;
}

// Rows of float32 as cells of bf16, or of 16-bit integers.
struct CellsTask {
  int64_t M, K;
  const float* x;
  float* cells;
  float* scales;  // [pieces, M] of integers, NaN where a value is not finite; null for bf16
};

// Rows [begin, end).
VERAX_DECLARE_KERNEL(gemm_cells, const CellsTask& task, int64_t begin, int64_t end)
// Bytes of the memory that a block of panels works in: y of a product apart, and sums of tiles.
inline int64_t gemm_panels_scratch_bytes(const GemmTask& t, const GemmBlock& block) {
  const int64_t apart = (t.rounded || t.gate) ? block.rows * block.columns * 4 : 0;
  if (!gemm_tiles_panels(t.kind, t.K)) return apart;
  const bool whole = gemm_tile_piece(t) * GEMM_TILE_CELLS * gemm_cell_values(t.kind) == t.K;
  const int64_t rows = (block.rows + 31) / 32 * 32, columns = whole ? 32 : (block.columns + 31) / 32 * 32;
  return apart + rows * columns * 4 + 64;
}
// A block of y, of panels.
VERAX_DECLARE_KERNEL(gemm_panels, const GemmTask& task, const GemmBlock& block, void* scratch)

}  // namespace verax
