// Divides products into blocks and shares them over the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/gemm.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"

namespace verax {

// Most rows and columns of a block. More rows share a strip of W, more columns the copy of x: packing takes some 4% of
// the time at these sizes. What a block reads and writes at a time stays in a second cache level of 1 MB.
constexpr int64_t GEMM_ROWS = 192, GEMM_COLUMNS = 384;
constexpr int64_t GEMM_PIECES = 4;  // for each thread, at least

// One round of work for all products, which share K and the kind of weight.
template <typename Pool>
void run_gemms(Pool& pool, const std::vector<GemmTask>& tasks) {
  const auto pieces = [](int64_t size, int64_t most) { return (size + most - 1) / most; };
  struct Piece {
    const GemmTask* task;
    GemmBlock block;
  };
  std::vector<Piece> work;
  int64_t most = 0;
  const int64_t wanted = pieces(GEMM_PIECES * pool.num_threads(), std::max<int64_t>(1, tasks.size()));
  for (const GemmTask& t : tasks) {
    if (t.M == 0 || t.N == 0) continue;
    const int64_t down = pieces(t.M, GEMM_ROWS), rows = pieces(t.M, down);
    const int64_t across = std::max(pieces(t.N, GEMM_COLUMNS), pieces(wanted, down));
    const int64_t columns = pieces(pieces(t.N, across), GEMM_STRIP) * GEMM_STRIP;
    most = std::max(most, rows);
    // Blocks of the same columns follow each other: that part of W then comes from a cache.
    for (int64_t n = 0; n < t.N; n += columns) {
      for (int64_t i = 0; i < down; ++i) {
        const int64_t m = i * rows;
        work.push_back({&t, {m, std::min(rows, t.M - m), n, std::min(columns, t.N - n)}});
      }
    }
  }
  const auto multiply = VERAX_KERNEL(gemm_block);
  const int64_t scratch = gemm_scratch_bytes(most);
  parallel_for(pool, static_cast<int64_t>(work.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) multiply(*work[i].task, work[i].block, thread_scratch(scratch));
  });
}

template <typename Pool>
void run_gemm(Pool& pool, const GemmTask& task) {
  run_gemms(pool, {task});
}

}  // namespace verax
