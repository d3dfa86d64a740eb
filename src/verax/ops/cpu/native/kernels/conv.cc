// copy the block's input as cells, with its zeros                 (x is converted once; taps need no bounds)
// for each group of output channels:
//   for each piece of the kernel that fits the first cache level:  (rows of the kernel, or a part of one)
//     for each tile of pixels, of channels:
//       sums += x . w                                              (in registers; the first piece adds to the bias)
//       after the last piece: y = sums, rounded
//
// In channels-last order, what one row of the kernel reads is a run of KW * C values, and the run of the next pixel
// begins stride * C values later. So the patches of a row of pixels are a matrix without being written out: row r
// begins at r * stride * C (implicit GEMM; Chetlur et al., 2014, arXiv:1410.0759).
//
// Frames of zeros before the first are skipped. Each sum takes the taps in order, whatever else is computed: those
// of a piece by themselves, which keeps the error of long sums small.
//
// AMX takes 16 rows of such a matrix as a tile, with the distance between them. A piece is as large as the first cache level
// holds of 32 channels, and its sums stay in order.
#include "conv.h"

#include <algorithm>

#include "cells.h"
#include "tiles.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Registers of sums in all, and the most vectors of channels that they are for. AVX2 has 16 registers, the others 32.
#if defined(VERAX_PORTABLE) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr int SUMS = 12, VECTORS = 2;
#else
constexpr int SUMS = 24, VECTORS = 3;
#endif

// Pixels that are multiplied at a time with C vectors of channels. More than 16 would be bound by their loads.
template <int C>
constexpr int PIXELS = SUMS / C < 16 ? SUMS / C : 16;

// Cells of one output channel that are used for all pixels of a block before the next: of a group, 27 KB.
constexpr int64_t DEPTH = 144;

// Consecutive rows of the kernel, or cells [offset, offset + depth) of one row.
struct Piece {
  int64_t begin, end, offset, depth;
};

// The block's input: cells of `width` pixels by row, `height` rows by frame; where row i of the kernel begins is rows[i].
struct Patch {
  float* at;
  int64_t height, width;
  int64_t pixel, row;  // cells
  const int64_t* rows;
};

template <class Kind>
int64_t cells(int64_t C) {
  return (C + Kind::depth - 1) / Kind::depth;
}

// A cell of the weight from its first channel on, where channels are `stride` apart and `left` of them are left.
inline float cell_of(Singles<float>, const float* from, int64_t, int64_t) { return *from; }
inline float cell_of(Singles<bf16>, const bf16* from, int64_t, int64_t) { return widen(*from); }
#if defined(VERAX_BF16_DOT)
inline float cell_of(Pairs, const bf16* from, int64_t stride, int64_t left) {
  const bf16 pair[2] = {from[0], left > 1 ? from[stride] : bf16{0}};
  float cell;
  std::memcpy(&cell, pair, sizeof cell);
  return cell;
}
#endif

// Whole chunks: what follows in `to` is overwritten.
template <class Kind, class Element>
inline void copy(float* to, const Element* from, int64_t count) {
  int64_t i = 0;
  for (; i + CHUNK <= count; i += CHUNK) to_cells(Kind{}, to + i / Kind::depth, from + i);
  if (i < count) {
    Element buffer[CHUNK];
    to_cells(Kind{}, to + i / Kind::depth, padded(from + i, count - i, buffer));
  }
}

inline void clear(float* to, int64_t cells) { std::memset(to, 0, cells * sizeof(float)); }

template <class Kind, class Element>
void copy_row(float* to, const Element* from, int64_t pixels, int64_t C) {
  if (C % Kind::depth == 0) return copy<Kind>(to, from, pixels * C);
  for (int64_t i = 0; i < pixels; ++i) copy<Kind>(to + i * cells<Kind>(C), from + i * C, C);
}

