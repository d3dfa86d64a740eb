// for each register of x: y = GELU(x)
#include "gelu.h"

#include "gelu_lanes.h"

namespace verax {
namespace VERAX_LEVEL {

void gelu(const GeluTask& t, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + F32::lanes <= end; i += F32::lanes) store(t.y + i, gelu_of(load(t.x + i)));
  if (i < end) {
    float rest[F32::lanes] = {};
    std::memcpy(rest, t.x + i, (end - i) * sizeof(float));
    store(rest, gelu_of(load(rest)));
    std::memcpy(t.y + i, rest, (end - i) * sizeof(float));
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
