// for each piece of K that fits the first cache level:
//   copy x of the block's rows as cells                      (into the second level)
//   for each strip of columns:
//     pack W of the strip                                    (into the first level)
//     for each tile of rows:
//       y = y so far + x . W                                 (in registers)
//   after the last piece: y * scale + bias
//
// Each number of y takes its products in the order of K, whatever else is computed. The blocking follows Goto
// and van de Geijn (2008, doi:10.1145/1356052.1356053), with the roles of the two operands as in their GEBP.
#include "gemm.h"

#include "blocks.h"
#include "cells.h"
#include "gemm_panel_tiles.h"
#include "gemm_strip.h"
#include "gemm_tiles.h"
#include "linear_integers.h"

#if defined(VERAX_HALF_DOT) && !defined(VERAX_BF16_DOT)
#define VERAX_CODE_CELLS  // levels that multiply integers of 16 bits, and no bfloat16
#endif

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Cells of K at a time. Narrow strips leave room for more.
constexpr int64_t DEPTH = SUMS == 12 ? GEMM_DEPTH : GEMM_DEPTH / 2;

// Layout of x for cells of W, and the cells that it becomes.
template <class Kind>
struct Inputs {
  using Element = bf16;
  using Cells = Bf16Cells;
};
template <>
struct Inputs<F32Cells> {
  using Element = float;
  using Cells = F32Cells;
};
template <>
struct Inputs<IntegerCells> {
  using Element = int8_t;
  using Cells = IntegerCells;
};

// Numbers of a row of x, and of a column of W, in a piece.
template <class Cells>
constexpr int64_t X_NUMBERS = DEPTH;
template <class Cells>
constexpr int64_t W_NUMBERS = DEPTH;

#if defined(VERAX_CODE_CELLS)

// Codes of a format of blocks by integers of x, which have a scale for each chunk: two of 16 bits in a cell. In a piece, a
// row of x is its cells, their scales and their sums; a column of W its cells, their scales and minimums.
template <class Format>
struct CodeCells {
  using Element = float;
  static constexpr int depth = 2;
  static constexpr int64_t CELLS_OF_CHUNK = CHUNK / depth, CELLS_OF_GROUP = Format::GROUP / depth;
  static constexpr int64_t CHUNKS = DEPTH / CELLS_OF_CHUNK, GROUPS = DEPTH / CELLS_OF_GROUP;
  static constexpr int64_t SCALES = DEPTH, SUMS = SCALES + CHUNKS, MINIMUMS = SCALES + GROUPS;

  // The chunk of a row of x.
  static void put(float* row, int64_t chunk, const float* x) {
    const RoundedChunk rounded = round_chunk(x);
    auto* integers = reinterpret_cast<int16_t*>(row) + chunk * CHUNK;
    VERAX_UNROLL
    for (int i = 0; i < Chunk::parts; ++i) store_int16s(integers + i * F32::lanes, rounded.integers.part[i]);
    row[SCALES + chunk] = rounded.scale;
    row[SUMS + chunk] = rounded.scale * (rounded.sums[0] + rounded.sums[1]);
  }

  // The chunk of as many columns of W as there are lanes, the c-th of their unit.
  static void put(Strided<STRIP> columns, int64_t chunk, const uint32_t* unit, int c) {
    const auto factors = Format::factors(unit);
    VERAX_UNROLL
    for (int q = 0; q < CHUNK / 4; ++q) {
      const Words codes = Format::codes(unit, c, q);
      float* to = columns.row(chunk * CELLS_OF_CHUNK + 2 * q);
      store(to, as_floats(byte_halves<Format::OFFSET>(codes, 0)));
      store(to + columns.stride, as_floats(byte_halves<Format::OFFSET>(codes, 1)));
    }
    VERAX_UNROLL
    for (int h = 0; h < CHUNK / Format::GROUP; ++h) {
      store(columns.row(SCALES + chunk * CHUNK / Format::GROUP + h), Format::scales(unit, factors, c, h));
    }
    if constexpr (Format::MINIMUMS) store(columns.row(MINIMUMS + chunk), Format::minimums(unit, factors, c));
  }

