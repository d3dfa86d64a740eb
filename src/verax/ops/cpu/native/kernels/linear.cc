// A tile: for each chunk of 32 inputs of the segment, R x C accumulators += x[m..m+R, chunk] . W[n..n+C, chunk]. With a
// scale for each group of inputs, a group's chunks are added up first and join the accumulator scaled.
//
// Each output has one accumulator register a segment, which takes the chunks in order, and segments are added in order.
#include <type_traits>

#include "linear_integers.h"
#include "linear_steps.h"
#include "linear_tiles.h"
#include "vec.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// How each kind of weight is read, STEP inputs at a time. `Stored` is what x is packed to.
template <typename T>
struct FloatWeights {  // products are float32
  static constexpr int STEP = F32::lanes;
  using Element = T;
  using Stored = float;
  using Operand = F32;
  static F32 weights(const Element* p) { return load(p); }
  static F32 inputs(const Stored* p) { return load(p); }
  static void pack(Stored* to, const Chunk& from) { store_chunk(to, from); }
  using Sum = F32;
  static Sum none() { return zero(); }
  static F32 total(Sum sum) { return sum; }
};
using F32Weights = FloatWeights<float>;
inline F32 dot(F32 sums, F32 a, F32 b) { return fma(a, b, sums); }

template <typename T>
struct RoundedWeights {
  static constexpr int STEP = CHUNK;
  using Element = T;
  using Stored = Bf16Chunk::Stored;
  using Operand = Bf16Chunk;
  static Bf16Chunk weights(const Element* p) { return load_bf16_chunk(p); }
  static Bf16Chunk inputs(const Stored* p) { return load_bf16_chunk(p); }
  static void pack(Stored* to, const Chunk& from) { store_bf16_chunk(to, to_bf16_chunk(from)); }
  using Sum = F32;
  static Sum none() { return zero(); }
  static F32 total(Sum sum) { return sum; }
};
#if defined(VERAX_BF16_DOT)
using Bf16Weights = RoundedWeights<bf16>;
#else
struct Bf16Weights : FloatWeights<bf16> {
  static void pack(Stored* to, const Chunk& from) { store_bf16_chunk(to, to_bf16_chunk(from)); }
};
#endif
struct Float8Weights : RoundedWeights<float8> {
  static F32 total(Sum sum) { return mul(sum, broadcast(256)); }  // see load_chunk
};
// x in integers of 16 bits, whose largest is a segment's largest: two instructions widen 32 weights at most. A lane's sum
// has at most 256 products of 2^22, so it is exact.
struct Int8Weights {
  static constexpr int STEP = CHUNK;
  using Element = int8_t;
  using Stored = int16_t;
  using Operand = Int16Chunk;
  static Int16Chunk weights(const Element* p) { return load_int16_chunk(p); }
  static Int16Chunk inputs(const Stored* p) { return load_int16_chunk(p); }
  using Sum = Words;
  static Sum none() { return words(0); }
  static F32 total(Sum sum) { return to_f32(sum); }
};

// The packed x: blocks of 8 rows, the last of fewer, and in a block the chunks of 32 inputs, each of all its rows; the last
// chunk is filled up with zeros. So a tile reads one block from end to end. If a chunk had all rows of x, a tile's parts of
// 32 rows would lie in the same few sets of the first cache level.
constexpr int TILE_ROWS = 8;

// Rows of x that lie with row m.
int64_t rows_with(const LinearTask& t, int64_t m) {
  const int64_t rest = t.M - m / TILE_ROWS * TILE_ROWS;
  return rest < TILE_ROWS ? rest : TILE_ROWS;
}
int64_t packed_at(const LinearTask& t, int64_t m, int64_t k) {
  const int64_t chunks = (t.K + CHUNK - 1) / CHUNK, first = m / TILE_ROWS * TILE_ROWS;
  return (first * chunks + k / CHUNK * rows_with(t, m) + (m - first)) * CHUNK;
}

template <class Kind>
void pack(const LinearTask& t, int64_t first, int64_t last) {
  for (int64_t m = first; m < last; ++m) {
    for (int64_t k = 0; k < t.K; k += CHUNK) {
      const float* from = t.x + m * t.K + k;
      float rest[CHUNK] = {};
      if (t.K - k < CHUNK) from = static_cast<const float*>(std::memcpy(rest, from, (t.K - k) * sizeof(float)));
      Kind::pack(static_cast<typename Kind::Stored*>(t.packed) + packed_at(t, m, k), load_chunk(from));
    }
  }
}

// By how much a segment's integers of x are to be multiplied; they follow all integers.
float* input_scales(const LinearTask& t, int64_t begin) {
  auto* end = static_cast<int16_t*>(t.packed) + t.M * ((t.K + CHUNK - 1) / CHUNK * CHUNK);
  return reinterpret_cast<float*>(end) + begin / SEGMENT * t.M;
}

