// for each row: one pass for the sum of squares, one to scale. A row's order of additions does not depend on the others.
// Heads are rotated in one more pass over a thread's piece, which is in a cache (head by head takes 1.15 times as long).
#include "rms_norm.h"

#include <cmath>

#include "cells.h"
#include "silu_lanes.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// 1 / sqrt(mean(x^2) + eps) in each lane.
template <typename Input>
F32 factor_of(const Input* x, int64_t D, float eps) {
  constexpr int64_t L = F32::lanes;
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t d = 0;
  for (; d + 4 * L <= D; d += 4 * L) {
    VERAX_UNROLL
    for (int j = 0; j < 4; ++j) {
      const F32 part = load(x + d + j * L);
      sums[j] = fma(part, part, sums[j]);
    }
  }
  float squares = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  for (; d < D; ++d) squares += widen(x[d]) * widen(x[d]);
  return broadcast(1 / ::sqrtf(squares / static_cast<float>(D) + eps));
}

template <typename Input, typename Weight, typename Result>
void rows(const RmsNormTask& t, int64_t begin, int64_t end) {
  const auto* weight = static_cast<const Weight*>(t.weight);
  for (int64_t m = begin; m < end; ++m) {
    const auto* x = static_cast<const Input*>(t.x) + m * t.D;
    auto* y = static_cast<Result*>(t.y) + m * t.D;
    const F32 factor = factor_of(x, t.D, t.eps);
    for (int64_t d = 0; d < t.D; d += CHUNK) {
      const int64_t count = t.D - d < CHUNK ? t.D - d : CHUNK;
      Input rest[CHUNK];
      Weight rest_of_weight[CHUNK];
      float values[CHUNK];
      Chunk chunk = load_chunk(padded(x + d, count, rest));
      const Chunk by = load_chunk(padded(weight + d, count, rest_of_weight));
      VERAX_UNROLL
      for (int i = 0; i < Chunk::parts; ++i) {
        chunk.part[i] = mul(mul(chunk.part[i], factor), by.part[i]);
        if (t.silu) chunk.part[i] = silu_of(chunk.part[i]);
      }
      store_chunk(values, chunk);
      round_row(y + d, values, count);
    }
  }
}

// body(a value of the type of an array).
template <typename Body>
void with_type(bool is_bf16, const Body& body) {
  is_bf16 ? body(bf16{}) : body(float{});
}

}  // namespace

void rms_norm(const RmsNormTask& t, int64_t begin, int64_t end) {
  with_type(t.x_bf16, [&](auto x) {
    with_type(t.weight_bf16, [&](auto weight) {
      with_type(t.y_bf16, [&](auto y) { rows<decltype(x), decltype(weight), decltype(y)>(t, begin, end); });
    });
  });
}

void norm_rotary(const NormRotaryTask& t, int64_t begin, int64_t end) {
  rms_norm(t.norm, begin, end);
  for (int64_t m = begin; m < end; ++m) {
    float *first = static_cast<float*>(t.norm.y) + m * t.norm.D, *second = first + t.h;
    const float *cos = t.cos + m / t.heads * t.h, *sin = t.sin + m / t.heads * t.h;
    int64_t i = 0;
    for (; i + F32::lanes <= t.h; i += F32::lanes) {
      const F32 x1 = load(first + i), x2 = load(second + i), c = load(cos + i), s = load(sin + i);
      store(first + i, sub(mul(x1, c), mul(x2, s)));
      store(second + i, add(mul(x2, c), mul(x1, s)));
    }
    for (; i < t.h; ++i) {
      const float x1 = first[i], x2 = second[i];
      first[i] = x1 * cos[i] - x2 * sin[i];
      second[i] = x2 * cos[i] + x1 * sin[i];
    }
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