// In ascending order: a row's last chunk may overwrite what the next row then writes.
template <class Kind, class Element>
void fill(const Patch& patch, const ConvTask& t, const ConvBlock& block) {
  const int64_t CC = cells<Kind>(t.C);
  const int64_t left = std::clamp<int64_t>(t.left - block.w * t.stride_w, 0, patch.width);
  const int64_t first = std::clamp<int64_t>(block.w * t.stride_w - t.left, 0, t.W);
  const int64_t there = std::clamp<int64_t>(t.W - first, 0, patch.width - left);
  for (int64_t kt = conv_zero_frames(t, block.t); kt < t.KT; ++kt) {
    const Element* frame = conv_frame<Element>(t, block.b, block.t * t.stride_t + kt);
    for (int64_t r = 0; r < patch.height; ++r) {
      float* to = patch.at + (kt * patch.height + r) * patch.row;
      const int64_t h = block.h * t.stride_h + r - t.top;
      if (h < 0 || h >= t.H || there == 0) {
        clear(to, patch.row);
        continue;
      }
      clear(to, left * CC);
      copy_row<Kind>(to + left * CC, frame + (h * t.W + first) * t.C, there, t.C);
      clear(to + (left + there) * CC, (patch.width - left - there) * CC);
    }
  }
}

// What a tile works on: pixels of one row, which are `stride` cells apart, by channels.
template <class Element>
struct Tile {
  const int64_t* rows;
  float* pixels;
  int64_t stride;
  float* weights;
  float* sums;
  const float* bias;  // null after the first piece
  Element* y;         // null before the last piece; pixels are y_stride apart
  int64_t y_stride;
  int64_t channels;   // of y
};

template <class Kind, class Element, int R, int C>
void multiply(const Piece& piece, Tile<Element> t) {
  constexpr int CHANNELS = C * F32::lanes;
  F32 sums[R][C];
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) sums[r][c] = zero();
  // Else the stores would wait for memory, and the products for them.
  for (int r = 0; t.y && r < R; ++r) prefetch_row(t.y + r * t.y_stride, CHANNELS);
  for (int64_t i = piece.begin; i < piece.end; ++i) {
    const Matrix pixels{t.pixels + t.rows[i] + piece.offset, t.stride}, weights{t.weights, CONV_GROUP};
    add_products<Kind, R, C>(sums, pixels, weights, piece.depth);
    t.weights += piece.depth * CONV_GROUP;
  }
  VERAX_UNROLL
  for (int r = 0; r < R; ++r) {
    float* to = t.sums + r * CONV_GROUP;
    const float* from = t.bias ? t.bias : to;
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) sums[r][c] = add(load(from + c * F32::lanes), sums[r][c]);
    if (t.y && t.channels >= CHANNELS) {
      VERAX_UNROLL
      for (int c = 0; c < C; ++c) round_to(t.y + r * t.y_stride + c * F32::lanes, sums[r][c]);
      continue;
    }
    VERAX_UNROLL
    for (int c = 0; c < C; ++c) store(to + c * F32::lanes, sums[r][c]);
    if (t.y) round_row(t.y + r * t.y_stride, to, t.channels);
  }
}

template <class Kind, int C, int R = PIXELS<C>, class Element>
void multiply_rows(int64_t rows, const Piece& piece, const Tile<Element>& t) {
  if (rows == R) return multiply<Kind, Element, R, C>(piece, t);
  if constexpr (R > 1) multiply_rows<Kind, C, R - 1>(rows, piece, t);
}

// C vectors of channels for all pixels of the block, in tiles of a row that are as even as can be.
template <class Kind, int C, class Element>
void add_columns(const ConvTask& t, const ConvBlock& block, const Patch& patch, const Piece& piece, Tile<Element> tile) {
  const int64_t tiles = (block.width + PIXELS<C> - 1) / PIXELS<C>;
  const int64_t rows = block.width / tiles, more = block.width % tiles;
  for (int64_t h = 0; h < block.height; ++h) {
    tile.pixels = patch.at + h * t.stride_h * patch.row;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t here = rows + (i < more);
      multiply_rows<Kind, C>(here, piece, tile);
      tile.pixels += here * tile.stride;
      tile.sums += here * CONV_GROUP;
      if (tile.y) tile.y += here * t.O;
    }
    if (tile.y) tile.y += (t.W_out - block.width) * t.O;
  }
}

