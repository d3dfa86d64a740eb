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

// Rows of x, float32 still, as cells in memory that has place for them. Those of f32 stay as they are.
template <typename Pool>
void make_cells(Pool& pool, GemmTask& task, char* memory) {
  if (task.kind == Weights::f32) return;
  const int64_t column = (task.M * 4 + 63) / 64 * 64;  // bytes of the scales, and of the sums
  const int64_t grain = rows_of_piece(task.K);
  const auto* x = static_cast<const float*>(task.x);
  task.x = memory + 2 * column;
  if (task.kind == Weights::int8_pairs) {
    const RoundTask rows{task.M,
                         task.K,
                         4 * GEMM_PIECE,
                         x,
                         reinterpret_cast<int8_t*>(memory + 2 * column),
                         reinterpret_cast<float*>(memory),
                         reinterpret_cast<int32_t*>(memory + column)};
    const auto round = VERAX_KERNEL(gemm_round);
    parallel_for(pool, task.M, grain, [&](int64_t begin, int64_t end) { round(rows, begin, end); });
    task.row_scales = rows.scales, task.row_sums = rows.sums;
  } else {
    const CellsTask rows{task.M, task.K, x, reinterpret_cast<float*>(memory + 2 * column)};
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
  const SharedScratch memory(most * (gemm_pieces(first.kind, first.K) * GEMM_PIECE * 4 + 8) + 128);
  const auto multiply = VERAX_KERNEL(gemm_panels);
  for (int64_t m = 0; m < first.M; m += most) {
    GemmTask rows = first;
    rows.M = std::min(most, first.M - m);
    rows.x = static_cast<const float*>(first.x) + m * first.K;
    make_cells(pool, rows, static_cast<char*>(memory.data()));
    std::vector<GemmTask> some;
    for (GemmTask task : tasks) {
      task.M = rows.M, task.x = rows.x, task.row_scales = rows.row_scales, task.row_sums = rows.row_sums;
      task.y += m * task.N;
      some.push_back(task);
    }
    divide_gemms(pool, some, {GEMM_ROWS, 1, GEMM_STRIP}, multiply);
  }
}

}  // namespace verax
