// Rows of an array as kernels take them in: float32, in whole chunks of values with zeros at the end.
#pragma once

#include "cells.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr float LOG2_E = 1.44269504088896340736f;

inline F32 exponential(F32 x) { return exp2(mul(x, broadcast(LOG2_E))); }

inline int64_t padded_size(int64_t size) { return (size + CHUNK - 1) / CHUNK * CHUNK; }

inline void fill(float* to, float value, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = value;
}

// a *= b, over `size` floats, whole chunks.
inline void scale_by(float* a, const float* b, int64_t size) {
  for (int64_t i = 0; i < size; i += F32::lanes) store(a + i, mul(load(a + i), load(b + i)));
}

// to[0..size) = from, as float32, times `factor`; zeros up to a whole chunk of values.
template <class Element>
inline void copy_row(float* to, const Element* from, int64_t size, float factor) {
  for (int64_t i = 0; i < size; i += CHUNK) {
    Element buffer[CHUNK];
    Chunk chunk = load_chunk(padded(from + i, size - i, buffer));
    for (F32& part : chunk.part) part = mul(part, broadcast(factor));
    store_chunk(to + i, chunk);
  }
}

// to[0..count) = the first values of a register.
inline void store_some(float* to, F32 values, int64_t count) {
  if (count >= F32::lanes) return store(to, values);
  float buffer[F32::lanes];
  store(buffer, values);
  std::memcpy(to, buffer, count * sizeof(float));
}

// The sum of a[i] b[i].
template <class Element>
inline float dot_rows(const Element* a, const Element* b, int64_t size) {
  F32 products = zero();
  for (int64_t i = 0; i < size; i += CHUNK) {
    Element buffer_a[CHUNK], buffer_b[CHUNK];
    const Chunk x = load_chunk(padded(a + i, size - i, buffer_a)), y = load_chunk(padded(b + i, size - i, buffer_b));
    products = dot(products, x, y);
  }
  return sum(products);
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
