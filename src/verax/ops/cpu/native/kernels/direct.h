// Products of a few rows with the keys and values of a block where they lie: to pack them for so few takes longer than
// the products themselves.
#pragma once

#include <type_traits>

#include "cells.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Rows at a time: their sums over 4 keys, or over 64 elements of the values (32 where registers are few), are kept in
// registers.
#if defined(__AVX512F__) && !defined(VERAX_PORTABLE)
constexpr int FEW = 4, CHUNKS = 2;
#else
constexpr int FEW = 2, CHUNKS = 1;
#endif

// sums[r], lane i: a[r] . keys[i], for n keys; with n < F32::lanes, partial sums.
template <class Kind, int R, int n>
inline void dots(Matrix a, const typename Kind::Element* const* keys, int64_t H, F32 (&sums)[R]) {
  if constexpr (n > 4) {
    F32 more[R];
    dots<Kind, R, n / 2>(a, keys, H, sums);
    dots<Kind, R, n / 2>(a, keys + n / 2, H, more);
    VERAX_UNROLL
    for (int r = 0; r < R; ++r) sums[r] = join<n / 2>(sums[r], more[r]);
  } else {
    using Element = typename Kind::Element;
    constexpr int STEP = F32::lanes * Kind::depth;
    F32 each[R][4];
    VERAX_UNROLL
    for (int r = 0; r < R; ++r)
      VERAX_UNROLL
      for (int i = 0; i < 4; ++i) each[r][i] = zero();
    const auto add = [&](int64_t h, const Element* const* at) {
      VERAX_UNROLL
      for (int i = 0; i < 4; ++i) {
        const F32 key = Kind::of_row(at[i]);
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) each[r][i] = Kind::multiply(each[r][i], load(a.row(r) + h / Kind::depth), key);
      }
    };
    int64_t h = 0;
    for (; h + STEP <= H; h += STEP) {
      const Element* at[] = {keys[0] + h, keys[1] + h, keys[2] + h, keys[3] + h};
      add(h, at);
    }
    if (h < H) {
      Element buffer[4][CHUNK];
      const Element* at[4];
      for (int i = 0; i < 4; ++i) at[i] = padded(keys[i] + h, H - h, buffer[i]);
      add(h, at);
    }
    VERAX_UNROLL
    for (int r = 0; r < R; ++r) {
      sums[r] = join<2>(join<1>(each[r][0], each[r][1]), join<1>(each[r][2], each[r][3]));
    }
  }
}

template <class Kind, int R>
void direct_scores(Matrix a, const typename Kind::Element* const* keys, const typename Kind::Element* const* next,
                   int64_t count, int64_t H, Matrix out) {
  for (int64_t key = 0; key < count; key += F32::lanes) {
    for (int i = 0; i < F32::lanes; ++i) {
      for (int64_t h = 0; h < H; h += 64 / sizeof(typename Kind::Element)) prefetch(next[key + i] + h);
    }
    F32 sums[R];
    dots<Kind, R, F32::lanes>(a, keys + key, H, sums);
    for (int r = 0; r < R; ++r) store(out.row(r) + key, sums[r]);
  }
}

// C chunks of the values' elements from h on.
template <class Kind, int R, int C>
void direct_columns(Matrix weights, const typename Kind::Element* const* values,
                    const typename Kind::Element* const* next, int64_t count, int64_t h, int64_t H, Matrix out,
                    const float* alpha) {
  using Element = typename Kind::Element;
  F32 sums[R][C * Chunk::parts];
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C * Chunk::parts; ++c) {
      sums[r][c] = mul(load(out.row(r) + h + c * F32::lanes), broadcast(alpha[r]));
    }
  for (int64_t key = 0; key < count; key += Kind::depth) {
    for (int i = 0; i < Kind::depth; ++i) {
      for (int64_t at = h; at < h + C * CHUNK; at += 64 / sizeof(Element)) prefetch(next[key + i] + at);
    }
    Element buffer[Kind::depth][CHUNK];
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) {
      Chunk cells;
      const int64_t at = h + c * CHUNK;
      if (at + CHUNK <= H) {
        cells = Kind::of_rows(values + key, at);
      } else {
        const Element* rest[Kind::depth];
        for (int i = 0; i < Kind::depth; ++i) rest[i] = padded(values[key + i] + at, H - at, buffer[i]);
        cells = Kind::of_rows(rest, 0);
      }
      VERAX_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto weight = Kind::cell(weights.row(r)[key / Kind::depth]);
        VERAX_UNROLL
        for (int i = 0; i < Chunk::parts; ++i) {
          F32& sum = sums[r][c * Chunk::parts + i];
          sum = Kind::multiply(sum, weight, cells.part[i]);
        }
      }
    }
  }
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C * Chunk::parts; ++c) store(out.row(r) + h + c * F32::lanes, sums[r][c]);
}

template <class Kind, int R>
void direct_sums(Matrix weights, const typename Kind::Element* const* values,
                 const typename Kind::Element* const* next, int64_t count, int64_t H, Matrix out,
                 const float* alpha) {
  int64_t h = 0;
  for (; h + (CHUNKS - 1) * CHUNK < H; h += CHUNKS * CHUNK) {
    direct_columns<Kind, R, CHUNKS>(weights, values, next, count, h, H, out, alpha);
  }
  if (h < H) direct_columns<Kind, R, 1>(weights, values, next, count, h, H, out, alpha);
}

// body(n as a constant), for n up to FEW.
template <int most = FEW, class Body>
void with_rows(int64_t n, const Body& body) {
  if constexpr (most > 1) {
    if (n < most) return with_rows<most - 1>(n, body);
  }
  body(std::integral_constant<int, most>());
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