template <class Kind, class Element>
void add_piece(const ConvTask& t, const ConvBlock& block, const Patch& patch, const Piece& piece, Tile<Element> tile) {
  int64_t vectors = (tile.channels + F32::lanes - 1) / F32::lanes;
  const auto advance = [&](int64_t by) {
    tile.weights += by * F32::lanes;
    tile.sums += by * F32::lanes;
    if (tile.bias) tile.bias += by * F32::lanes;
    if (tile.y) tile.y += by * F32::lanes;
    tile.channels -= by * F32::lanes;
    vectors -= by;
  };
  for (; vectors >= VECTORS; advance(VECTORS)) add_columns<Kind, VECTORS>(t, block, patch, piece, tile);
  if (VECTORS > 2 && vectors >= 2) {
    add_columns<Kind, 2>(t, block, patch, piece, tile);
    advance(2);
  }
  if (vectors) add_columns<Kind, 1>(t, block, patch, piece, tile);
}

// Calls `add` with each piece of rows [begin, end) of the kernel, of `run` cells in whole steps, and whether it is the first.
// Pieces begin where they do without zero frames, so that sums are the same.
template <int64_t STEP, class Add>
void for_each_piece(int64_t begin, int64_t end, int64_t run, int64_t depth, const Add& add) {
  const int64_t parts = (run + depth - 1) / depth, at_once = run < depth ? depth / run : 1;
  for (int64_t row = begin / at_once * at_once; row < end; row += at_once) {
    for (int64_t part = 0; part < parts; ++part) {
      const auto offset = [&](int64_t part) { return run / STEP * part / parts * STEP; };
      const Piece piece{std::max(row, begin), std::min(row + at_once, end), offset(part), offset(part + 1) - offset(part)};
      add(piece, piece.begin == begin && part == 0);
    }
  }
}

#if defined(VERAX_TILES)

// Cells of a channel in a piece, for tiles: of two, 36 KB.
constexpr int64_t TILES_DEPTH = 288;

// Up to 16 pixels of a row: the input's first cell, and the output.
struct Pixels {
  const float* at;
  int64_t h, w, count;
};

// R tiles of pixels by C tiles of channels, from a cell of both on.
struct TileWork {
  const float *pixels[2], *weights[2];
  int64_t stride;     // cells between pixels
  const float* bias;  // null after the first piece
  char* sums;
  const float* next[2];  // weights to ask for
  int64_t ahead;         // rows of them in each step
};

template <int R, int C>
void add_piece_tiles(const Piece& piece, const int64_t* rows, const TileWork& t) {
  constexpr int64_t WEIGHT_ROW = CONV_GROUP * 4;
  const float *weights[2] = {t.weights[0], t.weights[1]}, *next = t.next[0];
  const int64_t next_second = t.next[1] - t.next[0], ahead = t.ahead;
  if (t.bias) {
    VERAX_TILE(loadd)(0, t.bias, 0);
    if constexpr (C == 2) VERAX_TILE(loadd)(1, t.bias + SIDE, 0);
    if constexpr (R == 2) VERAX_TILE(loadd)(2, t.bias, 0);
    if constexpr (R == 2 && C == 2) VERAX_TILE(loadd)(3, t.bias + SIDE, 0);
  } else {
    begin_tiles<R, C>(t.sums, false);
  }
  for (int64_t i = piece.begin; i < piece.end; ++i) {
    const float *first = t.pixels[0] + rows[i] + piece.offset, *second = t.pixels[1] + rows[i] + piece.offset;
    for (int64_t d = 0; d < piece.depth; d += SIDE) {
      VERAX_TILE(loadd)(4, first + d, t.stride * 4);
      VERAX_TILE(loadd)(6, weights[0], WEIGHT_ROW);
      VERAX_TILE(dpbf16ps)(0, 4, 6);
      if constexpr (C == 2) {
        VERAX_TILE(loadd)(7, weights[1], WEIGHT_ROW);
        VERAX_TILE(dpbf16ps)(1, 4, 7);
      }
      if constexpr (R == 2) {
        VERAX_TILE(loadd)(5, second + d, t.stride * 4);
        VERAX_TILE(dpbf16ps)(2, 5, 6);
        if constexpr (C == 2) VERAX_TILE(dpbf16ps)(3, 5, 7);
      }
      for (int c = 0; c < C; ++c) weights[c] += SIDE * CONV_GROUP;
      for (int64_t row = 0; row < ahead; ++row, next += CONV_GROUP) {
        _mm_prefetch(next, _MM_HINT_T1);
        if constexpr (C == 2) _mm_prefetch(next + next_second, _MM_HINT_T1);
      }
    }
  }
  end_tiles<R, C>(t.sums);
}

