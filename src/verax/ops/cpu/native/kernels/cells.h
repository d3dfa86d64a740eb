// Small matrix products out of the first cache levels, for each kind of operand.
//
// A cell is what one lane multiplies and adds in one instruction: a float32, or a pair of bfloat16 where the processor
// has their dot product. Either is 32 bits, and is kept in arrays and registers of float, which only move it.
// A matrix product a[R, D] . b[D, C] has `a` by rows and `b` packed: cells that share a lane's sum lie below each
// other, so pairs hold two values of one column.
#pragma once

#include "vec_math.h"
#include "words.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// One value a cell: products are float32, also of bfloat16.
template <class Stored>
struct Singles {
  using Element = Stored;
  static constexpr int depth = 1;  // values in a cell
  static F32 cell(float x) { return broadcast(x); }  // an `a` with x in each lane
  // a[lane] * b[lane] + sum
  static F32 multiply(F32 sum, F32 a, F32 b) { return fma(a, b, sum); }
  // Cells of F32::lanes * depth values of one row.
  static F32 of_row(const Element* p) { return load(p); }
  // Cells of CHUNK columns, each with `depth` values below each other.
  static Chunk of_rows(const Element* const* rows, int64_t at) { return load_chunk(rows[0] + at); }
  static void of_chunk(float* to, const Chunk& values) { store_chunk(to, values); }
  // Cells of F32::lanes columns, of two values below each other.
  static void of_pair(float* to, int64_t stride, F32 first, F32 second) {
    store(to, first);
    store(to + stride, second);
  }
};

#if defined(VERAX_BF16_DOT) && defined(__ARM_NEON)

struct Pairs {
  using Element = bf16;
  static constexpr int depth = 2;
  static bfloat16x4_t cell(float x) { return vreinterpret_bf16_s8(each_lane(x)); }
  static F32 multiply(F32 sum, bfloat16x4_t a, F32 b) {
    return {vbfdotq_lane_f32(sum.v, vreinterpretq_bf16_f32(b.v), a, 0)};
  }
  static F32 multiply(F32 sum, F32 a, F32 b) {
    return {vbfdotq_f32(sum.v, vreinterpretq_bf16_f32(a.v), vreinterpretq_bf16_f32(b.v))};
  }
  static F32 of_row(const Element* p) { return {vreinterpretq_f32_u16(vld1q_u16(p))}; }
  static Chunk of_rows(const Element* const* rows, int64_t at) {
    Chunk cells;
    VERAX_UNROLL
    for (int i = 0; i < Chunk::parts; i += depth) {
      const uint16x8_t first = vld1q_u16(rows[0] + at + i * F32::lanes);
      const uint16x8_t second = vld1q_u16(rows[1] + at + i * F32::lanes);
      cells.part[i] = {vreinterpretq_f32_u16(vzip1q_u16(first, second))};
      cells.part[i + 1] = {vreinterpretq_f32_u16(vzip2q_u16(first, second))};
    }
    return cells;
  }
  static void of_chunk(float* to, const Chunk& values) {
    store_bf16_chunk(reinterpret_cast<bf16*>(to), to_bf16_chunk(values));
  }
  static void of_pair(float* to, int64_t, F32 first, F32 second) {
    const bfloat16x8_t a = vcvtq_low_bf16_f32(first.v), b = vcvtq_low_bf16_f32(second.v);
    store(to, {vreinterpretq_f32_u16(vzip1q_u16(vreinterpretq_u16_bf16(a), vreinterpretq_u16_bf16(b)))});
  }
};
using Bf16Cells = Pairs;

// Integers of 8 bits, which bfloat16 holds exactly: the upper halves of float32.
struct Int8Pairs : Pairs {
  using Element = int8_t;
  static F32 of_bytes(int8x8_t bytes) {
    const int16x8_t wide = vmovl_s8(bytes);
    const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), high = vcvtq_f32_s32(vmovl_high_s16(wide));
    return {vreinterpretq_f32_u16(vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)))};
  }
  static F32 of_row(const Element* p) { return of_bytes(vld1_s8(p)); }
  static Chunk of_rows(const Element* const* rows, int64_t at) {
    Chunk cells;
    VERAX_UNROLL
    for (int i = 0; i < Chunk::parts; i += depth) {
      const int8x8_t first = vld1_s8(rows[0] + at + i * F32::lanes), second = vld1_s8(rows[1] + at + i * F32::lanes);
      cells.part[i] = of_bytes(vzip1_s8(first, second));
      cells.part[i + 1] = of_bytes(vzip2_s8(first, second));
    }
    return cells;
  }
};
using Int8Cells = Int8Pairs;

