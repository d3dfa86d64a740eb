// for each piece of K:
//   for each strip of columns, which lie in a panel:           (few rows: first the strips, then the pieces)
//     for each tile of rows:
//       y = y so far + x . W                                 (in registers; W and x where they lie)
//   after the last piece: y * scale + bias, GELU
// if there is a gate: the same for it, and y * SiLU(gate); or y rounded to bfloat16
//
// It adds the same products in the same order as gemm.cc, which packs W in each call.
#if defined(__x86_64__) && !defined(__clang__)
// On x86, GCC 12 would keep two copies of each sum of integers, the second in memory: half of the speed.
#pragma GCC optimize("no-tree-coalesce-vars")
#endif

#include "gemm.h"
#include "gemm_panel_tiles.h"
#include "gemm_strip.h"
#include "linear_integers.h"
#include "silu_lanes.h"

#if defined(VERAX_HALF_DOT) && !defined(VERAX_TILES)
#define VERAX_WIDE_CELLS  // levels for which gemm_has_panels(Weights::int8)
#endif

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Most rows with which a strip is read from end to end, since x stays in the first cache level.
constexpr int64_t FEW_ROWS = 16;

// Cells of K that are multiplied at a time; as many of f32 as of int8.
template <class Cells>
constexpr int64_t PIECE = gemm_piece(std::is_same_v<Cells, Bf16Cells> ? Weights::bf16 : Weights::int8);

// Cells of x from row m and cell k on: of f32 x itself, of others pieces.
template <class Cells>
auto rows_of(const GemmTask& t, int64_t m, int64_t k) {
  auto* x = const_cast<float*>(static_cast<const float*>(t.x));
  if constexpr (std::is_same_v<Cells, F32Cells>) {
    return Matrix{x + m * t.K + k, t.K};
  } else {
    return Strided<PIECE<Cells>>{x + k * t.M + m * PIECE<Cells>};
  }
}

// Cells of int8_pairs, and a cell of W as it lies in memory.
#if defined(VERAX_WIDE_CELLS) && !defined(VERAX_BYTE_DOT)
using RoundedCells = OffsetCells;
template <class Cells>
using Packed = std::conditional_t<WIDE<Cells>, BytePair, std::conditional_t<INTEGERS<Cells>, OffsetPair, float>>;
#else
using RoundedCells = IntegerCells;
template <class Cells>
using Packed = std::conditional_t<WIDE<Cells>, BytePair, float>;
#endif

// The block of t's product; its first number goes to sums.at.
template <class Cells>
void multiply_into(Matrix sums, const GemmTask& t, const GemmBlock& block, [[maybe_unused]] char* tiles) {
#if defined(VERAX_TILES)
  if constexpr (!std::is_same_v<Cells, F32Cells>) {
    if (gemm_tiles_panels(t.kind, t.K)) return multiply_panel_tiles<(INTEGERS<Cells>)>(sums, t, block, tiles);
  }
#endif
  const bool few = block.rows <= FEW_ROWS;
  const int64_t cells = t.K / Cells::depth, width = few ? GEMM_STRIP : STRIP;
  auto* w = static_cast<Packed<Cells>*>(const_cast<void*>(t.weight));
  const auto panel = [&](int64_t n, int64_t k) { return w + (n / GEMM_STRIP * cells + k) * GEMM_STRIP; };
  // Bytes to what is multiplied after the cells from k on of n's panel, in the order of the loops below; 0 if that is unknown.
  const auto ahead = [&](int64_t n, int64_t k) {
    const int64_t next_n = n - n % GEMM_STRIP + GEMM_STRIP, next_k = k + PIECE<Cells>;
    const bool more_columns = next_n < block.n + block.columns, more_cells = next_k < cells;
    const void* next = block.next;
    if (more_cells && (few || !more_columns)) {
      next = panel(few ? n : block.n, next_k);
    } else if (more_columns) {
      next = panel(next_n, few ? 0 : k);
    }
    return next ? static_cast<const char*>(next) - reinterpret_cast<const char*>(panel(n, k)) : 0;
  };
  const auto multiply_piece = [&](int64_t n, int64_t k) {
    const int64_t depth = cells - k < PIECE<Cells> ? cells - k : PIECE<Cells>;
    const bool last = k + depth == cells;
    const auto rows = rows_of<Cells>(t, block.m, k);
    const int64_t left = block.n + block.columns - n, columns = left < width ? left : width;
    const Strided<GEMM_STRIP, Packed<Cells>> weight{panel(n, k) + n % GEMM_STRIP};
    const Matrix y{sums.at + (n - block.n), sums.stride};
    auto tile = begin_tile(t, block, n, rows, weight, y, k == 0, last);
    if constexpr (WIDE<Cells>) tile.row_scales = t.row_scales + k / PIECE<Cells> * t.M + block.m;
    tile.ahead = ahead(n, k);
    multiply_columns<Cells, true>(block.rows, tile, columns, depth);
    if (!last || t.activation == Activation::none) return;
    for (int64_t m = 0; m < block.rows; ++m) {
      for (int64_t i = 0; i < columns; i += F32::lanes) store(y.row(m) + i, activated(load(y.row(m) + i), t.activation));
    }
  };
  if (few) {
    for (int64_t n = block.n; n < block.n + block.columns; n += width) {
      for (int64_t k = 0; k < cells; k += PIECE<Cells>) multiply_piece(n, k);
    }
  } else {
    for (int64_t k = 0; k < cells; k += PIECE<Cells>) {
      for (int64_t n = block.n; n < block.n + block.columns; n += width) multiply_piece(n, k);
    }
  }
}

