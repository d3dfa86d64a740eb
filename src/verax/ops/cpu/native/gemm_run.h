// Divides a product into blocks and shares them over the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "kernels/gemm.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"

namespace verax {

// Most rows and columns of a block. More rows share a strip of W, more columns the copy of x: packing takes some 4% of
// the time at these sizes. What a block reads and writes at a time stays in a second cache level of 1 MB.
constexpr int64_t GEMM_ROWS = 192, GEMM_COLUMNS = 384;
constexpr int64_t GEMM_ROWS_OF_BLOCKS = 512;  // in tiles: W takes as long to unpack as a third of these to multiply
constexpr int64_t GEMM_PIECES = 4;  // for each thread, at least

template <typename Pool>
void run_gemm(Pool& pool, GemmTask t) {
  if (t.M == 0 || t.N == 0) return;
  const auto pieces = [](int64_t size, int64_t most) { return (size + most - 1) / most; };
  const bool tiles = gemm_has_tiles(t);
  std::optional<SharedScratch> packed;
  if (tiles) {
    packed.emplace(gemm_packed_bytes(t));
    t.packed = packed->data();
    const auto pack = VERAX_KERNEL(gemm_pack);
    parallel_for(pool, pieces(t.M, GEMM_TILE_ROWS), 1, [&](int64_t begin, int64_t end) { pack(t, begin, end); });
  }
  const int64_t step = tiles ? 2 * GEMM_TILE_ROWS : 1, strip = tiles ? 2 * GEMM_TILE_ROWS : GEMM_STRIP;
  const int64_t most = tiles && t.kind == Weights::blocks ? GEMM_ROWS_OF_BLOCKS : GEMM_ROWS;
  const int64_t rows = pieces(pieces(t.M, pieces(t.M, most)), step) * step, down = pieces(t.M, rows);
  const int64_t across = std::max(pieces(t.N, GEMM_COLUMNS), pieces(GEMM_PIECES * pool.num_threads(), down));
  const int64_t columns = pieces(pieces(t.N, across), strip) * strip, strips = pieces(t.N, columns);
  const auto multiply = VERAX_KERNEL(gemm_block);
  const int64_t scratch = gemm_scratch_bytes(rows);
  parallel_for(pool, down * strips, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // Blocks of the same columns follow each other: that part of W then comes from a cache.
      GemmBlock block{};
      block.n = i / down * columns;
      block.columns = std::min(columns, t.N - block.n);
      block.m = i % down * rows;
      block.rows = std::min(rows, t.M - block.m);
      multiply(t, block, thread_scratch(scratch));
    }
  });
}

}  // namespace verax
