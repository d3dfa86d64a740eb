// for n in steps of C rows of W:                (they stream from memory, once)
//   for m in steps of R rows of x:              (x stays in the cache)
//     for each chunk of 32 inputs:
//       R x C accumulators += x[m..m+R, chunk] . W[n..n+C, chunk]
//     y[m..m+R, n..n+C] = the accumulators' sums
//
// With a scale for each group of inputs, a group's chunks are added up first and join the accumulator scaled.
//
// Each output has one accumulator register, which takes the chunks in order. So a row of y is the same to the last bit
// whatever other rows are computed beside it, and whichever thread does it.
#include "linear.h"

#include "vec.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int ROWS = 4;              // R: of x at a time
constexpr int COLUMNS = 4;           // C: of y at a time, rows of W
constexpr int BLOCK = 4 * CHUNK;     // x is padded to whole blocks of inputs, which is what a row of int4 consists of
constexpr int64_t SEGMENT = 32 * BLOCK;  // inputs whose scales are made float32 at a time

// How each kind of weight is read. `Stored` is what x is packed to.
struct F32Weights {
  using Element = float;
  using Stored = float;
  static Chunk weights(const Element* row, int64_t k) { return load_chunk(row + k); }
  static Chunk inputs(const Stored* p) { return load_chunk(p); }
  static void pack(Stored* to, const Chunk& from) { store_chunk(to, from); }
};
template <typename T>
struct RoundedWeights {
  using Element = T;
  using Stored = Bf16Chunk::Stored;
  static Bf16Chunk weights(const Element* row, int64_t k) { return load_bf16_chunk(row + k); }
  static Bf16Chunk inputs(const Stored* p) { return load_bf16_chunk(p); }
  static void pack(Stored* to, const Chunk& from) { store_bf16_chunk(to, to_bf16_chunk(from)); }
  static int64_t offset(int64_t k) { return k; }  // of input k in a row
};
using Bf16Weights = RoundedWeights<bf16>;
using Int8Weights = RoundedWeights<int8_t>;
struct Int4Weights : RoundedWeights<uint16_t> {
  static Bf16Chunk weights(const Element* row, int64_t k) {
    return load_bf16_nibble_chunk(row + offset(k), k % BLOCK / CHUNK);
  }
  static int64_t offset(int64_t k) { return k / BLOCK * CHUNK; }  // of its word
};

int64_t padded(int64_t K) { return (K + BLOCK - 1) / BLOCK * BLOCK; }

template <class Kind>
void pack(const LinearTask& t) {
  auto* to = static_cast<typename Kind::Stored*>(t.packed);
  for (int64_t m = 0; m < t.M; ++m) {
    const float* row = t.x + m * t.K;
    int64_t k = 0;
    for (; k + CHUNK <= t.K; k += CHUNK) Kind::pack(to + k, load_chunk(row + k));
    for (; k < padded(t.K); k += CHUNK) {
      float rest[CHUNK] = {};
      if (k < t.K) std::memcpy(rest, row + k, (t.K - k) * sizeof(float));
      Kind::pack(to + k, load_chunk(rest));
    }
    to += padded(t.K);
  }
}

float row_scale(const LinearTask& t, int64_t n) {
  if (!t.scales) return 1;
  return t.half_scales ? widen(static_cast<const half*>(t.scales)[n]) : static_cast<const float*>(t.scales)[n];
}

