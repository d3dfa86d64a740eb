// Keys or values of new tokens, written into the pages of a cache where they lie.
#pragma once

#include <cstdint>

#include "attention.h"

namespace verax {

struct WritePagesTask {
  int64_t T, K, H;                // tokens, heads, head size
  int64_t P, p;                   // pages, tokens of a page
  const float* x;                 // [T, K, H]
  const int32_t *pages, *offsets; // by token
  void* cache;                    // [P, K, p, H]
  Keys keys;                      // what it holds
  float* scales;                  // of int8: [P, K, p]
};

// The heads [begin, end) of all tokens. A token whose page or offset does not exist is left out, as in JAX.
VERAX_DECLARE_KERNEL(write_pages, const WritePagesTask& task, int64_t begin, int64_t end)

}  // namespace verax
