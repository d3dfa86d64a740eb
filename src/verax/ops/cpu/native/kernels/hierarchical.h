// One chunk of LAM's hierarchical delta rule: what its tokens would write and read, the state before it left open.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

// Arrays of one call, all float32. Chunks are numbered (b n + i) H + h for chunk i of n of head h of row b.
struct HierarchicalTask {
  int64_t T, H, K, V, C;        // C tokens a chunk, which divides T
  int64_t hidden;               // of the perceptron behind the token flux
  const float *q, *k;           // [B, T, H, K], of any length
  const float* v;               // [B, T, H, V]
  const float* beta;            // [B, T, H]
  const float *fast, *slow;     // [B, T, H]: gates of the outputs
  const float *w1, *b1;         // [hidden, K + V], [hidden]
  const float *w2, *b2;         // [1, hidden], [1]
  bool local;                   // the rule without states, which has no flux either
  float* out;                   // [B, T, H, V]: the local rule's outputs; null for the other, and vice versa
  float* inner;                 // by chunk [C, V + K]: P U and q - P W
  float* shares;                // by chunk [C, 2]: of what is read from the fast and from the slow state
  float* product;               // by chunk [K, V + K]: k^T U and k^T W
  float* sums;                  // by chunk [K + V]: of the keys and of U
};

// What a chunk reads from the states before it.
struct HierarchicalRead {
  int64_t T, H, K, V, C;
  const float *inner, *shares;  // as above
  const float* found;           // by chunk [2, K, V]: the fast and the slow state, normalised
  float* out;                   // [B, T, H, V]
};

// Tokens that are worked on at a time: what they need, beside the sums of those before, stays in the second cache level.
constexpr int64_t HIERARCHICAL_BLOCK = 64;

inline int64_t hierarchical_padded(int64_t size) { return (size + 31) / 32 * 32; }

// Size of the memory that a chunk needs to work in, aligned to a cache line.
inline int64_t hierarchical_scratch_bytes(int64_t K, int64_t V) {
  const int64_t k = hierarchical_padded(K), v = hierarchical_padded(V), both = v + (k > v ? k : v);
  return 4 * (HIERARCHICAL_BLOCK * (5 * k + 3 * both) + k * (k + 2 * both) + 8 * HIERARCHICAL_BLOCK + 64);
}

// The same for the perceptron's weights and hidden values, which lie after it.
inline int64_t hierarchical_flux_bytes(int64_t K, int64_t V, int64_t hidden) {
  const int64_t width = hierarchical_padded(hidden);
  return 4 * width * (hierarchical_padded(K) + hierarchical_padded(V) + HIERARCHICAL_BLOCK + 2);
}

VERAX_DECLARE_KERNEL(hierarchical_chunk, const HierarchicalTask& task, int64_t chunk, void* scratch)
VERAX_DECLARE_KERNEL(hierarchical_read, const HierarchicalRead& task, int64_t chunk, void* scratch)

}  // namespace verax
