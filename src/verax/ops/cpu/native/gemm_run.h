// Divides products into blocks and shares them over the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/gemm.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"

namespace verax {

// Most rows and columns of a block. More rows share a strip of W, more columns the copy of x: packing takes some 4% of
// the time at these sizes. What a block reads and writes at a time stays in a second cache level of 1 MB.
constexpr int64_t GEMM_ROWS = 192, GEMM_COLUMNS = 384;
constexpr int64_t GEMM_ROWS_OF_TILES = 512;  // a GGUF file's blocks take as long to unpack as a third of these
constexpr int64_t GEMM_LEAST_ROWS = 64;  // of a block, where rows are divided evenly between threads
constexpr int64_t GEMM_PIECES = 4;  // for each thread, at least

// x of all products in tiles of 16 rows, shared over the threads; where each product finds its own is noted in it.
template <typename Pool>
void pack_gemms(Pool& pool, std::vector<GemmTask>& tasks, std::optional<SharedScratch>& packed) {
  std::vector<int64_t> begins{0};  // of each task's tiles
  for (const GemmTask& t : tasks) begins.push_back(begins.back() + (t.M + GEMM_TILE_ROWS - 1) / GEMM_TILE_ROWS);
  const int64_t tile = GEMM_TILE_ROWS * tasks.front().K * 2;
  packed.emplace(begins.back() * tile);
  for (size_t i = 0; i < tasks.size(); ++i) tasks[i].packed = static_cast<char*>(packed->data()) + begins[i] * tile;
  const auto pack = VERAX_KERNEL(gemm_pack);
  parallel_for(pool, begins.back(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const size_t t = std::upper_bound(begins.begin(), begins.end(), i) - begins.begin() - 1;
      pack(tasks[t], i - begins[t], i - begins[t] + 1);
    }
  });
}

// How products are divided: most rows of a block; what its rows and its columns are multiples of, but for the last.
struct GemmDivision {
  int64_t rows, row_step, column_step;
};

// A block of a product.
struct GemmPiece {
  const GemmTask* task;
  GemmBlock block;
};

// Calls `multiply(piece, next)` for blocks that make up all products, over the pool's threads. `next`: the one that the thread
// probably takes after it, or null.
template <typename Pool, typename Multiply>
void divide_gemms(Pool& pool, const std::vector<GemmTask>& tasks, const GemmDivision& by, const Multiply& multiply) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t wanted = pieces_of(GEMM_PIECES * threads, static_cast<int64_t>(tasks.size()));
  std::vector<GemmPiece> work;
  for (const GemmTask& t : tasks) {
    // As many blocks of the same columns for each thread: with one more, all but one thread would wait for it.
    int64_t down = pieces_of(t.M, by.rows);
    if (t.M >= threads * GEMM_LEAST_ROWS) down = pieces_of(down, threads) * threads;
    const int64_t rows = pieces_of(pieces_of(t.M, down), by.row_step) * by.row_step;
    down = pieces_of(t.M, rows);
    const int64_t across = std::max(pieces_of(t.N, GEMM_COLUMNS), pieces_of(wanted, down));
    const int64_t columns = pieces_of(pieces_of(t.N, across), by.column_step) * by.column_step;
    // Blocks of the same columns follow each other: that part of W then comes from a cache.
    for (int64_t n = 0; n < t.N; n += columns) {
      for (int64_t m = 0; m < t.M; m += rows) {
        work.push_back({&t, {m, std::min(rows, t.M - m), n, std::min(columns, t.N - n)}});
      }
    }
  }
  const auto pieces = static_cast<int64_t>(work.size());
  parallel_for(pool, pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) multiply(work[i], i + threads < pieces ? &work[i + threads] : nullptr);
  });
}

// One round of work for all products, which share K and the kind of weight.
template <typename Pool>
void run_gemms(Pool& pool, std::vector<GemmTask> tasks) {
  tasks.erase(std::remove_if(tasks.begin(), tasks.end(), [](const GemmTask& t) { return t.M == 0 || t.N == 0; }),
              tasks.end());
  if (tasks.empty()) return;
  const bool tiles = gemm_has_tiles(tasks.front());
  std::optional<SharedScratch> packed;
  if (tiles) pack_gemms(pool, tasks, packed);
  const GemmDivision by = tiles ? GemmDivision{GEMM_ROWS_OF_TILES, 2 * GEMM_TILE_ROWS, 2 * GEMM_TILE_ROWS}
                                : GemmDivision{GEMM_ROWS, 1, GEMM_STRIP};
  const auto multiply = VERAX_KERNEL(gemm_block);
  const int64_t scratch = gemm_scratch_bytes(by.rows);
  divide_gemms(pool, tasks, by, [&](const GemmPiece& piece, const GemmPiece*) {
    multiply(*piece.task, piece.block, thread_scratch(scratch));
  });
}

template <typename Pool>
void run_gemm(Pool& pool, const GemmTask& task) {
  run_gemms(pool, {task});
}

// The product of an int8_pairs task whose x is float32 still: its rows are rounded first.
template <typename Pool>
void run_rounded_gemm(Pool& pool, GemmTask task) {
  constexpr int64_t ROUNDED_ROWS = 16;  // at a time
  const int64_t column = (task.M * 4 + 63) / 64 * 64;  // bytes of the scales, and of the sums
  const SharedScratch memory(2 * column + task.M * task.K);
  auto* at = static_cast<char*>(memory.data());
  const RoundTask rows{task.M,
                       task.K,
                       task.K,
                       false,
                       static_cast<const float*>(task.x),
                       reinterpret_cast<int8_t*>(at + 2 * column),
                       reinterpret_cast<float*>(at),
                       reinterpret_cast<int32_t*>(at + column)};
  const auto round = VERAX_KERNEL(gemm_round);
  parallel_for(pool, task.M, ROUNDED_ROWS, [&](int64_t begin, int64_t end) { round(rows, begin, end); });
  task.x = rows.y;
  task.row_scales = rows.scales;
  task.row_sums = rows.sums;
  run_gemm(pool, task);
}

}  // namespace verax
