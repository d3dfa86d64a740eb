// for each token t:
//   for each head k of this thread:       (threads divide the heads: tokens may name the same place, as padding does)
//     cache[pages[t], k, offsets[t], :] = x[t, k, :]              (int8: divided by its scale, rounded to nearest)
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

// The bits that the reference gives (ops/paged.py). A number that is not finite makes the scale so, and with it the row.
float quantize(int8_t* to, const float* from, int64_t H) {
  uint32_t largest = 0;  // magnitudes compare as their bits do, NaN above all
  for (int64_t h = 0; h < H; ++h) {
    uint32_t bits;
    std::memcpy(&bits, from + h, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  const float scale = magnitude * (1.0f / 127);
  if (!(scale >= __FLT_MIN__ && scale < __builtin_inff())) {
    std::memset(to, 0, H);
    return scale;
  }
  const float inverse = 1 / scale;
  for (int64_t h = 0; h < H; ++h) to[h] = static_cast<int8_t>(__builtin_nearbyintf(from[h] * inverse));
  return scale;
}

template <class Element>
void write(const WritePagesTask& w, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < w.T; ++t) {
    const int64_t page = w.pages[t], offset = w.offsets[t];
    if (page < 0 || page >= w.P || offset < 0 || offset >= w.p) continue;
    for (int64_t k = begin; k < end; ++k) {
      const int64_t row = (page * w.K + k) * w.p + offset;
      Element* to = static_cast<Element*>(w.cache) + row * w.H;
      const float* from = w.x + (t * w.K + k) * w.H;
      if constexpr (sizeof(Element) == 1) {
        w.scales[row] = quantize(to, from, w.H);
      } else {
        copy(to, from, w.H);
      }
    }
  }
}

}  // namespace

void write_pages(const WritePagesTask& w, int64_t begin, int64_t end) {
  switch (w.keys) {
    case Keys::f32: return write<float>(w, begin, end);
    case Keys::bf16: return write<bf16>(w, begin, end);
    case Keys::int8: return write<int8_t>(w, begin, end);
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
