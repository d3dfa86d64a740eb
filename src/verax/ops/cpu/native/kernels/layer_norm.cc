// for each row:
//   y = x + residual, and their sum
//   the squares of y - mean, summed
//   y = (y - mean) * factor * weight + bias
//
// The three passes are over a row in the first cache level. A row's order of additions does not depend on the others.
#include "layer_norm.h"

#include <cmath>

#include "vec_math.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int64_t L = F32::lanes;

// The sum of `value(at)`, L numbers of a row each, over the whole registers of a row.
template <typename Value>
float sum_row(int64_t D, const Value& value) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t d = 0;
  for (; d + 4 * L <= D; d += 4 * L) {
    VERAX_UNROLL
    for (int j = 0; j < 4; ++j) sums[j] = add(sums[j], value(d + j * L));
  }
  for (; d + L <= D; d += L) sums[0] = add(sums[0], value(d));
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <typename Weight>
void rows(const LayerNormTask& t, int64_t begin, int64_t end) {
  const auto *weight = static_cast<const Weight*>(t.weight), *bias = static_cast<const Weight*>(t.bias);
  const int64_t whole = t.D / L * L;
  for (int64_t m = begin; m < end; ++m) {
    const float *x = t.x + m * t.D, *residual = t.residual ? t.residual + m * t.D : nullptr;
    float* y = t.y + m * t.D;
    float total = sum_row(t.D, [&](int64_t d) {
      const F32 value = residual ? add(load(x + d), load(residual + d)) : load(x + d);
      store(y + d, value);
      return value;
    });
    for (int64_t d = whole; d < t.D; ++d) total += y[d] = residual ? x[d] + residual[d] : x[d];
    const float mean = total / static_cast<float>(t.D);
    float squares = sum_row(t.D, [&](int64_t d) {
      const F32 centred = sub(load(y + d), broadcast(mean));
      return mul(centred, centred);
    });
    for (int64_t d = whole; d < t.D; ++d) squares += (y[d] - mean) * (y[d] - mean);
    const float factor = 1 / ::sqrtf(squares / static_cast<float>(t.D) + t.eps);
    for (int64_t d = 0; d < whole; d += L) {
      const F32 scaled = mul(sub(load(y + d), broadcast(mean)), broadcast(factor));
      store(y + d, fma(scaled, load(weight + d), load(bias + d)));
    }
    for (int64_t d = whole; d < t.D; ++d) {
      y[d] = (y[d] - mean) * factor * widen(weight[d]) + widen(bias[d]);
    }
  }
}

}  // namespace

void layer_norm(const LayerNormTask& t, int64_t begin, int64_t end) {
  t.bf16_weights ? rows<bf16>(t, begin, end) : rows<float>(t, begin, end);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
