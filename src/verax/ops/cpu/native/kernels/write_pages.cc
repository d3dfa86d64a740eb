// for each token t:
//   for each head k of this thread:       (threads divide the heads: tokens may name the same place, as padding does)
//     cache[pages[t], k, offsets[t], :] = x[t, k, :]
#include "write_pages.h"

#include "vec.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

inline void copy(float* to, const float* from, int64_t H) { std::memcpy(to, from, H * sizeof(float)); }
// Not the processor's conversion, which takes subnormal numbers for 0.
inline void copy(bf16* to, const float* from, int64_t H) {
  for (int64_t h = 0; h < H; ++h) to[h] = narrow(from[h]);
}

template <class Element>
void write(const WritePagesTask& w, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < w.T; ++t) {
    const int64_t page = w.pages[t], offset = w.offsets[t];
    if (page < 0 || page >= w.P || offset < 0 || offset >= w.p) continue;
    for (int64_t k = begin; k < end; ++k) {
      copy(static_cast<Element*>(w.cache) + ((page * w.K + k) * w.p + offset) * w.H, w.x + (t * w.K + k) * w.H, w.H);
    }
  }
}

}  // namespace

void write_pages(const WritePagesTask& w, int64_t begin, int64_t end) {
  w.cache_bf16 ? write<bf16>(w, begin, end) : write<float>(w, begin, end);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