#elif defined(VERAX_BF16_DOT)

struct Pairs {
  using Element = bf16;
  static constexpr int depth = 2;
  static F32 cell(float x) { return broadcast(x); }
  static F32 multiply(F32 sum, F32 a, F32 b) {
    return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<const __m512bh&>(a.v), reinterpret_cast<const __m512bh&>(b.v))};
  }
  static F32 of_row(const Element* p) { return {_mm512_loadu_ps(p)}; }
  static Chunk of_rows(const Element* const* rows, int64_t at) {
    const __m512i first = _mm512_loadu_si512(rows[0] + at), second = _mm512_loadu_si512(rows[1] + at);
    // Neighbours within 128 bits, then the 128-bit parts into the order of the columns.
    const __m512i low = _mm512_unpacklo_epi16(first, second), high = _mm512_unpackhi_epi16(first, second);
    const __m512i front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    return {{{_mm512_castsi512_ps(_mm512_permutex2var_epi64(low, front, high))},
             {_mm512_castsi512_ps(_mm512_permutex2var_epi64(low, back, high))}}};
  }
  static void of_chunk(float* to, const Chunk& values) {
    store_bf16_chunk(reinterpret_cast<bf16*>(to), to_bf16_chunk(values));
  }
  // Cells of two values each.
  static F32 joined(F32 first, F32 second) {
    const __m512bh both = _mm512_cvtne2ps_pbh(second.v, first.v);  // all of the first, then all of the second
    const __m512i order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006,
                                            0x170007, 0x180008, 0x190009, 0x1A000A, 0x1B000B, 0x1C000C, 0x1D000D,
                                            0x1E000E, 0x1F000F);
    return {_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, reinterpret_cast<const __m512i&>(both)))};
  }
  static void of_pair(float* to, int64_t, F32 first, F32 second) { store(to, joined(first, second)); }
};
using Bf16Cells = Pairs;

// Integers of 8 bits, which bfloat16 holds exactly.
struct Int8Pairs : Pairs {
  using Element = int8_t;
  static F32 of_row(const Element* p) {
    const Bf16Chunk row = load_bf16_chunk(p);
    return {reinterpret_cast<const __m512&>(row.v)};
  }
  static Chunk of_rows(const Element* const* rows, int64_t at) {
    const Chunk first = load_chunk(rows[0] + at), second = load_chunk(rows[1] + at);
    Chunk cells;
    for (int i = 0; i < Chunk::parts; ++i) {  // the upper halves of float32 are bfloat16
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first.part[i].v), 16);
      cells.part[i] = {_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(second.part[i].v)))};
    }
    return cells;
  }
};
using Int8Cells = Int8Pairs;

#else
using Bf16Cells = Singles<bf16>;
using Int8Cells = Singles<int8_t>;
#endif
using F32Cells = Singles<float>;

#if defined(VERAX_BYTE_DOT)

// Integers of 8 bits by such integers: four in a cell, and sums of 32 bits, as the bits of floats. 128 is added to the
// packed ones for processors that multiply signed bytes by unsigned ones: there, 128 times the sum of the others is taken
// off the total. Elsewhere 128 is taken off each of them, once in a tile's step. Sums wrap around; the total is what 32
// bits hold.
struct IntegerCells {
  using Element = int8_t;
  static constexpr int depth = 4;
  static EachLane cell(float x) { return each_lane(x); }
  static F32 multiply(F32 sum, EachLane a, F32 b) {
    return as_floats(dot_bytes(as_words(sum), dot_operand(as_words(b)), a));
  }
  static F32 of_row(const Element* p) {
    return as_floats(exclusive_or(load_words(reinterpret_cast<const uint32_t*>(p)), words(0x80808080)));
  }
  static F32 total(F32 sum, int32_t inputs) { return to_f32(add(as_words(sum), words((DOT_OFFSET - 128) * inputs))); }
};

#elif defined(VERAX_HALF_DOT)

// Integers of 8 bits by such integers: pairs of 16 bits in a cell, and sums of 32 bits, as the bits of floats.
struct IntegerCells {
  using Element = int8_t;
  static constexpr int depth = 2;
  static F32 cell(float x) { return broadcast(x); }
  static F32 multiply(F32 sum, F32 a, F32 b) { return as_floats(dot_halves(as_words(sum), as_words(a), as_words(b))); }
  static F32 of_row(const Element* p) { return as_floats(load_halves(p)); }
  static F32 total(F32 sum, int32_t) { return to_f32(as_words(sum)); }
};

#else

struct IntegerCells : Singles<int8_t> {
  static F32 total(F32 sum, int32_t) { return sum; }
};

#endif

