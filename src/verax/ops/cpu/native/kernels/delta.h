// The delta rule's recurrence (verax/ops/delta) over the tokens of one sequence, for some heads and some columns.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

// Arrays of one call. Tokens of all sequences lie one after the other.
struct DeltaTask {
  int64_t H, HV, K, V;                // key heads, value heads, key size, value size
  const void *read, *erase, *write;   // [tokens, H, K]; erase may be write
  const void* v;                      // [tokens, HV, V]
  bool bf16;                          // these four, else float32
  const float* beta;                  // [tokens, HV]
  const float* g;                     // [tokens, HV], or [tokens, HV, K]
  bool by_channel;
  bool erase_before_decay;
  bool normalize;                     // keys: x / sqrt(sum(x^2) + 1e-6)
  float scale;                        // on the outputs
  int64_t keep_every;                 // a multiple of DELTA_CHUNK
  float* out;                         // [tokens, HV, V]
};

// Some value heads of one sequence, of which value head h reads key head `h / (HV / H)`. Heads do not meet each other,
// nor do columns, so that a result does not depend on how they are divided into items. A chunk of tokens is taken
// through all heads before the next one: neighbours in memory are read together.
struct DeltaItem {
  int64_t first, tokens;
  int64_t first_head, heads;
  int64_t begin, end;                 // columns
  const float* initial;               // the sequence's states [HV, K, V]
  float* last;                        // and where the last ones go, perhaps there as well
  float* kept;                        // null, or where the states before token 0, keep_every, .. go,
  int64_t kept_stride;                // so far from each other
};

// Tokens whose meetings with each other are written out as matrices.
constexpr int64_t DELTA_CHUNK = 16;

// Up to here a sequence is walked token by token: the state is read once and written once, which is all the time.
constexpr int64_t DELTA_STEP = 4;

// Floats of a head's state while an item is worked on.
inline int64_t delta_state_floats(int64_t K, int64_t columns) { return K * ((columns + 15) / 16 * 16); }

// Bytes of scratch, aligned to a cache line: keys, gates and factors of a chunk (`allocate` in delta.cc), the states.
// Enough at every level.
inline int64_t delta_scratch_bytes(int64_t K, int64_t columns, int64_t heads) {
  const int64_t C = DELTA_CHUNK, padded = (K + 31) / 32 * 32;
  return 4 * (padded * (8 * C + 8) + heads * delta_state_floats(K, columns) + 4 * C * 64 + 6 * C * C + 32 * C);
}

// All tokens of an item.
VERAX_DECLARE_KERNEL(delta, const DeltaTask& task, const DeltaItem& item, void* scratch)

}  // namespace verax