template <class Cells>
void multiply_panels(const GemmTask& t, const GemmBlock& block, void* scratch) {
  const Matrix apart{static_cast<float*>(scratch), block.columns};
  const int64_t size = (t.rounded || t.gate) ? block.rows * block.columns * 4 : 0;
  char* tiles = static_cast<char*>(scratch) + (size + 63) / 64 * 64;
  if (t.rounded) {
    multiply_into<Cells>(apart, t, block, tiles);
    for (int64_t m = 0; m < block.rows; ++m) {
      round_row(t.rounded + (block.m + m) * t.N + block.n, apart.row(m), block.columns);
    }
    return;
  }
  const Matrix y{t.y + block.m * t.N + block.n, t.N};
  if (!t.gate) return multiply_into<Cells>(y, t, block, tiles);
  GemmTask gate = *t.gate;
  GemmBlock first = block;
  first.next = gemm_panel(gate, block.n);
  multiply_into<Cells>(y, t, first, tiles);
  gate.M = t.M, gate.x = t.x, gate.row_scales = t.row_scales, gate.row_sums = t.row_sums;
  multiply_into<Cells>(apart, gate, block, tiles);
  for (int64_t m = 0; m < block.rows; ++m) {
    for (int64_t i = 0; i < block.columns; i += F32::lanes) {
      store(y.row(m) + i, mul(load(y.row(m) + i), silu_of(load(apart.row(m) + i))));
    }
  }
}

#if defined(VERAX_WIDE_CELLS)
// Rows [begin, end) as integers, each piece with its scale.
void wide_cells(const CellsTask& t, int64_t begin, int64_t end) {
  constexpr int64_t piece = PIECE<WideCells>, values = piece * WideCells::depth;
  for (int64_t k = 0; k < t.K; k += values) {
    const int64_t count = t.K - k < values ? t.K - k : values;
    for (int64_t m = begin; m < end; ++m) {
      const float* from = t.x + m * t.K + k;
      auto* to = reinterpret_cast<int16_t*>(t.cells + (k / values * t.M + m) * piece);
      const float scale = integer_scale(from, count, GEMM_LARGEST);
      t.scales[k / values * t.M + m] = scale;
      const F32 factor = broadcast(integer_factor(scale));
      for (int64_t i = 0; i < count; i += F32::lanes) store_int16s(to + i, whole(mul(load(from + i), factor)));
    }
  }
}
#endif

}  // namespace

void gemm_cells(const CellsTask& t, int64_t begin, int64_t end) {
#if defined(VERAX_TILES)
  for (int64_t m = begin; m < end; ++m) {
    tile_row(t.cells, t.M, m, t.K / CHUNK, [&](char* to, int64_t cell) {
      to_cells(Bf16Cells{}, reinterpret_cast<float*>(to), t.x + m * t.K + cell * Bf16Cells::depth);
    });
  }
#else
#if defined(VERAX_WIDE_CELLS)
  if (t.scales) return wide_cells(t, begin, end);
#endif
  constexpr int64_t piece = PIECE<Bf16Cells>, values = piece * Bf16Cells::depth;
  for (int64_t k = 0; k < t.K; k += values) {
    const int64_t count = t.K - k < values ? t.K - k : values;
    for (int64_t m = begin; m < end; ++m) {
      const float* from = t.x + m * t.K + k;
      float* to = t.cells + (k / values * t.M + m) * piece;
      for (int64_t i = 0; i < count; i += CHUNK) to_cells(Bf16Cells{}, to + i / Bf16Cells::depth, from + i);
    }
  }
#endif
}

void gemm_panels(const GemmTask& t, const GemmBlock& block, void* scratch) {
  if (t.kind == Weights::f32) return multiply_panels<F32Cells>(t, block, scratch);
  if (t.kind == Weights::bf16) return multiply_panels<Bf16Cells>(t, block, scratch);
#if defined(VERAX_WIDE_CELLS)
  if (t.kind == Weights::int8) return multiply_panels<WideCells>(t, block, scratch);
#endif
  multiply_panels<RoundedCells>(t, block, scratch);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
