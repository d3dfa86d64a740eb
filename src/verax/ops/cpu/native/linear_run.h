// Shares products with few rows over the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/linear.h"
#include "levels.h"
#include "parallel.h"

namespace verax {

// Bytes of weight that a thread takes at a time, at most and at least: some ten microseconds of memory traffic, and as long
// as it takes to ask another thread. Of less than two pieces one thread takes all. (They are short: threads that have work
// in each of a step's products stay awake.)
constexpr int64_t LINEAR_PIECE = 256 * 1024, LINEAR_LEAST = 32 * 1024;

// Pieces of each thread: with few rows of x as few as may be, since the streams of a piece begin with memory that nothing
// has asked for yet; with many, the last piece should be short.
constexpr int64_t PIECES_OF_FEW_ROWS = 2, PIECES_OF_MANY_ROWS = 4;

// Products whose x is packed, with weights of one K and one kind; blocks may be of several. One round of work for all of
// them.
template <typename Pool>
void run_linear(Pool& pool, const std::vector<LinearTask>& tasks) {
  constexpr int64_t QUICK_ROWS = 4;  // rows of x that take as long as one
  const int64_t times = std::max<int64_t>(1, tasks.front().M / QUICK_ROWS);
  int64_t total = 0, bytes = 0;
  for (const LinearTask& task : tasks) {
    total += task.N;
    bytes += task.N * linear_row_bytes(task) * times;
  }
  if (total == 0) return;
  const auto columns = VERAX_KERNEL(linear_columns);
  const bool few = tasks.front().M <= QUICK_ROWS, alone = bytes < 2 * LINEAR_LEAST || pool.num_threads() == 1;
  const int64_t pieces = pool.num_threads() * (few ? PIECES_OF_FEW_ROWS : PIECES_OF_MANY_ROWS);
  std::vector<int64_t> grains, begins{0};  // of each task: rows of a piece; number of the first piece
  for (const LinearTask& task : tasks) {
    const int64_t row = std::max<int64_t>(1, linear_row_bytes(task)), least = LINEAR_LEAST / (row * times);
    const int64_t rows = alone ? task.N : std::min(LINEAR_PIECE / row, std::max(least, total / pieces));
    grains.push_back(std::max(LINEAR_STEP, rows / LINEAR_STEP * LINEAR_STEP));
    begins.push_back(begins.back() + (task.N + grains.back() - 1) / grains.back());
  }
  parallel_for(pool, begins.back(), alone ? begins.back() : 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const size_t t = std::upper_bound(begins.begin(), begins.end(), piece) - begins.begin() - 1;
      const int64_t row = (piece - begins[t]) * grains[t];
      columns(tasks[t], row, std::min(tasks[t].N, row + grains[t]));
    }
  });
}

}  // namespace verax
