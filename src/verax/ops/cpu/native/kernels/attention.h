// Softmax attention of a tile of queries over keys that lie anywhere: a dense array, or pages of a cache.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

enum class Keys { f32, bf16, int8 };

// Arrays of one call. Key s of a sequence lies at `pages[s / page_size] * page_stride + head * head_stride +
// (s % page_size) * token_stride`, in elements; a dense array is one page.
struct AttentionTask {
  int64_t N, K, H;        // query heads, key/value heads, head size
  const void* q;          // [queries, N, H]
  bool q_bf16;            // else float32
  const void *k, *v;
  Keys keys;
  const float *k_scales, *v_scales;  // of int8: one for each H elements of k and v
  int64_t num_pages, page_size, page_stride, head_stride, token_stride;
  bool causal;            // each query sees one key more than the one before it
  int64_t window;         // keys that a causal query sees at most, the last ones; 0: all of them
  float scale;            // on the scores
  float soft_cap;         // bound of the scores, soft_cap tanh(score / soft_cap); 0: none
  float* out;             // [queries, N, H]
  const float* sinks;     // [N]: score of one more key for each head, whose value is zero; null: none
};

// Queries of one sequence with the N / K heads that read one key/value head. Rows: query by query, head by head.
struct AttentionTile {
  int64_t first_query, num_queries;
  int64_t head;                      // of keys and values
  int64_t visible;                   // keys that the first query sees
  int64_t begin, end;                // keys of this tile: at most those from the first that its first query sees to
                                     // the last that its last one sees; others are not read
  const int32_t* pages;
  const int32_t* query_segments;     // null, or by query and by key: they see their own segment
  const int32_t* key_segments;
  float* partial;                    // null, or where an unfinished result goes: attention_partial_floats
};

// Keys are taken in spans that begin at multiples of this, each with a softmax of its own, which are then merged in
// order. So a query's result depends on its own keys only, not on how the work was divided. (A sequence's only query,
// as in a decode step, adds its products in another order than one of several; that is all that its number decides.)
constexpr int64_t ATTENTION_SPAN = 512;

// Most rows of a tile: they share the reading and packing of a block of keys. A multiple of 6 (cells.h).
constexpr int64_t ATTENTION_ROWS = 192;

// Most rows whose products with a block of keys are taken at a time.
constexpr int64_t ATTENTION_GROUP = 32;

inline int64_t attention_padded(int64_t H) { return (H + 31) / 32 * 32; }

// Size of the unfinished result of some rows over one span: the sums, then the two softmax numbers of each.
inline int64_t attention_partial_floats(int64_t rows, int64_t H) { return rows * (attention_padded(H) + 2); }

// Size of the memory that a tile of `rows` rows needs to work in, aligned to a cache line: its queries and two states,
// a block of 64 keys and values, and some. Enough at every level.
inline int64_t attention_scratch_bytes(int64_t rows, int64_t H) {
  return 4 * (attention_padded(H) * (3 * rows + 2 * 64 + 1) + 4 * rows + 2 * ATTENTION_GROUP * 64 + 10 * 16);
}

// Rows of one tile: into `out`, or into `tile.partial` where its keys are one span of several. `next` is null, or the tile
// that this thread takes next: memory is asked for its first keys and values meanwhile.
VERAX_DECLARE_KERNEL(attention_tile, const AttentionTask& task, const AttentionTile& tile, const AttentionTile* next,
                     void* scratch)
// Merge the partial results of `spans` tiles that differ in their keys only, one after the other, into `out`.
VERAX_DECLARE_KERNEL(attention_merge, const AttentionTask& task, const AttentionTile& tile, int64_t spans,
                     float* partials)

}  // namespace verax
