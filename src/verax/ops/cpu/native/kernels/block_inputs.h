// x as the kernels take it for the blocks of GGUF files: integers of 16 bits, with a scale for each 32 inputs.
#pragma once

#include "linear.h"
#include "linear_integers.h"
#include "vec_math.h"
#include "words.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Numbers that go with 32 integers of x: their scale, the sum of what they stand for, and less the sums of the integers:
// of all, of the first 16, of the last 16.
struct Inputs {
  float scale, sum;
  int32_t less[3];
};

// x ends in zeros, up to a whole unit of the smallest.
int64_t padded(int64_t K) { return (K + 63) / 64 * 64; }

int8_t* integers(const LinearTask& t, int64_t m, int64_t k) {
  return static_cast<int8_t*>(t.packed) + 2 * linear_packed_at(t, m, k);
}

// They follow all integers: [K / 32, M].
Inputs* inputs(const LinearTask& t, int64_t m, int64_t k) {
  return reinterpret_cast<Inputs*>(integers(t, 0, padded(t.K))) + k / CHUNK * t.M + m;
}

// 32 values, of which the scale is NaN if one is not finite: every output that they have a part in is then NaN.
void pack_chunk(const float* x, int8_t* to, Inputs* with) {
  const RoundedChunk chunk = round_chunk(x);
  store_inputs(to, chunk.integers);
  const bool finite = chunk.scale == chunk.scale;
  with->scale = chunk.scale;
  with->sum = chunk.scale * (chunk.sums[0] + chunk.sums[1]);
  for (int i = 0; i < 2; ++i) with->less[1 + i] = finite ? -static_cast<int32_t>(chunk.sums[i]) : 0;
  with->less[0] = with->less[1] + with->less[2];
}

// The products of codes with integers of x, less the products of what is left of the format's offset.
template <class Format>
inline Words less_offset(const Words& parts, const Inputs& with, int h) {
  constexpr int OFFSET = LEFT_OFFSET<Format::OFFSET>;
  if constexpr (OFFSET == 0) return parts;
  static_assert((OFFSET & (OFFSET - 1)) == 0, "a shift multiplies by it");
  int shift = 0;
  while (1 << shift < OFFSET) ++shift;
  const auto less = static_cast<uint32_t>(with.less[Format::GROUP == CHUNK ? 0 : 1 + h]);
  return add(parts, words(less << shift));
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