  // R x C: y = y so far + (codes . integers) * their scales + minimums * sums
  template <int R, int C, class X, class W>
  static void multiply(const Tile<X, W>& tile, int64_t depth) {
    const Tile<X, W> t = tile;  // of its own: what is stored could be part of the other
    float kept[R][C * F32::lanes], *sums = kept[0];
    const auto each = [&](const auto& body) {
      VERAX_UNROLL
      for (int c = 0; c < C; ++c)
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) body(r, c, c * F32::lanes, sums + (r * C + c) * F32::lanes);
    };
    each([&](int r, int, int at, float* sum) { store(sum, t.first ? zero() : load(t.y.row(r) + at)); });
    for (int64_t group = 0, d = 0; d < depth; ++group) {
      Words parts[R][C];
      each([&](int r, int c, int, float*) { parts[r][c] = words(0); });
      for (const int64_t end = d + CELLS_OF_GROUP; d < end; ++d) {
        Words columns[C];
        VERAX_UNROLL
        for (int c = 0; c < C; ++c) columns[c] = as_words(load(t.weight.row(d) + c * F32::lanes));
        VERAX_UNROLL
        for (int r = 0; r < R; ++r) {
          const Words cell = word_at(t.x.row(r) + d);
          VERAX_UNROLL
          for (int c = 0; c < C; ++c) parts[r][c] = dot_halves(parts[r][c], columns[c], cell);
        }
      }
      // In memory while parts take the registers.
      sums = read_anew(sums);
      const int64_t chunk = group * Format::GROUP / CHUNK;
      const float *scales = t.weight.row(SCALES + group), *minimums = t.weight.row(MINIMUMS + chunk);
      each([&](int r, int c, int at, float* sum) {
        F32 so_far = load(sum);
        if constexpr (Format::MINIMUMS) so_far = fma(load(minimums + at), broadcast(t.x.row(r)[SUMS + chunk]), so_far);
        const F32 scale = mul(load(scales + at), broadcast(t.x.row(r)[SCALES + chunk]));
        store(sum, fma(to_f32(parts[r][c]), scale, so_far));
      });
    }
    each([&](int r, int, int at, const float* sum) {
      store(t.y.row(r) + at, t.bias ? add(load(sum), load(t.bias + at)) : load(sum));
    });
  }
};
template <class Format>
constexpr bool SCALED<CodeCells<Format>> = true;
template <class Format>
constexpr int64_t X_NUMBERS<CodeCells<Format>> = CodeCells<Format>::SUMS + CodeCells<Format>::CHUNKS;
template <class Format>
constexpr int64_t W_NUMBERS<CodeCells<Format>> = CodeCells<Format>::MINIMUMS + CodeCells<Format>::CHUNKS;
template <class Format>
struct Inputs<CodeCells<Format>> {
  using Element = float;
  using Cells = CodeCells<Format>;
};
template <class Format>
using CellsOfBlocks = CodeCells<Format>;
#elif defined(VERAX_BF16_DOT)
template <class Format>
using CellsOfBlocks = Bf16Cells;
#else
template <class Format>
using CellsOfBlocks = F32Cells;
#endif

template <class Kind>
void copy_rows(Matrix to, const GemmTask& t, const GemmBlock& block, int64_t k, int64_t values) {
  using Cells = typename Inputs<Kind>::Cells;
  for (int64_t r = 0; r < block.rows; ++r) {
    const auto* from = static_cast<const typename Inputs<Kind>::Element*>(t.x) + (block.m + r) * t.K + k;
    for (int64_t i = 0; i < values; i += CHUNK) {
      if constexpr (SCALED<Cells>) {
        Cells::put(to.row(r), i / CHUNK, from + i);
      } else {
        to_cells(Cells{}, to.row(r) + i / Cells::depth, from + i);
      }
    }
  }
}

// Columns [n, n + columns) of W, `values` of each from the k-th; the ones that come next are asked for meanwhile.
template <class Kind>
void pack_strip(Matrix to, const GemmTask& t, int64_t n, int64_t columns, int64_t k, int64_t values) {
  const typename Kind::Element *rows[STRIP], *next[STRIP];
  for (int64_t i = 0; i < columns; ++i) {
    rows[i] = static_cast<const typename Kind::Element*>(t.weight) + (n + i) * t.K + k;
    next[i] = n + i + STRIP < t.N ? rows[i] + STRIP * t.K : rows[i];
  }
  pack_columns<Kind>(to, rows, next, columns, values);
}

// Columns of blocks, which have the columns in their lanes already.
template <class Format>
void pack_blocks(Matrix to, const GemmTask& t, int64_t n, int64_t columns, int64_t k, int64_t values) {
  using Cells = CellsOfBlocks<Format>;
  const int64_t units = (t.K + Format::UNIT - 1) / Format::UNIT;
  for (int64_t i = 0; i < columns; i += F32::lanes) {
    const auto* words = static_cast<const uint32_t*>(t.weight) + (n + i) / BLOCK * units * Format::WORDS * BLOCK;
    for (int64_t j = 0; j < values; j += CHUNK) {
      const auto* unit = words + (k + j) / Format::UNIT * Format::WORDS * BLOCK + (n + i) % BLOCK;
      const int c = static_cast<int>((k + j) % Format::UNIT / CHUNK);
      if constexpr (SCALED<Cells>) {
        Cells::put(Strided<STRIP>{to.at + i}, j / CHUNK, unit, c);
      } else {
        float* at = to.row(j / Cells::depth) + i;
        unpack_chunk<Format>(unit, c, [&](int h, F32 even, F32 odd) {
          Cells::of_pair(at + h / Cells::depth * to.stride, to.stride, even, odd);
        });
      }
    }
  }
}

