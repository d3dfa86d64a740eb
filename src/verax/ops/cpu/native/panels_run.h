// Products of many rows with weights in panels: rows of x become cells, and blocks are shared over the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gemm_run.h"
#include "kernels/gemm.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"

namespace verax {

// Rows for each thread whose cells are in memory at a time.
constexpr int64_t PANEL_ROWS_OF_THREAD = 512;

// Most rows of a block that is multiplied by tiles (gemm_tile_piece).
constexpr int64_t PANEL_ROWS_OF_TILES = 256;

// Bytes of memory that has place for M rows of K values as cells.
inline int64_t cells_bytes(Weights kind, int64_t M, int64_t K) {
  if (gemm_tiles_panels(kind, K)) M = pieces_of(M, 2 * GEMM_TILE_ROWS) * 2 * GEMM_TILE_ROWS;
  return M * (gemm_pieces(kind, K) * (gemm_piece(kind) + 2) * 4 + 8) + 128;
}

// Rows of x, float32 still, as cells in memory that has place for them. Rows for f32 stay unchanged.
template <typename Pool>
void make_cells(Pool& pool, GemmTask& task, char* memory) {
  if (task.kind == Weights::f32) return;
  const bool pairs = task.kind == Weights::int8_pairs;
  // Bytes of the scales, and of the sums.
  const int64_t column = (task.M * (pairs ? 1 : gemm_pieces(task.kind, task.K)) * 4 + 63) / 64 * 64;
  const int64_t grain = rows_of_piece(task.K);
  const auto* x = static_cast<const float*>(task.x);
  task.x = memory + 2 * column;
  if (pairs) {
    const RoundTask rows{task.M,
                         task.K,
                         gemm_tiles_panels(task.kind, task.K) ? 0 : gemm_cell_values(task.kind) * gemm_piece(task.kind),
                         gemm_widens_bytes(),
                         x,
                         reinterpret_cast<int8_t*>(memory + 2 * column),
                         reinterpret_cast<float*>(memory),
                         reinterpret_cast<int32_t*>(memory + column)};
    const auto round = VERAX_KERNEL(gemm_round);
    parallel_for(pool, task.M, grain, [&](int64_t begin, int64_t end) { round(rows, begin, end); });
    task.row_scales = rows.scales, task.row_sums = rows.sums;
  } else {
    task.row_scales = task.kind == Weights::int8 ? reinterpret_cast<float*>(memory) : nullptr;
    const CellsTask rows{task.M, task.K, x, reinterpret_cast<float*>(memory + 2 * column),
                         const_cast<float*>(task.row_scales)};
    const auto copy = VERAX_KERNEL(gemm_cells);
    parallel_for(pool, task.M, grain, [&](int64_t begin, int64_t end) { copy(rows, begin, end); });
  }
}

// Products of the same x, float32 still, with weights in panels of one kind.
template <typename Pool>
void run_panels(Pool& pool, const std::vector<GemmTask>& tasks) {
  const GemmTask& first = tasks.front();
  if (first.M == 0) return;
  const int64_t most = std::min(first.M, PANEL_ROWS_OF_THREAD * pool.num_threads());
  const SharedScratch memory(cells_bytes(first.kind, most, first.K));
  const auto multiply = VERAX_KERNEL(gemm_panels);
  const GemmDivision by = gemm_tiles_panels(first.kind, first.K)
                              ? GemmDivision{PANEL_ROWS_OF_TILES, 2 * GEMM_TILE_ROWS, 2 * GEMM_STRIP}
                              : GemmDivision{GEMM_ROWS, 1, GEMM_STRIP};
  for (int64_t m = 0; m < first.M; m += most) {
    GemmTask rows = first;
    rows.M = std::min(most, first.M - m);
    rows.x = static_cast<const float*>(first.x) + m * first.K;
    make_cells(pool, rows, static_cast<char*>(memory.data()));
    std::vector<GemmTask> some;
    for (GemmTask task : tasks) {
      task.M = rows.M, task.x = rows.x, task.row_scales = rows.row_scales, task.row_sums = rows.row_sums;
      if (task.y) task.y += m * task.N;
      if (task.rounded) task.rounded += m * task.N;
      some.push_back(task);
    }
    divide_gemms(pool, some, by, [&](const GemmPiece& piece, const GemmPiece* next) {
      GemmBlock block = piece.block;
      if (next) block.next = gemm_panel(*next->task, next->block.n);
      multiply(*piece.task, block, thread_scratch(gemm_panels_scratch_bytes(*piece.task, block)));
    });
  }
}

// Bytes of both weights from which they are read for PANEL_ROWS_OF_TILES rows at once, whatever the hidden values take.
constexpr int64_t LARGE_MLP_BYTES = 8 * 1024 * 1024;

// Bytes of a block's hidden values, which should stay in a second cache level of 1 MB together with their cells.
constexpr int64_t HIDDEN_BYTES = 512 * 1024;
constexpr int64_t LEAST_HIDDEN_ROWS = 16;

// Rows for each thread below which threads share the columns of each product, so that each reads a part of the weights.
constexpr int64_t FEW_MLP_ROWS = 48;

// A pool without threads of its own.
struct CallingThread {
  int64_t num_threads() const { return 1; }
  template <typename Task>
  void Schedule(const Task&) const {}
};

// y = down(up(x)) of two products, where up has an activation: each thread takes rows through both, so that hidden values never
// leave its cache.
template <typename Pool>
void run_mlp(Pool& pool, GemmTask up, GemmTask down) {
  const int64_t M = up.M, threads = std::max<int64_t>(1, pool.num_threads());
  if (M < FEW_MLP_ROWS * threads) {
    up.y = static_cast<float*>(thread_scratch<1>(M * up.N * 4));  // run_panels has the other
    down.x = up.y;
    run_panels(pool, {up});
    return run_panels(pool, {down});
  }
  const bool large = (up.K + down.N) * up.N * 4 / gemm_cell_values(up.kind) >= LARGE_MLP_BYTES;
  const int64_t most = large ? PANEL_ROWS_OF_TILES : std::max(LEAST_HIDDEN_ROWS, HIDDEN_BYTES / (4 * up.N));
  const int64_t wanted = pieces_of(pieces_of(M, most), threads) * threads;  // as many for each thread
  const int64_t pieces = std::max<int64_t>(1, std::min(wanted, M / LEAST_HIDDEN_ROWS));
  const int64_t step = gemm_tiles_panels(up.kind, up.K) ? 2 * GEMM_TILE_ROWS : 1;
  const int64_t grain = pieces_of(pieces_of(M, pieces), step) * step;
  const int64_t of_x = (cells_bytes(up.kind, grain, up.K) + 63) / 64 * 64;
  const int64_t of_hidden = (cells_bytes(up.kind, grain, down.K) + 63) / 64 * 64;
  const auto multiply = VERAX_KERNEL(gemm_panels);
  parallel_for(pool, M, grain, [&](int64_t begin, int64_t end) {
    const int64_t rows = end - begin;
    const auto sums_of = [&](const GemmTask& t) { return gemm_panels_scratch_bytes(t, {0, rows, 0, GEMM_COLUMNS}); };
    const int64_t of_sums = std::max(sums_of(up), sums_of(down));
    auto* memory = static_cast<char*>(thread_scratch(of_x + of_hidden + grain * up.N * 4 + of_sums));
    auto* hidden = reinterpret_cast<float*>(memory + of_x + of_hidden);
    CallingThread alone;
    const auto run = [&](GemmTask task, const float* x, float* y, char* cells) {
      task.M = rows, task.x = x, task.y = y;
      make_cells(alone, task, cells);
      for (int64_t n = 0; n < task.N; n += GEMM_COLUMNS) {
        multiply(task, {0, rows, n, std::min(GEMM_COLUMNS, task.N - n)}, hidden + grain * up.N);
      }
    };
    run(up, static_cast<const float*>(up.x) + begin * up.K, hidden, memory);
    run(down, hidden, down.y + begin * down.N, memory + of_x);
  });
}

}  // namespace verax