// All pixels of a block in tiles, two at a time.
template <class Visit>
void for_each_pair(const ConvTask& t, const ConvBlock& block, const Patch& patch, const Visit& visit) {
  Pixels pair[2];
  int64_t count = 0, index = 0;
  for (int64_t h = 0; h < block.height; ++h) {
    for (int64_t w = 0; w < block.width; w += SIDE) {
      const float* at = patch.at + h * t.stride_h * patch.row + w * t.stride_w * patch.pixel;
      pair[count++] = {at, h, w, std::min<int64_t>(SIDE, block.width - w)};
      if (count == 2) visit(pair, 2, index++), count = 0;
    }
  }
  if (count) visit(pair, 1, index);
}

// The block's output channels [n, n + 16 C), of which there are `count`.
template <class Element, int C>
void convolve_columns(const ConvTask& t, const ConvBlock& block, const Patch& patch, int64_t n, int64_t count, char* sums) {
  const int64_t run = t.KW * patch.pixel, end = t.KT * t.KH, begin = conv_zero_frames(t, block.t) * t.KH;
  const auto weights = [&](int64_t n, int64_t cell) {
    return t.packed + (n / CONV_GROUP * end * run + cell) * CONV_GROUP + n % CONV_GROUP;
  };
  const int64_t pairs = (conv_tiles(block.height, block.width) + 1) / 2;
  float bias[2 * SIDE] = {};
  if (t.bias) std::memcpy(bias, t.bias + n, count * sizeof(float));
  const auto add = [&](const Piece& piece, bool first) {
    const int64_t cell = piece.begin * run + piece.offset, size = (piece.end - piece.begin) * piece.depth;
    const int64_t ahead = cell + 2 * size <= end * run ? (SIDE + pairs - 1) / pairs : 0;
    for_each_pair(t, block, patch, [&](const Pixels* pair, int64_t R, int64_t index) {
      TileWork work{};
      for (int64_t r = 0; r < 2; ++r) work.pixels[r] = pair[r < R ? r : 0].at;
      for (int c = 0; c < C; ++c) {
        work.weights[c] = weights(n + c * SIDE, cell);
        work.next[c] = weights(n + c * SIDE, cell + size) + index * ahead * size / SIDE * CONV_GROUP;
      }
      work.stride = t.stride_w * patch.pixel, work.bias = first ? bias : nullptr;
      work.sums = sums + index * 4 * TILE_BYTES;
      work.ahead = index * ahead < SIDE ? ahead : 0;
      R == 2 ? add_piece_tiles<2, C>(piece, patch.rows, work) : add_piece_tiles<1, C>(piece, patch.rows, work);
    });
  };
  for_each_piece<SIDE>(begin, end, run, TILES_DEPTH, add);
  if (begin == end) add({0, 0, 0, 0}, true);  // zero frames only: the bias
  for_each_pair(t, block, patch, [&](const Pixels* pair, int64_t R, int64_t index) {
    for (int64_t r = 0; r < R; ++r) {
      const int64_t row = ((block.b * t.T_out + block.t) * t.H_out + block.h + pair[r].h) * t.W_out + block.w + pair[r].w;
      Element* to = static_cast<Element*>(t.y) + row * t.O + n;
      for (int c = 0; c < C; ++c, to += SIDE) {
        const auto* from = reinterpret_cast<const float*>(sums + (4 * index + 2 * r + c) * TILE_BYTES);
        const int64_t here = std::min<int64_t>(SIDE, count - c * SIDE);
        for (int64_t pixel = 0; pixel < pair[r].count; ++pixel) round_row(to + pixel * t.O, from + pixel * SIDE, here);
      }
    }
  });
}

template <class Element>
void convolve_tiles(const ConvTask& t, const ConvBlock& block, const Patch& patch, char* sums) {
  const Tiles tiles;
  const int64_t last = std::min(t.O, (block.group + block.groups) * CONV_GROUP);
  for (int64_t n = block.group * CONV_GROUP; n < last; n += 2 * SIDE) {
    const int64_t count = std::min<int64_t>(2 * SIDE, last - n);
    const auto convolve = count > SIDE ? convolve_columns<Element, 2> : convolve_columns<Element, 1>;
    convolve(t, block, patch, n, count, sums);
  }
}