// Two integers of 8 bits, which become a cell where they are multiplied.
struct BytePair {
  int8_t values[2];
};

// True for cells whose pieces of x have scales of their own, so that a piece's sums begin at zero.
template <class Kind>
constexpr bool WIDE = false;

#if defined(VERAX_HALF_DOT)

inline F32 load(const BytePair* p) { return as_floats(load_halves(p->values)); }

// Such pairs by integers of 16 bits: sums of 32 bits, as the bits of floats.
struct WideCells {
  static constexpr int depth = 2;
  static F32 cell(float x) { return broadcast(x); }
  static F32 multiply(F32 sum, F32 a, F32 b) { return as_floats(dot_halves(as_words(sum), as_words(a), as_words(b))); }
  static F32 total(F32 sum) {
    asm("" : "+v"(sum.v));  // without it, GCC 12 keeps a copy of each sum in memory: half of the speed
    return to_f32(as_words(sum));
  }
};
template <>
constexpr bool WIDE<WideCells> = true;

#if !defined(VERAX_BYTE_DOT)

// Two integers of 8 bits, plus 128.
struct OffsetPair {
  uint8_t values[2];
};
inline F32 load(const OffsetPair* p) { return as_floats(load_byte_halves(p->values)); }

// Such pairs by integers of 8 bits that take 16. Sums wrap around; the total is what 32 bits hold.
struct OffsetCells {
  static constexpr int depth = 2;
  static F32 cell(float x) { return broadcast(x); }
  static F32 multiply(F32 sum, F32 a, F32 b) { return WideCells::multiply(sum, a, b); }
  static F32 total(F32 sum, int32_t inputs) {
    return to_f32(add(as_words(sum), words(-128 * static_cast<uint32_t>(inputs))));
  }
};

#endif
#endif

// One chunk as cells of each kind.
inline void to_cells(Bf16Cells, float* to, const bf16* from) {
  store_bf16_chunk(reinterpret_cast<Bf16Chunk::Stored*>(to), load_bf16_chunk(from));
}
inline void to_cells(Bf16Cells, float* to, const float* from) {
  store_bf16_chunk(reinterpret_cast<Bf16Chunk::Stored*>(to), to_bf16_chunk(load_chunk(from)));
}
template <class Element>
inline void to_cells(F32Cells, float* to, const Element* from) {
  store_chunk(to, load_chunk(from));
}

inline void to_cells(IntegerCells, float* to, const int8_t* from) {
  constexpr int STEP = F32::lanes * IntegerCells::depth;
  if constexpr (IntegerCells::depth == sizeof(float)) {
    std::memcpy(to, from, CHUNK);  // a cell is four bytes, unchanged
  } else {
    for (int i = 0; i < CHUNK; i += STEP) store(to + i / IntegerCells::depth, IntegerCells::of_row(from + i));
  }
}

// Sums are kept in registers: ROWS x COLUMNS of them, in addition to the operands. AVX2 has 16 registers, the others 32.
constexpr int ROWS = 6;
#if defined(VERAX_PORTABLE) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr int COLUMNS = 2;
#else
constexpr int COLUMNS = 4;
#endif

// An operand or a result: cells or sums, and the distance between its rows.
struct Matrix {
  float* at;
  int64_t stride;
  float* row(int64_t i) const { return at + i * stride; }
};

// The same with a distance that is known to the compiler, which then needs fewer registers for addresses.
template <int STRIDE, class Cell = float>
struct Strided {
  Cell* at;
  static constexpr int64_t stride = STRIDE;
  Cell* row(int64_t i) const { return at + i * STRIDE; }
};

// Takes arrays out of a piece of memory, each from the start of a cache line.
struct Arena {
  float* next;
  float* take(int64_t floats) {
    float* taken = next;
    next += (floats + 15) / 16 * 16;
    return taken;
  }
};

// for each depth d:
//   R x C sums += a[r, d] * b[d, c]
// Each sum is one register that takes the depths in order: it does not depend on what else is computed.
// A and B are Matrix or Strided.
template <class Kind, int R, int C, class A, class B>
inline void add_products(F32 (&sums)[R][C], A a, B b, int64_t depth) {
  for (int64_t d = 0; d < depth; ++d) {
    F32 columns[C];
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) columns[c] = load(b.row(d) + c * F32::lanes);
    VERAX_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto cell = Kind::cell(a.row(r)[d]);
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) sums[r][c] = Kind::multiply(sums[r][c], cell, columns[c]);
    }
  }
}

