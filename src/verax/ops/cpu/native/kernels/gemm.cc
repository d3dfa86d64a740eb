// for each piece of K that fits the first cache level:
//   copy x of the block's rows as cells                      (into the second level)
//   for each strip of columns:
//     pack W of the strip                                    (into the first level)
//     for each tile of rows:
//       y = bias or y so far, + x . W                        (in registers)
//
// Each number of y takes its products in the order of K, whatever is computed beside it. The blocking is that of Goto
// and van de Geijn (2008, doi:10.1145/1356052.1356053), with the roles of the two operands as in their GEBP.
#include "gemm.h"

#include "cells.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Registers of sums: so many in all, for at most so many vectors of columns. AVX2 has 16 registers, the others 32.
#if defined(VERAX_PORTABLE) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr int SUMS = 12, VECTORS = 2;
#else
constexpr int SUMS = 24, VECTORS = 3;
#endif
static_assert(VECTORS * F32::lanes <= GEMM_STRIP, "a strip is room for the vectors of a tile");
constexpr int STRIP = VECTORS * F32::lanes;

template <int C>
constexpr int TILE = SUMS / C < 12 ? SUMS / C : 12;

struct Tile {
  Matrix x, weight, y;
  const float* bias;  // null unless y begins here
  bool first;
};

template <int R, int C>
void multiply(const Tile& t, int64_t depth) {
  F32 sums[R][C];
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) {
      const int at = c * F32::lanes;
      sums[r][c] = !t.first ? load(t.y.row(r) + at) : t.bias ? load(t.bias + at) : zero();
    }
  add_products<Bf16Cells, R, C>(sums, t.x, t.weight, depth);
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) store(t.y.row(r) + c * F32::lanes, sums[r][c]);
}

template <int C, int R = TILE<C>>
void multiply_rows(int64_t rows, const Tile& t, int64_t depth) {
  if (rows == R) return multiply<R, C>(t, depth);
  if constexpr (R > 1) multiply_rows<C, R - 1>(rows, t, depth);
}

// All rows of the block, in tiles that are as even as can be.
template <int C>
void multiply_strip(int64_t rows, Tile t, int64_t depth) {
  const int64_t tiles = (rows + TILE<C> - 1) / TILE<C>;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t here = rows / tiles + (i < rows % tiles);
    multiply_rows<C>(here, t, depth);
    t.x.at = t.x.row(here);
    t.y.at = t.y.row(here);
  }
}

void copy_rows(Matrix to, const GemmTask& t, const GemmBlock& block, int64_t k, int64_t depth) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const bf16* from = t.x + (block.m + r) * t.K + k;
    for (int64_t i = 0; i < depth; i += CHUNK) to_cells(Bf16Cells{}, to.row(r) + i / Bf16Cells::depth, from + i);
  }
}

// Columns [n, n + columns) of W, `depth` values from the k-th; the ones that come next are asked for meanwhile.
void pack_strip(Matrix to, const GemmTask& t, int64_t n, int64_t columns, int64_t k, int64_t depth) {
  const bf16 *rows[STRIP], *next[STRIP];
  for (int64_t i = 0; i < columns; ++i) {
    rows[i] = t.weight + (n + i) * t.K + k;
    next[i] = n + i + STRIP < t.N ? rows[i] + STRIP * t.K : rows[i];
  }
  pack_columns<Bf16Cells>(to, rows, next, columns, depth);
}

}  // namespace

void gemm_block(const GemmTask& t, const GemmBlock& block, void* scratch) {
  const int64_t most = GEMM_DEPTH / Bf16Cells::depth;
  float* memory = static_cast<float*>(scratch);
  const Matrix weight{memory, STRIP}, x{memory + most * STRIP, most};
  for (int64_t k = 0; k < t.K; k += GEMM_DEPTH) {
    const int64_t values = t.K - k < GEMM_DEPTH ? t.K - k : GEMM_DEPTH, depth = values / Bf16Cells::depth;
    copy_rows(x, t, block, k, values);
    for (int64_t n = block.n; n < block.n + block.columns; n += STRIP) {
      const int64_t left = block.n + block.columns - n, columns = left < STRIP ? left : STRIP;
      pack_strip(weight, t, n, columns, k, values);
      Tile tile{x, weight, {t.y + block.m * t.N + n, t.N}, t.bias ? t.bias + n : nullptr, k == 0};
      int64_t vectors = columns / F32::lanes;
      const auto advance = [&](int by) {
        tile.weight.at += by * F32::lanes;
        tile.y.at += by * F32::lanes;
        if (tile.bias) tile.bias += by * F32::lanes;
        vectors -= by;
      };
      for (; vectors >= VECTORS; advance(VECTORS)) multiply_strip<VECTORS>(block.rows, tile, depth);
      if (VECTORS > 2 && vectors >= 2) {
        multiply_strip<2>(block.rows, tile, depth);
        advance(2);
      }
      if (vectors) multiply_strip<1>(block.rows, tile, depth);
    }
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