template <>
void pack<Int8Weights>(const LinearTask& t, int64_t first, int64_t last) {
  for (int64_t begin = 0; begin < t.K; begin += SEGMENT) {
    const int64_t end = t.K - begin < SEGMENT ? t.K : begin + SEGMENT;
    for (int64_t m = first; m < last; ++m) {
      const float scale = integer_scale(t.x + m * t.K + begin, end - begin, LARGEST_INTEGER);
      input_scales(t, begin)[m] = scale;
      const F32 factor = broadcast(integer_factor(scale));
      for (int64_t k = begin; k < end; k += CHUNK) {
        const float* from = t.x + m * t.K + k;
        float rest[CHUNK] = {};
        if (end - k < CHUNK) from = static_cast<const float*>(std::memcpy(rest, from, (end - k) * sizeof(float)));
        auto* to = static_cast<int16_t*>(t.packed) + packed_at(t, m, k);
        for (int i = 0; i < CHUNK; i += F32::lanes) store_int16s(to + i, whole(mul(load(from + i), factor)));
      }
    }
  }
}

// The sums of the registers' lanes.
template <class Kind, int C>
void sum_lanes(const F32 (&sums)[C], float (&to)[C]) {
  F32 totals[C];
  VERAX_UNROLL
  for (int c = 0; c < C; ++c) totals[c] = Kind::total(sums[c]);
  sum_each(totals, to);
}

// Rounded once: what is left of the lanes without their last 8 bits, and these, are integers whose sums float32 holds.
template <class Kind, int C>
void sum_lanes(const Words (&sums)[C], float (&to)[C]) {
  F32 high[C], low[C];
  VERAX_UNROLL
  for (int c = 0; c < C; ++c) {
    high[c] = to_f32(both(sums[c], words(~255u)));
    low[c] = to_f32(both(sums[c], words(255)));
  }
  float rest[C];
  sum_each(high, to);
  sum_each(low, rest);
  VERAX_UNROLL
  for (int c = 0; c < C; ++c) to[c] += rest[c];
}

// The same for a whole tile. An integer of x is at most LARGEST_INTEGER, one of W 128: eight of a segment's lanes add up to
// less than 2^31.
template <class Kind, int R, int C>
void sum_tile(const Words (&sums)[R][C], float (&to)[R][C]) {
#if defined(__AVX512F__) && !defined(VERAX_PORTABLE)
  if constexpr (R * C == 16) {
    Words all[R * C];
    VERAX_UNROLL
    for (int i = 0; i < R * C; ++i) all[i] = sums[i / C][i % C];
    return sum_each_integer(all, to[0]);
  }
#endif
  for (int r = 0; r < R; ++r) sum_lanes<Kind>(sums[r], to[r]);
}
template <class Kind, int R, int C>
void sum_tile(const F32 (&sums)[R][C], float (&to)[R][C]) {
  for (int r = 0; r < R; ++r) sum_lanes<Kind>(sums[r], to[r]);
}

