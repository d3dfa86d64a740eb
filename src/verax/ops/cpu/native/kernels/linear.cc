// for each segment of 1,024 inputs:               (x's segment stays in the first cache level)
//   for n in steps of C rows of W:                (they stream from memory, once)
//     for m in steps of R rows of x:
//       for each chunk of 32 inputs of the segment:
//         R x C accumulators += x[m..m+R, chunk] . W[n..n+C, chunk]
//       y[m..m+R, n..n+C] += the accumulators' sums
//
// With a scale for each group of inputs, a group's chunks are added up first and join the accumulator scaled.
//
// Each output has one accumulator register a segment, which takes the chunks in order, and segments are added in order.
// So a row of y is the same to the last bit whatever other rows are computed beside it, and whichever thread does it.
#include "linear.h"

#include "vec.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int ROWS = 8;              // R at most: of x at a time
constexpr int AHEAD = 4;             // rows of W that are asked for before their turn
constexpr int64_t SEGMENT = 1024;    // inputs: 16 KiB of x in bfloat16 with 8 rows, of the 32 to 48 of a first level

// C, rows of W at a time: sums are kept in registers, of which AVX2 has 16 and the others 32.
#if defined(VERAX_PORTABLE) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr int columns_of(int rows) { return rows > 4 ? 1 : rows > 2 ? 2 : 4; }
#else
constexpr int columns_of(int rows) { return rows > 4 ? 2 : 4; }
#endif

// How each kind of weight is read. `Stored` is what x is packed to.
struct F32Weights {
  using Element = float;
  using Stored = float;
  using Operand = Chunk;
  static Chunk weights(const Element* p) { return load_chunk(p); }
  static Chunk inputs(const Stored* p) { return load_chunk(p); }
  static void pack(Stored* to, const Chunk& from) { store_chunk(to, from); }
};
template <typename T>
struct RoundedWeights {
  using Element = T;
  using Stored = Bf16Chunk::Stored;
  using Operand = Bf16Chunk;
  static Bf16Chunk weights(const Element* p) { return load_bf16_chunk(p); }
  static Bf16Chunk inputs(const Stored* p) { return load_bf16_chunk(p); }
  static void pack(Stored* to, const Chunk& from) { store_bf16_chunk(to, to_bf16_chunk(from)); }
};
using Bf16Weights = RoundedWeights<bf16>;
using Int8Weights = RoundedWeights<int8_t>;

template <class Kind>
void pack(const LinearTask& t) {
  auto* to = static_cast<typename Kind::Stored*>(t.packed);
  for (int64_t k = 0; k < t.K; k += CHUNK) {
    for (int64_t m = 0; m < t.M; ++m, to += CHUNK) {
      const float* from = t.x + m * t.K + k;
      float rest[CHUNK] = {};
      if (t.K - k < CHUNK) from = static_cast<const float*>(std::memcpy(rest, from, (t.K - k) * sizeof(float)));
      Kind::pack(to, load_chunk(from));
    }
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

// A segment of inputs, [begin, end), and where in W to look ahead: `next` is the place of this tile's first row and
// input in what will be read soon.
template <class Element>
struct Segment {
  int64_t begin, end;
  const Element* next;
};

// R rows of x from m on, C rows of W from n on. Grouped: chunks share scales by t.group inputs.
template <class Kind, bool Grouped, int R, int C>
void tile(const LinearTask& t, int64_t m, int64_t n, const Segment<typename Kind::Element>& segment) {
  using Element = typename Kind::Element;
  const int64_t row = t.K, size = segment.end - segment.begin;
  const auto* x = static_cast<const typename Kind::Stored*>(t.packed) + linear_packed_at(t, m, segment.begin);
  const auto* w = static_cast<const Element*>(t.weights) + n * row + segment.begin;
  const auto* next = segment.next;
  F32 sums[R][C];
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) sums[r][c] = zero();

  if constexpr (!Grouped) {
    int64_t k = 0;
    for (; k + CHUNK <= size; k += CHUNK, x += t.M * CHUNK) {
      typename Kind::Operand weights[C];
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        weights[c] = Kind::weights(w + c * row + k);
        prefetch(next + c * row + k);
      }
      VERAX_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto inputs = Kind::inputs(x + r * CHUNK);
        VERAX_UNROLL
        for (int c = 0; c < C; ++c) sums[r][c] = dot(sums[r][c], weights[c], inputs);
      }
    }
    if (k < size) {
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        Element rest[CHUNK] = {};
        std::memcpy(rest, w + c * row + k, (size - k) * sizeof(Element));
        const auto weights = Kind::weights(rest);
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) sums[r][c] = dot(sums[r][c], weights, Kind::inputs(x + r * CHUNK));
      }
    }
  } else {
    float scales[C][SEGMENT / CHUNK];
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) group_scales(t, ((n + c) * row + segment.begin) / t.group, size / t.group, scales[c]);
    for (int64_t k = 0, g = 0; k < size; k += t.group, x += t.group * t.M, ++g) {
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        F32 parts[R];
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) parts[r] = zero();
        const auto* inputs = x;
        for (int64_t j = k; j < k + t.group; j += CHUNK, inputs += t.M * CHUNK) {
          const auto weights = Kind::weights(w + c * row + j);
          prefetch(next + c * row + j);
          VERAX_UNROLL
          for (int r = 0; r < R; ++r) parts[r] = dot(parts[r], weights, Kind::inputs(inputs + r * CHUNK));
        }
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) sums[r][c] = fma(parts[r], broadcast(scales[c][g]), sums[r][c]);
      }
    }
  }

  const bool first = segment.begin == 0, last = segment.end == t.K;
  for (int r = 0; r < R; ++r) {
    float* y = t.y + (m + r) * t.N + n;
    float more[C];
    sum_each(sums[r], more);
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) {
      const float value = first ? more[c] : y[c] + more[c];
      y[c] = last && !Grouped ? value * row_scale(t, n + c) : value;
    }
  }
}

