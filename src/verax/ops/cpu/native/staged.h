// A recurrence over chunks for many heads at once, where most of the work does not wait for the recurrence.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "parallel.h"

namespace verax {

// Calls `work(head, i)` for every chunk i of every head, and `walk(head, i)` after it, over the pool's threads: for a
// head's chunks in order, each after `work` of that chunk has ended for all heads. `work(head, i + ahead)` comes after
// `walk(head, i)`, so that no more than `ahead` results of a head's `work` are needed at a time.
//
// Stage s of a head is the walk of chunk s - ahead, then the work of chunk s. Items are claimed in order, stage by
// stage, so whoever waits, waits for an item that some thread works on and that waits for earlier ones only.
template <typename Pool, typename Work, typename Walk>
void pipelined_scan(Pool& pool, int64_t chunks, int64_t heads, int64_t ahead, const Work& work, const Walk& walk) {
  std::vector<std::atomic<int64_t>> worked(chunks), stages(heads);
  for (auto& count : worked) count = 0;
  for (auto& count : stages) count = 0;
  const auto wait = [](const std::atomic<int64_t>& count, int64_t least) {
    for (int spins = 0; count.load(std::memory_order_acquire) < least; ++spins) {
      if (spins % 1024 == 1023) std::this_thread::yield();
    }
  };
  parallel_for(pool, (chunks + ahead) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t stage = item / heads, head = item % heads, chunk = stage - ahead;
      if (chunk >= 0) {
        wait(stages[head], stage);
        wait(worked[chunk], heads);
        walk(head, chunk);
      }
      if (stage < chunks) {
        work(head, stage);
        worked[stage].fetch_add(1, std::memory_order_release);
      }
      stages[head].fetch_add(1, std::memory_order_release);
    }
  });
}

}  // namespace verax
