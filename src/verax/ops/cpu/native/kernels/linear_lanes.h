// Lanes that are rows of W: of weights laid out with 16 rows side by side. Included by the kernels that multiply them.
#pragma once

#include "vec.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int BLOCK = 16;              // rows of W whose words lie side by side
constexpr int V = BLOCK / F32::lanes;  // registers of their sums

// Most rows of x, and most blocks of W for them, whose sums are kept in registers. Without registers of lanes, larger
// tiles are not faster, and take the compiler minutes.
#if defined(VERAX_PORTABLE)
constexpr int LANE_ROWS = 1;
#else
constexpr int LANE_ROWS = V == 1 ? 8 : 4;
#endif
// At most two: registers would hold four for one or two rows, but four streams are read more slowly.
constexpr int lane_columns(int rows) { return rows > LANE_ROWS / 2 ? 1 : 2; }

// The same address, of which the compiler does not know that: it would keep what it reads there for the first lanes, more
// than registers hold, to have it for the others.
template <class T>
inline T* read_anew(T* p) {
  asm volatile("" : "+r"(p));  // or two of them would be taken for one
  return p;
}

// y[0..16] = or += sums, where only `count` may be touched.
inline void add_to(float* y, const F32 (&sums)[V], int64_t count, bool first) {
  float whole[BLOCK] = {};
  float* at = count < BLOCK ? whole : y;
  if (count < BLOCK && !first) std::memcpy(whole, y, count * sizeof(float));
  VERAX_UNROLL
  for (int v = 0; v < V; ++v) {
    float* part = at + v * F32::lanes;
    store(part, first ? sums[v] : add(load(part), sums[v]));
  }
  if (count < BLOCK) std::memcpy(y, whole, count * sizeof(float));
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