template <class Format>
struct BlockCells {};

// How W of a kind is packed, and what the cells then are.
template <class Kind>
struct Packing {
  using Cells = Kind;
  static constexpr auto strip = pack_strip<Kind>;
};
template <class Format>
struct Packing<BlockCells<Format>> {
  using Cells = CellsOfBlocks<Format>;
  static constexpr auto strip = pack_blocks<Format>;
};

template <class Kind>
void multiply_block(const GemmTask& t, const GemmBlock& block, void* scratch) {
  using Cells = typename Packing<Kind>::Cells;
  float* memory = static_cast<float*>(scratch);
  const Strided<STRIP> weight{memory};
  const Strided<X_NUMBERS<Cells>> x{memory + W_NUMBERS<Cells> * STRIP};
  const int64_t most = DEPTH * Cells::depth;
  for (int64_t k = 0; k < t.K; k += most) {
    const int64_t values = t.K - k < most ? t.K - k : most, depth = values / Cells::depth;
    const bool last = k + values == t.K;
    copy_rows<Cells>({x.at, x.stride}, t, block, k, values);
    for (int64_t n = block.n; n < block.n + block.columns; n += STRIP) {
      const int64_t left = block.n + block.columns - n, columns = left < STRIP ? left : STRIP;
      Packing<Kind>::strip({weight.at, weight.stride}, t, n, columns, k, values);
      const Matrix y{t.y + block.m * t.N + n, t.N};
      const auto tile = begin_tile(t, block, n, x, weight, y, k == 0, last);
      multiply_columns<Cells, false>(block.rows, tile, columns, depth);
    }
  }
}

}  // namespace

void gemm_round(const RoundTask& t, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    const float* x = t.x + m * t.K;
    F32 peaks = zero(), wrong = zero();
    for (int64_t k = 0; k < t.K; k += F32::lanes) {
      const F32 values = load(x + k);
      peaks = max(peaks, max(values, sub(zero(), values)));
      wrong = fma(values, zero(), wrong);  // NaN where a value is not finite
    }
    const float scale = largest_lane(peaks) / 127 + sum(wrong);
    t.scales[m] = scale;
    const bool finite = scale > 1e-37f;  // and so is its inverse
    const F32 factor = broadcast(finite ? 1 / scale : 0);
    F32 total = zero();  // exact up to K = 131,072
    const int64_t bytes = t.wide ? 2 : 1;
    const auto put = [&](int8_t* y, int64_t begin_k, int64_t count) {
      if (!finite) return static_cast<void>(std::memset(y, 0, count * bytes));
      for (int64_t k = 0; k < count; k += F32::lanes) {
        const F32 values = whole(mul(load(x + begin_k + k), factor));
        if (t.wide) {
          store_int16s(reinterpret_cast<int16_t*>(y) + k, values);
        } else {
          store_low_bytes(y + k, to_words(values));
        }
        total = add(total, values);
      }
    };
#if defined(VERAX_TILES)
    if (t.piece == 0) {
      tile_row(t.y, t.M, m, t.K / ROW_BYTES, [&](char* to, int64_t cell) {
        put(reinterpret_cast<int8_t*>(to), cell * IntegerCells::depth, ROW_BYTES);
      });
    }
#endif
    for (int64_t begin_k = 0; t.piece && begin_k < t.K; begin_k += t.piece) {
      put(t.y + (begin_k * t.M + m * t.piece) * bytes, begin_k, t.K - begin_k < t.piece ? t.K - begin_k : t.piece);
    }
    t.sums[m] = static_cast<int32_t>(sum(total));
  }
}

void gemm_pack([[maybe_unused]] const GemmTask& t, [[maybe_unused]] int64_t begin, [[maybe_unused]] int64_t end) {
#if defined(VERAX_TILES)
  pack_tiles(t, begin, end);
#endif
}

void gemm_block(const GemmTask& t, const GemmBlock& block, void* scratch) {
#if defined(VERAX_TILES)
  if (t.packed) return multiply_block_by_tiles(t, block, scratch);
#endif
  switch (t.kind) {
    case Weights::f32: return multiply_block<F32Cells>(t, block, scratch);
    case Weights::bf16: return multiply_block<Bf16Cells>(t, block, scratch);
    case Weights::int8: return multiply_block<Int8Cells>(t, block, scratch);
    case Weights::int8_pairs: return multiply_block<IntegerCells>(t, block, scratch);
    case Weights::float8: case Weights::int4: return;  // refused before
    case Weights::blocks:
      return with_format(t.block, [&](auto format) {
        multiply_block<BlockCells<decltype(format)>>(t, block, scratch);
      });
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
