// One token a row from scores over the vocabulary: temperature, min-p, top-k, top-p, one draw.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

struct SampleTask {
  int64_t V;
  const float* logits;                              // [B, V]
  const float *temperature, *top_p, *min_p, *u;     // by row; temperature 0 is greedy, top_p 1 and min_p 0 are off
  const int32_t* top_k;                             // 0 is off
  int32_t* tokens;                                  // by row
};

// Tokens of a chunk of the cumulative sum, whose chunks are added up first.
constexpr int64_t SAMPLE_CHUNK = 512;

// Floats of a row's buffer: twice the vocabulary in whole chunks.
static inline int64_t sample_buffer_size(int64_t V) {
  return 2 * ((V + SAMPLE_CHUNK - 1) / SAMPLE_CHUNK * SAMPLE_CHUNK);
}

// Draws tokens[row]. A row with a NaN gives the first NaN's place. `buffer` is aligned to a cache line.
VERAX_DECLARE_KERNEL(sample_row, const SampleTask& task, int64_t row, float* buffer)

}  // namespace verax