// C rows of W from n on, with R rows of x at a time and then the rest of them. More rows of either than fit into the
// registers do not meet: all_columns sees to it, and they are not compiled.
template <class Kind, bool Grouped, int R, int C>
void some_rows(const LinearTask& t, int64_t m, int64_t n, const Segment<typename Kind::Element>& segment) {
  if constexpr (C <= columns_of(R)) tile<Kind, Grouped, R, C>(t, m, n, segment);
}

template <class Kind, bool Grouped, int C>
void all_rows(const LinearTask& t, int64_t n, const Segment<typename Kind::Element>& segment) {
  int64_t m = 0;
  for (; m + ROWS <= t.M; m += ROWS) some_rows<Kind, Grouped, ROWS, C>(t, m, n, segment);
  switch (t.M - m) {
    case 7: return some_rows<Kind, Grouped, 7, C>(t, m, n, segment);
    case 6: return some_rows<Kind, Grouped, 6, C>(t, m, n, segment);
    case 5: return some_rows<Kind, Grouped, 5, C>(t, m, n, segment);
    case 4: return some_rows<Kind, Grouped, 4, C>(t, m, n, segment);
    case 3: return some_rows<Kind, Grouped, 3, C>(t, m, n, segment);
    case 2: return some_rows<Kind, Grouped, 2, C>(t, m, n, segment);
    case 1: return some_rows<Kind, Grouped, 1, C>(t, m, n, segment);
  }
}

template <class Kind, bool Grouped, int C>
void in_steps(const LinearTask& t, int64_t begin, int64_t end) {
  const auto* w = static_cast<const typename Kind::Element*>(t.weights);
  for (int64_t from = 0; from < t.K || from == 0; from += SEGMENT) {
    const int64_t to = t.K - from < SEGMENT ? t.K : from + SEGMENT;
    const auto place = [&](int64_t n) {
      // Some rows on, or the first rows of the next segment; at the very end, what is at hand.
      if (n + AHEAD + C <= end) return w + (n + AHEAD) * t.K + from;
      const int64_t turn = n + AHEAD + C - end;
      return to < t.K && begin + turn + C <= end ? w + (begin + turn) * t.K + to : w + n * t.K + from;
    };
    int64_t n = begin;
    for (; n + C <= end; n += C) all_rows<Kind, Grouped, C>(t, n, {from, to, place(n)});
    for (; n < end; ++n) all_rows<Kind, Grouped, 1>(t, n, {from, to, w + n * t.K + from});
  }
}

template <class Kind, bool Grouped>
void all_columns(const LinearTask& t, int64_t begin, int64_t end) {
  switch (columns_of(t.M < ROWS ? static_cast<int>(t.M) : ROWS)) {
    case 1: return in_steps<Kind, Grouped, 1>(t, begin, end);
    case 2: return in_steps<Kind, Grouped, 2>(t, begin, end);
    case 4: return in_steps<Kind, Grouped, 4>(t, begin, end);
  }
}

}  // namespace

void linear_pack(const LinearTask& t) { t.kind == Weights::f32 ? pack<F32Weights>(t) : pack<Bf16Weights>(t); }

void linear_columns(const LinearTask& t, int64_t begin, int64_t end) {
  switch (t.kind) {
    case Weights::f32: return all_columns<F32Weights, false>(t, begin, end);
    case Weights::bf16: return all_columns<Bf16Weights, false>(t, begin, end);
    case Weights::int8:
      return t.group ? all_columns<Int8Weights, true>(t, begin, end) : all_columns<Int8Weights, false>(t, begin, end);
    case Weights::int4: return linear_int4_columns(t, begin, end);
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