// `count` of W's scales as float32.
void group_scales(const LinearTask& t, int64_t first, int64_t count, float* to) {
  if (!t.half_scales) {
    std::memcpy(to, static_cast<const float*>(t.scales) + first, count * sizeof(float));
    return;
  }
  const half* from = static_cast<const half*>(t.scales) + first;
  int64_t i = 0;
  for (; i + F32::lanes <= count; i += F32::lanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = widen(from[i]);
}

// R rows of x from m on, C rows of W from n on. G: chunks that share a scale, 0 if all do or there is none.
template <class Kind, int G, int R, int C>
void tile(const LinearTask& t, int64_t m, int64_t n) {
  using Element = typename Kind::Element;
  const int64_t K = t.K, row = linear_row_bytes(t) / sizeof(Element), row_x = padded(K);
  const auto* x = static_cast<const typename Kind::Stored*>(t.packed) + m * row_x;
  const auto* w = static_cast<const Element*>(t.weights) + n * row;
  F32 sums[R][C];
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) sums[r][c] = zero();

  if constexpr (G == 0) {
    int64_t k = 0;
    for (; k + CHUNK <= K; k += CHUNK) {
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        const auto weights = Kind::weights(w + c * row, k);
        prefetch(w + (c + C) * row + k);  // the same chunk of the next rows
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) sums[r][c] = dot(sums[r][c], weights, Kind::inputs(x + r * row_x + k));
      }
    }
    if (k < K) {
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        Element rest[CHUNK] = {};
        std::memcpy(rest, w + c * row + k, (K - k) * sizeof(Element));
        const auto weights = Kind::weights(rest, 0);
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) sums[r][c] = dot(sums[r][c], weights, Kind::inputs(x + r * row_x + k));
      }
    }
  } else {
    float scales[C][SEGMENT / (G * CHUNK)];
    for (int64_t segment = 0; segment < K; segment += SEGMENT) {
      const int64_t end = K - segment < SEGMENT ? K : segment + SEGMENT;
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        group_scales(t, ((n + c) * K + segment) / t.group, (end - segment) / t.group, scales[c]);
      }
      for (int64_t k = segment, g = 0; k < end; k += G * CHUNK, ++g) {
        VERAX_UNROLL
        for (int c = 0; c < C; ++c) {
          F32 parts[R];
          VERAX_UNROLL
          for (int r = 0; r < R; ++r) parts[r] = zero();
          VERAX_UNROLL
          for (int j = 0; j < G; ++j) {
            const auto weights = Kind::weights(w + c * row, k + j * CHUNK);
            VERAX_UNROLL
            for (int r = 0; r < R; ++r)
              parts[r] = dot(parts[r], weights, Kind::inputs(x + r * row_x + k + j * CHUNK));
          }
          prefetch(w + (c + C) * row + Kind::offset(k));
          VERAX_UNROLL
          for (int r = 0; r < R; ++r) sums[r][c] = fma(parts[r], broadcast(scales[c][g]), sums[r][c]);
        }
      }
    }
  }

  VERAX_UNROLL
  for (int c = 0; c < C; ++c) {
    const float scale = G ? 1 : row_scale(t, n + c);
    VERAX_UNROLL
    for (int r = 0; r < R; ++r) t.y[(m + r) * t.N + n + c] = sum(sums[r][c]) * scale;
  }
}

template <class Kind, int G, int C>
void columns(const LinearTask& t, int64_t n) {
  int64_t m = 0;
  for (; m + ROWS <= t.M; m += ROWS) tile<Kind, G, ROWS, C>(t, m, n);
  switch (t.M - m) {
    case 3: return tile<Kind, G, 3, C>(t, m, n);
    case 2: return tile<Kind, G, 2, C>(t, m, n);
    case 1: return tile<Kind, G, 1, C>(t, m, n);
  }
}

template <class Kind, int G>
void all_columns(const LinearTask& t, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + COLUMNS <= end; n += COLUMNS) columns<Kind, G, COLUMNS>(t, n);
  for (; n < end; ++n) columns<Kind, G, 1>(t, n);
}

template <class Kind>
void in_groups(const LinearTask& t, int64_t begin, int64_t end) {
  switch (t.group / CHUNK) {
    case 1: return all_columns<Kind, 1>(t, begin, end);
    case 2: return all_columns<Kind, 2>(t, begin, end);
    case 4: return all_columns<Kind, 4>(t, begin, end);
  }
}

}  // namespace

void linear_pack(const LinearTask& t) { t.kind == Weights::f32 ? pack<F32Weights>(t) : pack<Bf16Weights>(t); }

void linear_columns(const LinearTask& t, int64_t begin, int64_t end) {
  switch (t.kind) {
    case Weights::f32: return all_columns<F32Weights, 0>(t, begin, end);
    case Weights::bf16: return all_columns<Bf16Weights, 0>(t, begin, end);
    case Weights::int8:
      return t.group ? in_groups<Int8Weights>(t, begin, end) : all_columns<Int8Weights, 0>(t, begin, end);
    case Weights::int4: return in_groups<Int4Weights>(t, begin, end);
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
