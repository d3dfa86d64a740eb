// Divides attention into tiles and shares them over the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/attention.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"

namespace verax {

// The work of one call: sequences are added one by one, then all of it runs.
class AttentionRun {
 public:
  explicit AttentionRun(const AttentionTask& task) : task_(task), group_(task.N / task.K) {}

  // The queries of one sequence, as a tile of all of them; its fields head, begin, end and partial are set here.
  void add(const AttentionTile& sequence) {
    const int64_t count = sequence.num_queries;
    const int32_t* segments = sequence.query_segments;
    if (!segments || !std::is_sorted(segments, segments + count)) {
      return add_queries(sequence, 0, std::max<int64_t>(0, sequence.visible + count));
    }
    const auto end_of_segment = [&](int64_t query) {
      return std::upper_bound(segments + query, segments + count, segments[query]) - segments;
    };
    for (int64_t begin = 0, end; begin < count; begin = end) {
      end = end_of_segment(begin);
      for (int64_t next; end < count && (next = end_of_segment(end)) - begin <= SHARED_QUERIES;) end = next;
      AttentionTile part = sequence;
      part.first_query += begin;
      part.num_queries = end - begin;
      part.visible += task_.causal ? begin : 0;
      // Nothing is hidden from a segment alone, but by a window, whose blocks begin before it.
      const bool alone = segments[begin] == segments[end - 1] && !task_.window;
      part.query_segments = alone ? nullptr : segments + begin;
      add_queries(part, begin, end);
    }
  }

  template <typename Pool>
  void run(Pool& pool) const {
    const auto attend = VERAX_KERNEL(attention_tile);
    const auto merge = VERAX_KERNEL(attention_merge);
    const int64_t scratch = attention_scratch_bytes(most_rows_, task_.H);
    int64_t bytes = 0;  // of keys and values, read once for each query
    bool lone = true;   // queries
    for (const AttentionTile& t : tiles_) {
      bytes += (t.end - t.begin) * t.num_queries * task_.H * 4 + BYTES_OF_A_TILE;
      lone = lone && t.num_queries == 1;
    }
    const auto count = static_cast<int64_t>(tiles_.size());
    int64_t grain = grain_of(count, bytes);
    // Lone queries take so little that a thread should know its next tile.
    if (grain == 1 && lone) grain = std::clamp<int64_t>(count / (PIECES * pool.num_threads()), 1, MOST_TILES);
    parallel_for(pool, count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        attend(task_, tiles_[i], i + 1 < end ? &tiles_[i + 1] : nullptr, thread_scratch(scratch));
      }
    });
    for (const Split& split : splits_) {
      merge(task_, split.whole, split.spans, static_cast<float*>(split.partials->data()));
    }
  }

 private:
  // A tile of few keys takes as long as reading this from a cache.
  static constexpr int64_t BYTES_OF_A_TILE = 16 * 1024;

  // Pieces of lone queries' tiles for each thread, and most tiles of a piece.
  static constexpr int64_t PIECES = 4, MOST_TILES = 16;

  // Queries of a tile where keys of other segments are hidden. A tile reads every key that any of its queries sees, so
  // a tile of short segments should have few queries.
  static constexpr int64_t SEGMENTED_QUERIES = 64;

  // Queries of the segments that share a tile: one by one, segments of a few tokens would take longer.
  static constexpr int64_t SHARED_QUERIES = 32;

  // Queries that see none but keys [first, last).
  void add_queries(const AttentionTile& sequence, int64_t first, int64_t last) {
    int64_t at_once = std::max<int64_t>(1, ATTENTION_ROWS / group_);
    if (sequence.query_segments) at_once = std::min(at_once, SEGMENTED_QUERIES);
    for (int64_t done = 0; done < sequence.num_queries; done += at_once) {
      AttentionTile tile = sequence;
      tile.first_query += done;
      tile.num_queries = std::min(at_once, sequence.num_queries - done);
      tile.visible += task_.causal ? done : 0;
      if (tile.query_segments) tile.query_segments += done;
      tile.begin = std::max(first, task_.window ? tile.visible - task_.window : 0);
      tile.end = std::clamp<int64_t>(tile.visible + (task_.causal ? tile.num_queries - 1 : 0), 0, last);
      if (tile.query_segments) narrow(tile);
      tile.partial = nullptr;
      most_rows_ = std::max(most_rows_, tile.num_queries * group_);
      for (tile.head = 0; tile.head < task_.K; ++tile.head) {
        // Many queries make enough tiles for all threads; a single one is divided by its keys.
        if (sequence.num_queries == 1 && tile.end - tile.begin > ATTENTION_SPAN) {
          split(tile);
        } else {
          tiles_.push_back(tile);
        }
      }
    }
  }

  // Moves the tile's first and last key to the first and last of its queries' segments.
  static void narrow(AttentionTile& tile) {
    const auto [low, high] = std::minmax_element(tile.query_segments, tile.query_segments + tile.num_queries);
    const auto hidden = [&](int64_t key) { return tile.key_segments[key] < *low || tile.key_segments[key] > *high; };
    while (tile.begin < tile.end && hidden(tile.begin)) ++tile.begin;
    while (tile.begin < tile.end && hidden(tile.end - 1)) --tile.end;
  }

  struct Split {
    AttentionTile whole;
    int64_t spans;
    std::unique_ptr<AlignedBytes> partials;
  };

  void split(const AttentionTile& whole) {
    const int64_t first = whole.begin / ATTENTION_SPAN;
    const int64_t spans = (whole.end + ATTENTION_SPAN - 1) / ATTENTION_SPAN - first;
    const int64_t floats = attention_partial_floats(group_, task_.H);
    splits_.push_back({whole, spans, std::make_unique<AlignedBytes>(spans * floats * sizeof(float))});
    for (int64_t i = 0; i < spans; ++i) {
      AttentionTile tile = whole;
      tile.begin = std::max(whole.begin, (first + i) * ATTENTION_SPAN);
      tile.end = std::min(whole.end, (first + i + 1) * ATTENTION_SPAN);
      tile.partial = static_cast<float*>(splits_.back().partials->data()) + i * floats;
      tiles_.push_back(tile);
    }
  }

  const AttentionTask task_;
  const int64_t group_;
  int64_t most_rows_ = 1;
  std::vector<AttentionTile> tiles_;
  std::vector<Split> splits_;
};

}  // namespace verax
