// Work shared over a thread pool: XLA's own, `xla::ffi::ThreadPool`, or whatever has `num_threads` and `Schedule`.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace verax {

// Calls `body(begin, end)` over [0, total) in pieces of `grain`, on the calling thread and on as many of the pool's as
// help. Returns when all is done.
//
// A handler may itself run on a thread of the pool, so nobody waits for a task to *start*: pieces are claimed one by
// one from a counter, the caller claims until none is left, and then waits only for pieces that somebody is working
// on. A helper that comes late finds nothing to claim, and touches nothing but the counters, which it keeps alive.
template <typename Pool, typename Body>
void parallel_for(Pool& pool, int64_t total, int64_t grain, const Body& body) {
  const int64_t pieces = (total + grain - 1) / grain;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), pieces) - 1;
  if (helpers <= 0) {
    if (total > 0) body(int64_t{0}, total);
    return;
  }
  struct Counters {
    std::atomic<int64_t> claimed{0}, done{0};
  };
  auto counters = std::make_shared<Counters>();
  auto work = [counters, pieces, total, grain, &body] {
    int64_t piece;
    while ((piece = counters->claimed.fetch_add(1, std::memory_order_relaxed)) < pieces) {
      body(piece * grain, std::min(total, (piece + 1) * grain));
      counters->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  work();
  // Spin: a piece takes microseconds. Yield now and then: its thread may have lost its core to somebody else.
  for (int spins = 0; counters->done.load(std::memory_order_acquire) < pieces; ++spins) {
    if (spins % 1024 == 1023) std::this_thread::yield();
  }
}

}  // namespace verax