template <class Kind>
float input_scale([[maybe_unused]] const LinearTask& t, [[maybe_unused]] int64_t m, [[maybe_unused]] int64_t begin) {
  if constexpr (std::is_same_v<Kind, Int8Weights>) {
    if (t.K) return input_scales(t, begin)[m];
  }
  return 1;
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

template <class Kind, bool Grouped>
struct Tile {
  using Element = typename Kind::Element;

  // C, rows of W at a time: sums are kept in registers, of which AVX2 has 16 and the others 32.
#if defined(VERAX_PORTABLE) || (defined(__AVX2__) && !defined(__AVX512F__))
  static constexpr bool NARROW = Kind::STEP == F32::lanes;  // an operand is one register
  static constexpr int ROWS = NARROW ? TILE_ROWS / 2 : TILE_ROWS;
  static constexpr int columns(int rows) { return rows > 4 ? 1 : rows > 2 ? (NARROW ? 3 : 2) : 4; }
#else
  static constexpr int ROWS = TILE_ROWS;
  static constexpr int columns(int rows) { return rows > 4 ? 2 : 4; }
#endif
  static constexpr int ahead(int) { return 4; }
  static const void* at(const LinearTask& t, int64_t n, int64_t k) {
    return static_cast<const Element*>(t.weights) + n * t.K + k;
  }

  template <int R, int C>
  [[gnu::noinline]] static void run(const LinearTask& t, int64_t m, int64_t n, const Segment& segment);
};

// R rows of x from m on, C rows of W: n and those apart from it. Grouped: chunks share scales by t.group inputs.
template <class Kind, bool Grouped>
template <int R, int C>
void Tile<Kind, Grouped>::run(const LinearTask& t, int64_t m, int64_t n, const Segment& segment) {
  using Sum = std::conditional_t<Grouped, F32, typename Kind::Sum>;
  const int64_t apart = segment.apart, row = t.K * apart, size = segment.end - segment.begin;
  const int64_t next_x = rows_with(t, m) * CHUNK;
  const auto* x = static_cast<const typename Kind::Stored*>(t.packed) + packed_at(t, m, segment.begin);
  const auto* w = static_cast<const Element*>(at(t, n, segment.begin));
  const auto* next = static_cast<const Element*>(segment.next);
  Sum sums[R][C];
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) {
      if constexpr (Grouped) {
        sums[r][c] = zero();
      } else {
        sums[r][c] = Kind::none();
      }
    }

  if constexpr (!Grouped) {
    int64_t k = 0;
    for (; k + CHUNK <= size; k += CHUNK, x += next_x) {
      VERAX_UNROLL
      for (int i = 0; i < CHUNK; i += Kind::STEP) {
        typename Kind::Operand weights[C];
        VERAX_UNROLL
        for (int c = 0; c < C; ++c) {
          weights[c] = Kind::weights(w + c * row + k + i);
          if (i * sizeof(Element) % 64 == 0) prefetch(next + c * row + k + i);
        }
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) {
          const auto inputs = Kind::inputs(x + r * CHUNK + i);
          VERAX_UNROLL
          for (int c = 0; c < C; ++c) sums[r][c] = dot(sums[r][c], weights[c], inputs);
        }
      }
    }
    if (k < size) {
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        Element rest[CHUNK] = {};
        std::memcpy(rest, w + c * row + k, (size - k) * sizeof(Element));
        VERAX_UNROLL
        for (int i = 0; i < CHUNK; i += Kind::STEP) {
          const auto weights = Kind::weights(rest + i);
          VERAX_UNROLL
          for (int r = 0; r < R; ++r) sums[r][c] = dot(sums[r][c], weights, Kind::inputs(x + r * CHUNK + i));
        }
      }
    }
  } else {
    float scales[C][SEGMENT / CHUNK];
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) {
      group_scales(t, ((n + c * apart) * t.K + segment.begin) / t.group, size / t.group, scales[c]);
    }
    for (int64_t k = 0, g = 0; k < size; k += t.group, x += t.group / CHUNK * next_x, ++g) {
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) {
        typename Kind::Sum parts[R];
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) parts[r] = Kind::none();
        const auto* inputs = x;
        for (int64_t j = k; j < k + t.group; j += CHUNK, inputs += next_x) {
          const auto weights = Kind::weights(w + c * row + j);
          prefetch(next + c * row + j);
          VERAX_UNROLL
          for (int r = 0; r < R; ++r) parts[r] = dot(parts[r], weights, Kind::inputs(inputs + r * CHUNK));
        }
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) sums[r][c] = fma(Kind::total(parts[r]), broadcast(scales[c][g]), sums[r][c]);
      }
    }
  }

  float more[R][C], scales_of_rows[C];
  if constexpr (Grouped) {
    for (int r = 0; r < R; ++r) sum_each(sums[r], more[r]);
  } else {
    sum_tile<Kind>(sums, more);
  }
  const bool first = segment.begin == 0, last = segment.end == t.K;
  for (int c = 0; c < C; ++c) scales_of_rows[c] = Grouped ? 1 : row_scale(t, n + c * apart);
  for (int r = 0; r < R; ++r) {
    float* y = t.y + (m + r) * t.N + n;
    const float scale = input_scale<Kind>(t, m + r, segment.begin);
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) {
      // Fused, as in linear_tiles.h.
      const float value = first ? more[r][c] * scale : __builtin_fmaf(more[r][c], scale, y[c * apart]);
      y[c * apart] = last && !Grouped ? value * scales_of_rows[c] : value;
    }
  }
}

}  // namespace

void linear_pack(const LinearTask& t, int64_t begin, int64_t end) {
#if defined(VERAX_TILES)
  if (takes_tiles(t)) return pack_digits(t, begin, end);
#endif
  switch (t.kind) {
    case Weights::f32: return pack<F32Weights>(t, begin, end);
    case Weights::bf16: return pack<Bf16Weights>(t, begin, end);
    case Weights::float8: return pack<Float8Weights>(t, begin, end);
    case Weights::int8: return pack<Int8Weights>(t, begin, end);
    case Weights::int4: return linear_int4_pack(t, begin, end);
    case Weights::int8_pairs: return;  // gemm.h only
    case Weights::blocks: return linear_blocks_pack(t, begin, end);
  }
}

void linear_columns(const LinearTask& t, int64_t begin, int64_t end) {
#if defined(VERAX_TILES)
  if (takes_tiles(t)) return tiled_columns(t, begin, end);
#endif
  switch (t.kind) {
    case Weights::f32: return linear_units<Tile<F32Weights, false>>(t, begin, end);
    case Weights::bf16: return linear_units<Tile<Bf16Weights, false>>(t, begin, end);
    case Weights::float8:
      return t.group ? linear_units<Tile<Float8Weights, true>>(t, begin, end)
                     : linear_units<Tile<Float8Weights, false>>(t, begin, end);
    case Weights::int8:
      return t.group ? linear_units<Tile<Int8Weights, true>>(t, begin, end)
                     : linear_units<Tile<Int8Weights, false>>(t, begin, end);
    case Weights::int4: return linear_int4_columns(t, begin, end);
    case Weights::int8_pairs: return;
    case Weights::blocks: return linear_blocks_columns(t, begin, end);
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
