// One token a row from scores over the vocabulary: temperature, min-p, top-k, top-p, one draw; and log-probabilities.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

// A row to draw from. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off; `u` is in [0, 1).
struct SampleRow {
  int64_t V;
  const float* logits;
  float temperature, top_p, min_p, u;
  int32_t top_k;
};

// Tokens of a chunk of the cumulative sum, whose chunks are added up first.
constexpr int64_t SAMPLE_CHUNK = 512;

// Floats of a row's buffer: twice the vocabulary in whole chunks.
static inline int64_t sample_buffer_size(int64_t V) {
  return 2 * ((V + SAMPLE_CHUNK - 1) / SAMPLE_CHUNK * SAMPLE_CHUNK);
}

// Draws a token. A row with a NaN gives the first NaN's place. `buffer` is aligned to a cache line.
VERAX_DECLARE_KERNEL(sample_row, const SampleRow& row, float* buffer, int32_t* token)

// Scores of a row, and a token of it.
struct LogprobsRow {
  int64_t V;
  const float* logits;
  int32_t chosen;
  int64_t num_top;  // at most V
};

// Log-probabilities, nats, and ids of the token and then of the best `num_top`, of equals the first; the token's rank
// from 1.
VERAX_DECLARE_KERNEL(logprobs_row, const LogprobsRow& row, float* values, int32_t* ids, int32_t* rank)

}  // namespace verax