// R x C of out = a . b, or with `alpha`: out * alpha + a . b
template <class Kind, int R, int C>
inline void product_tile(Matrix a, Matrix b, int64_t depth, Matrix out, const float* alpha) {
  F32 sums[R][C];
  VERAX_UNROLL
  for (int r = 0; r < R; ++r) {
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) {
      sums[r][c] = alpha ? mul(load(out.row(r) + c * F32::lanes), broadcast(alpha[r])) : zero();
    }
  }
  add_products<Kind, R, C>(sums, a, b, depth);
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) store(out.row(r) + c * F32::lanes, sums[r][c]);
}

template <class Kind, int R>
inline void product_rows(Matrix a, Matrix b, int64_t depth, Matrix out, int64_t vectors, const float* alpha) {
  const auto advance = [&](int64_t by) {
    b.at += by * F32::lanes;
    out.at += by * F32::lanes;
    vectors -= by;
  };
  for (; vectors >= COLUMNS; advance(COLUMNS)) product_tile<Kind, R, COLUMNS>(a, b, depth, out, alpha);
  if (COLUMNS > 2 && vectors >= 2) {
    product_tile<Kind, R, 2>(a, b, depth, out, alpha);
    advance(2);
  }
  if (vectors) product_tile<Kind, R, 1>(a, b, depth, out, alpha);
}

// out[rows, vectors] = a . b, or with `alpha` (a factor for each row): out * alpha + a . b. At most ROWS rows.
template <class Kind>
void product(int64_t rows, Matrix a, Matrix b, int64_t depth, Matrix out, int64_t vectors, const float* alpha) {
  static_assert(ROWS == 6, "one case for each number of rows");
  switch (rows) {
    case 6: return product_rows<Kind, 6>(a, b, depth, out, vectors, alpha);
    case 5: return product_rows<Kind, 5>(a, b, depth, out, vectors, alpha);
    case 4: return product_rows<Kind, 4>(a, b, depth, out, vectors, alpha);
    case 3: return product_rows<Kind, 3>(a, b, depth, out, vectors, alpha);
    case 2: return product_rows<Kind, 2>(a, b, depth, out, vectors, alpha);
    case 1: return product_rows<Kind, 1>(a, b, depth, out, vectors, alpha);
  }
}

// Up to N values from `p`, where only `count` may be read: zeros after them.
template <class Element, int N>
inline const Element* padded(const Element* p, int64_t count, Element (&buffer)[N]) {
  if (count >= N) return p;
  std::memset(buffer, 0, sizeof buffer);
  std::memcpy(buffer, p, count * sizeof(Element));
  return buffer;
}

// to[h, key] = rows[key][h]: the packed operand whose columns are keys. `count` keys, in groups of F32::lanes.
// `next` are rows that will be packed after these: they are asked for meanwhile, here and below.
template <class Kind>
void pack_columns(Matrix to, const typename Kind::Element* const* rows, const typename Kind::Element* const* next,
                  int64_t count, int64_t H) {
  using Element = typename Kind::Element;
  constexpr int L = F32::lanes, STEP = L * Kind::depth;
  for (int64_t key = 0; key < count; key += L) {
    for (int64_t h = 0; h < H; h += STEP) {
      F32 square[L];
      for (int i = 0; i < L; ++i) prefetch(next[key + i] + h);
      if (h + STEP <= H) {
        for (int i = 0; i < L; ++i) square[i] = Kind::of_row(rows[key + i] + h);
      } else {
        Element buffer[STEP];
        for (int i = 0; i < L; ++i) square[i] = Kind::of_row(padded(rows[key + i] + h, H - h, buffer));
      }
      transpose(square);
      for (int i = 0; i < L; ++i) store(to.row(h / Kind::depth + i) + key, square[i]);
    }
  }
}

// to[key, h] = rows[key][h]: the packed operand whose columns are elements of a row. Whole chunks, zeros at the end.
template <class Kind>
void pack_rows(Matrix to, const typename Kind::Element* const* rows, const typename Kind::Element* const* next,
               int64_t count, int64_t H) {
  using Element = typename Kind::Element;
  for (int64_t key = 0; key < count; key += Kind::depth) {
    float* at = to.row(key / Kind::depth);
    int64_t h = 0;
    for (; h + CHUNK <= H; h += CHUNK) {
      for (int i = 0; i < Kind::depth; ++i) prefetch(next[key + i] + h);
      store_chunk(at + h, Kind::of_rows(rows + key, h));
    }
    if (h < H) {
      Element buffer[Kind::depth][CHUNK];
      const Element* rest[Kind::depth];
      for (int i = 0; i < Kind::depth; ++i) rest[i] = padded(rows[key + i] + h, H - h, buffer[i]);
      store_chunk(at + h, Kind::of_rows(rest, 0));
    }
  }
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
