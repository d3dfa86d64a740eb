// LAM's hierarchical delta rules: what the tokens of a chunk make without the states, and the states' walk over chunks.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

// Arrays of one call, all float32. Head h of row b is number b H + h; it has n = T / C chunks.
struct HierarchicalTask {
  int64_t B, T, H, K, V, C;     // C tokens a chunk, which divides T
  const float *q, *k;           // [B, T, H, K], of any length
  const float* v;               // [B, T, H, V]
  const float* beta;            // [B, T, H]
  const float* gates[2];        // [B, T, H]: of the outputs, fast and slow
  float* out;                   // [B, T, H, V]
  // What follows is not for the local rule, which has no states.
  const float* decays[2];       // [B, T, H]
  int64_t hidden, token_hidden;  // of the perceptrons for the flux of a chunk and of a token
  const float *w1, *b1;         // [hidden, K + V + 1], [hidden]: of a chunk
  const float *w2, *b2;         // [1, hidden], [1]
  const float* bilinear;        // [H, K, V]
  const float* temperature;     // [H]
  const float* token_flux;      // of a token, as `hierarchical_pack_flux` writes it
  float* states[2];             // [B, H, K, V]: after the last chunk
  int64_t ahead;                // chunks of a head that may be worked on before its states reach the first of them
  float* shared;                // hierarchical_shared_floats: what the parts of the work leave for each other
};

// Tokens that are worked on at a time: with the sums of those before, what they need stays in the second cache level.
constexpr int64_t HIERARCHICAL_BLOCK = 64;

inline int64_t hierarchical_padded(int64_t size) { return (size + 31) / 32 * 32; }

// A register's worth at every level.
inline int64_t hierarchical_hidden(int64_t hidden) { return (hidden + 15) / 16 * 16; }

// What a head's chunk leaves for the walk. Sizes are padded.
struct HierarchicalSlot {
  float* inner;    // [C, V + K]: P U and q - P W
  float* product;  // [K, V + K]: k^T U and k^T W
  float* shares;   // [C, 2]: of what is read from the fast and from the slow state
  float* keep;     // [2]: of the states before it
};

struct HierarchicalShared {
  int64_t both, slot, head;  // floats
  explicit HierarchicalShared(const HierarchicalTask& t)
      : both(hierarchical_padded(t.V) + hierarchical_padded(t.K)),
        slot((t.C + hierarchical_padded(t.K)) * both + (2 * t.C + 31) / 16 * 16),
        head(t.ahead * slot + hierarchical_padded(t.K) * 2 * hierarchical_padded(t.V)) {}

  // [K, 2 V]: the fast and the slow state next to each other.
  float* states(const HierarchicalTask& t, int64_t head_number) const {
    return t.shared + head_number * head + t.ahead * slot;
  }
  HierarchicalSlot of(const HierarchicalTask& t, int64_t head_number, int64_t chunk) const {
    float* inner = t.shared + head_number * head + chunk % t.ahead * slot;
    float* product = inner + t.C * both;
    float* keep = product + hierarchical_padded(t.K) * both;
    return {inner, product, keep + 16, keep};
  }
  // [heads]: the flux of a chunk.
  float* psi(const HierarchicalTask& t, int64_t chunk) const { return t.shared + t.B * t.H * (head + chunk); }
};

// With two, the mean over all heads that a chunk's mixing needs is there in time, if the threads keep pace with each
// other. More, as far as `floats` in the caches hold what they leave, so that none waits for one that lost its core.
inline int64_t hierarchical_ahead(const HierarchicalTask& t, int64_t floats) {
  const int64_t fit = floats / (t.B * t.H * HierarchicalShared(t).slot), chunks = t.T / t.C;
  return fit > chunks ? chunks : fit > 2 ? fit : 2;
}

inline int64_t hierarchical_shared_floats(const HierarchicalTask& t) {
  return t.B * t.H * (HierarchicalShared(t).head + t.T / t.C);
}

// Size of the memory that a thread needs to work in, aligned to a cache line.
inline int64_t hierarchical_scratch_bytes(const HierarchicalTask& t) {
  const int64_t K = hierarchical_padded(t.K), V = hierarchical_padded(t.V), both = V + (K > V ? K : V);
  const int64_t token = 5 * K + 3 * both + hierarchical_hidden(t.token_hidden) + 8;
  return 4 * (HIERARCHICAL_BLOCK * token + K * (K + 2 * both) + K + V);
}

// The perceptron of a token's flux by input: [V + K, hidden], sizes padded with zeros, then [hidden] twice and [1].
inline int64_t hierarchical_flux_floats(const HierarchicalTask& t) {
  return hierarchical_hidden(t.token_hidden) * (hierarchical_padded(t.K) + hierarchical_padded(t.V) + 2) + 1;
}

// w1 [hidden, K + V] of the key, then of the value; packed, they are the other way round.
inline void hierarchical_pack_flux(const HierarchicalTask& t, const float* w1, const float* b1, const float* w2,
                                   const float* b2, float* to) {
  const int64_t width = hierarchical_hidden(t.token_hidden), V = hierarchical_padded(t.V);
  const int64_t inputs = V + hierarchical_padded(t.K);
  for (int64_t i = 0; i < hierarchical_flux_floats(t); ++i) to[i] = 0;
  for (int64_t j = 0; j < t.token_hidden; ++j) {
    const float* row = w1 + j * (t.K + t.V);
    for (int64_t d = 0; d < t.K; ++d) to[(V + d) * width + j] = row[d];
    for (int64_t d = 0; d < t.V; ++d) to[d * width + j] = row[t.K + d];
    to[inputs * width + j] = b1[j];
    to[(inputs + 1) * width + j] = w2[j];
  }
  to[(inputs + 2) * width] = b2[0];
}

// All of a chunk of the local rule.
VERAX_DECLARE_KERNEL(hierarchical_local, const HierarchicalTask& task, int64_t head, int64_t chunk, void* scratch)

// What a chunk makes without the states, into its slot, and its psi.
VERAX_DECLARE_KERNEL(hierarchical_within, const HierarchicalTask& task, int64_t head, int64_t chunk, void* scratch)

// A chunk's outputs and what it makes of its head's states: after its psi of all heads, and the head's chunk before.
VERAX_DECLARE_KERNEL(hierarchical_walk, const HierarchicalTask& task, int64_t head, int64_t chunk, void* scratch)

}  // namespace verax
