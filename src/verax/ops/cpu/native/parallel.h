// Work shared over a thread pool: XLA's own, `xla::ffi::ThreadPool`, or whatever has `num_threads` and `Schedule`.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace verax {

// Number of pieces of at most so much that make up a size.
inline int64_t pieces_of(int64_t size, int64_t most) { return (size + most - 1) / most; }

// Bytes below which one thread is as quick alone: to wake another takes as long as reading this number from a cache.
constexpr int64_t ALONE_BYTES = 512 * 1024;

// Grain of `pieces` for a parallel_for whose work is about as much as reading `bytes` in all.
inline int64_t grain_of(int64_t pieces, int64_t bytes) {
  return bytes < ALONE_BYTES ? std::max<int64_t>(1, pieces) : 1;
}

// Elements of a row-wise or elementwise operation that a thread takes at a time: below it, waking another takes longer.
constexpr int64_t ELEMENTS_OF_PIECE = 32 * 1024;
inline int64_t rows_of_piece(int64_t elements) { return std::max<int64_t>(1, ELEMENTS_OF_PIECE / elements); }

// Calls `body(begin, end)` over [0, total) in pieces of `grain`, which memory may be sized for, on the calling thread and on
// as many of the pool's as help. Returns when all is done.
//
// A handler may itself run on a thread of the pool, so nobody waits for a task to *start*: pieces are claimed one by
// one from a counter, the caller claims until none is left, and then waits only for pieces that somebody is working
// on. A helper that comes late finds nothing to claim, and touches nothing but the counters, which it keeps alive.
template <typename Pool, typename Body>
void parallel_for(Pool& pool, int64_t total, int64_t grain, const Body& body) {
  const int64_t pieces = pieces_of(total, grain);
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), pieces) - 1;
  if (helpers <= 0) {
    for (int64_t begin = 0; begin < total; begin += grain) body(begin, std::min(total, begin + grain));
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