#endif

template <class Kind, class Element>
void convolve(const ConvTask& t, const ConvBlock& block, void* scratch) {
  const int64_t CC = cells<Kind>(t.C), height = conv_reach(block.height, t.stride_h, t.KH);
  const int64_t width = conv_reach(block.width, t.stride_w, t.KW);
  float* sums = static_cast<float*>(scratch);
  auto* rows = reinterpret_cast<int64_t*>(sums + conv_sums_floats(block.height, block.width));
  const Patch patch{reinterpret_cast<float*>(rows + conv_kernel_rows(t)), height, width, CC, width * CC, rows};
  for (int64_t i = 0; i < t.KT * t.KH; ++i) rows[i] = (i / t.KH * height + i % t.KH) * patch.row;
  fill<Kind, Element>(patch, t, block);
#if defined(VERAX_TILES)
  if (conv_has_tiles(t)) return convolve_tiles<Element>(t, block, patch, reinterpret_cast<char*>(sums));
#endif

  const int64_t run = t.KW * CC, begin = conv_zero_frames(t, block.t) * t.KH, end = t.KT * t.KH;
  const int64_t pixel = ((block.b * t.T_out + block.t) * t.H_out + block.h) * t.W_out + block.w;
  for (int64_t group = block.group; group < block.group + block.groups; ++group) {
    const int64_t channel = group * CONV_GROUP, count = t.O - channel < CONV_GROUP ? t.O - channel : CONV_GROUP;
    float* weights = t.packed + group * CONV_GROUP * end * run;
    float bias[CONV_GROUP] = {};
    if (t.bias) std::memcpy(bias, t.bias + channel, count * sizeof(float));
    const auto add = [&](const Piece& piece, bool first) {
      const bool last = piece.end == end && piece.offset + piece.depth == run;
      Tile<Element> tile{rows, nullptr, t.stride_w * CC, weights + (piece.begin * run + piece.offset) * CONV_GROUP, sums,
                         first ? bias : nullptr, nullptr, t.O, count};
      if (last) tile.y = static_cast<Element*>(t.y) + pixel * t.O + channel;
      add_piece<Kind>(t, block, patch, piece, tile);
    };
    for_each_piece<1>(begin, end, run, DEPTH, add);
    if (begin == end) add({end, end, 0, run}, true);  // zero frames only: the bias
  }
}

template <class Kind>
void pack(const ConvTask& t, int64_t begin, int64_t end) {
  using Element = typename Kind::Element;
  const int64_t taps = t.KT * t.KH * t.KW, CC = cells<Kind>(t.C);
  for (int64_t group = begin; group < end; ++group) {
    const int64_t channel = group * CONV_GROUP, count = t.O - channel < CONV_GROUP ? t.O - channel : CONV_GROUP;
    const Element* from = static_cast<const Element*>(t.weight) + channel * t.C * taps;
    float* to = t.packed + group * CONV_GROUP * taps * CC;
    for (int64_t cell = 0; cell < CC; ++cell) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int64_t c = cell * Kind::depth;
        const Element* first = from + c * taps + tap;
        float* at = to + (tap * CC + cell) * CONV_GROUP;
        for (int64_t o = 0; o < count; ++o) {
          at[o] = cell_of(Kind{}, first + o * t.C * taps, taps, t.C - c);
        }
        for (int64_t o = count; o < CONV_GROUP; ++o) at[o] = 0;
      }
    }
  }
}

}  // namespace

void conv_pack(const ConvTask& task, int64_t begin, int64_t end) {
  task.weight_bf16 ? pack<Bf16Cells>(task, begin, end) : pack<F32Cells>(task, begin, end);
}

void conv_block(const ConvTask& task, const ConvBlock& block, void* scratch) {
  if (task.weight_bf16) {
    task.x_bf16 ? convolve<Bf16Cells, bf16>(task, block, scratch) : convolve<Bf16Cells, float>(task, block, scratch);
  } else {
    task.x_bf16 ? convolve<F32Cells, bf16>(task, block, scratch) : convolve<F32Cells, float>(task, block, scratch);
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
