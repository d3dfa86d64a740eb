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
  Chunk chunk = load_chunk(x);
  F32 peaks = zero(), wrong = zero();
  VERAX_UNROLL
  for (int i = 0; i < Chunk::parts; ++i) {
    peaks = max(max(chunk.part[i], sub(zero(), chunk.part[i])), peaks);
    wrong = fma(chunk.part[i], zero(), wrong);
  }
  const float scale = largest_lane(peaks) / LARGEST_INTEGER;
  const F32 factor = broadcast(integer_factor(scale));
  F32 numbers[4] = {zero(), zero(), wrong, wrong};
  VERAX_UNROLL
  for (int i = 0; i < Chunk::parts; ++i) {
    chunk.part[i] = whole(mul(chunk.part[i], factor));
    numbers[i * 2 / Chunk::parts] = add(numbers[i * 2 / Chunk::parts], chunk.part[i]);
  }
  store_inputs(to, chunk);
  float sums[4];
  sum_each(numbers, sums);
  const bool finite = sums[2] == 0;
  with->scale = scale + sums[2];
  with->sum = with->scale * (sums[0] + sums[1]);
  for (int i = 0; i < 2; ++i) with->less[1 + i] = finite ? -static_cast<int32_t>(sums[i]) : 0;
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
