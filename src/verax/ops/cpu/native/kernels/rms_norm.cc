// for each row: one pass for the sum of squares, one to scale. A row's order of additions does not depend on the others.
#include "rms_norm.h"

#include <cmath>

#include "vec.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

template <typename Weight>
void rows(const RmsNormTask& t, int64_t begin, int64_t end) {
  constexpr int64_t L = F32::lanes;
  const auto* weight = static_cast<const Weight*>(t.weight);
  for (int64_t m = begin; m < end; ++m) {
    const float* x = t.x + m * t.D;
    float* y = t.y + m * t.D;
    F32 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t d = 0;
    for (; d + 4 * L <= t.D; d += 4 * L) {
      VERAX_UNROLL
      for (int j = 0; j < 4; ++j) {
        const F32 part = load(x + d + j * L);
        sums[j] = fma(part, part, sums[j]);
      }
    }
    float squares = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    for (; d < t.D; ++d) squares += x[d] * x[d];
    const float factor = 1 / ::sqrtf(squares / static_cast<float>(t.D) + t.eps);
    for (d = 0; d + L <= t.D; d += L) store(y + d, mul(mul(load(x + d), broadcast(factor)), load(weight + d)));
    for (; d < t.D; ++d) {
      float w;
      if constexpr (sizeof(Weight) == 2) {
        w = widen(weight[d]);
      } else {
        w = weight[d];
      }
      y[d] = x[d] * factor * w;
    }
  }
}

}  // namespace

void rms_norm(const RmsNormTask& t, int64_t begin, int64_t end) {
  t.weight_bf16 ? rows<bf16>(t, begin, end) : rows<float>(t, begin, end);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
