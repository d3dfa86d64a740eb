// inputs[point, tile, frame and channel] = B d B^T              (for each tile, frame and channel: B is `to_points`)
// for each group of output channels:
//   for each point and output frame:  sums[tile, channel] = inputs[tile, its frames and channels] . weights[:, channel]
//   for each output frame and tile:   y = A^T sums A + bias, rounded                          (A^T is `to_pixels`)
//
// weights[point] = G g G^T (`to_weights`) are computed once for a call. All is float32, also for bfloat16: the points'
// inputs are sums of pixels, and would lose in rounding what the fewer products gain.
//
// Pairs of output frames take the filter of two outputs along time as well (`TwoPixels`). Of four frames d and three of
// the kernel, g:
//   m0 = (d0 - d2) g0,   m1 = (d2 + d1) (g0 + g1 + g2) / 2,   m2 = (d2 - d1) (g0 - g1 + g2) / 2,   m3 = (d3 - d1) g2
//   first frame = m0 + m1 + m2,   last frame = m3 + m1 - m2
// These are four products in place of six, and the first frame sees nothing of the last one, d3.
#include "conv_winograd.h"

#include <algorithm>

#include "cells.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Filters of 3 taps by the values of polynomials at points (Toom and Cook). These are the one-dimensional transforms;
// an operand's two dimensions take the same one after the other.

// Two outputs of four inputs: points 0, 1, -1 and infinity.
struct TwoPixels {
  static constexpr int size = 2, points = 4;
  static void to_points(const F32 (&d)[4], F32 (&v)[4]) {
    v[0] = sub(d[0], d[2]), v[1] = add(d[2], d[1]), v[2] = sub(d[2], d[1]), v[3] = sub(d[3], d[1]);
  }
  static void to_weights(const F32 (&g)[3], F32 (&u)[4]) {
    const F32 half = broadcast(0.5f), even = mul(half, add(g[0], g[2])), odd = mul(half, g[1]);
    u[0] = g[0], u[1] = add(even, odd), u[2] = sub(even, odd), u[3] = g[2];
  }
  static void to_pixels(const F32 (&m)[4], F32 (&y)[2]) {
    y[0] = add(m[0], add(m[1], m[2])), y[1] = add(m[3], sub(m[1], m[2]));
  }
};

// Four outputs of six inputs: points 0, a, -a, b, -b and infinity, where a = 2/3 and b = 3/2. With the usual 1 and 2
// errors are twice as large.
struct FourPixels {
  static constexpr int size = 4, points = 6;
  static constexpr double a = 2.0 / 3, b = 1.5;
  static F32 constant(double x) { return broadcast(static_cast<float>(x)); }
  static void to_points(const F32 (&d)[6], F32 (&v)[6]) {
    const F32 spread = constant(-(a * a + b * b));
    v[0] = add(fma(spread, d[2], d[0]), d[4]);
    v[5] = add(fma(spread, d[3], d[1]), d[5]);
    const F32 even_a = fma(constant(-b * b), d[2], d[4]), odd_a = fma(constant(-b * b), d[1], d[3]);
    v[1] = fma(constant(a), odd_a, even_a), v[2] = fma(constant(-a), odd_a, even_a);
    const F32 even_b = fma(constant(-a * a), d[2], d[4]), odd_b = fma(constant(-a * a), d[1], d[3]);
    v[3] = fma(constant(b), odd_b, even_b), v[4] = fma(constant(-b), odd_b, even_b);
  }
  static void to_weights(const F32 (&g)[3], F32 (&u)[6]) {
    u[0] = g[0], u[5] = g[2];
    at_pair(a, 2 * a * a * (a * a - b * b), g, u[1], u[2]);
    at_pair(b, 2 * b * b * (b * b - a * a), g, u[3], u[4]);
  }
  static void to_pixels(const F32 (&m)[6], F32 (&y)[4]) {
    const F32 sum_a = add(m[1], m[2]), sum_b = add(m[3], m[4]);
    const F32 difference_a = sub(m[1], m[2]), difference_b = sub(m[3], m[4]);
    y[0] = add(m[0], add(sum_a, sum_b));
    y[1] = fma(constant(a), difference_a, mul(constant(b), difference_b));
    y[2] = fma(constant(a * a), sum_a, mul(constant(b * b), sum_b));
    y[3] = fma(constant(a * a * a), difference_a, fma(constant(b * b * b), difference_b, m[5]));
  }

 private:
  static void at_pair(double point, double divisor, const F32 (&g)[3], F32& plus, F32& minus) {
    const F32 even = fma(constant(point * point / divisor), g[2], mul(constant(1 / divisor), g[0]));
    plus = fma(constant(point / divisor), g[1], even), minus = fma(constant(-point / divisor), g[1], even);
  }
};

// to[i, j] for M x M, of from[k, l] for N x N: `transform` of each row, then of each column.
template <int N, int M, class Transform, class Load, class Store>
inline void both_ways(const Transform& transform, const Load& from, const Store& to) {
  F32 rows[N][M];
  for (int k = 0; k < N; ++k) {
    F32 row[N];
    VERAX_UNROLL
    for (int l = 0; l < N; ++l) row[l] = from(k, l);
    transform(row, rows[k]);
  }
  for (int j = 0; j < M; ++j) {
    F32 column[N], out[M];
    VERAX_UNROLL
    for (int k = 0; k < N; ++k) column[k] = rows[k][j];
    transform(column, out);
    VERAX_UNROLL
    for (int i = 0; i < M; ++i) to(i, j, out[i]);
  }
}

// One vector of pixels, rounded to the type of the weight.
template <class Element, class Weight>
inline F32 load_pixels(const Element* from) {
  if constexpr (sizeof(Element) <= sizeof(Weight)) return load(from);
  float rounded[F32::lanes];
  for (int i = 0; i < F32::lanes; ++i) rounded[i] = widen(narrow(from[i]));
  return load(rounded);
}

// The points of a tile of one frame, for a vector of channels. Its first pixel is at row h and column w.
template <class Filter, class Element, class Weight>
void fill_points(const ConvTask& t, const Element* frame, int64_t h, int64_t w, int64_t c, float* to,
                 int64_t point_stride) {
  constexpr int N = Filter::points;
  const bool inside = h >= 0 && w >= 0 && h + N <= t.H && w + N <= t.W;
  const Element* first = frame + (h * t.W + w) * t.C + c;
  const auto to_points = [](const F32(&d)[N], F32(&v)[N]) { Filter::to_points(d, v); };
  const auto store_point = [&](int i, int j, F32 value) { store(to + (i * N + j) * point_stride, value); };
  const auto pixel = [&](int i, int j) { return first + (i * t.W + j) * t.C; };
  if (inside && c + F32::lanes <= t.C) {
    both_ways<N, N>(to_points, [&](int i, int j) { return load_pixels<Element, Weight>(pixel(i, j)); }, store_point);
    return;
  }
  const auto pixel_or_zero = [&](int i, int j) {
    if (c >= t.C || h + i < 0 || h + i >= t.H || w + j < 0 || w + j >= t.W) return zero();
    Element buffer[CHUNK];
    return load_pixels<Element, Weight>(padded(pixel(i, j), t.C - c, buffer));
  };
  both_ways<N, N>(to_points, pixel_or_zero, store_point);
}

inline int64_t tile_top(const WinogradTask& t, int64_t tile) { return tile / t.tiles_w * t.size - t.top; }
inline int64_t tile_left(const WinogradTask& t, int64_t tile) { return tile % t.tiles_w * t.size - t.left; }

// Frames of zeros are not filled; the products leave them out.
template <class Filter, class Element, class Weight>
void fill_frames(const WinogradTask& t, const WinogradBlock& block, float* inputs) {
  const int64_t channels = winograd_channels(t), depth = winograd_depth(t, block.frames);
  const int64_t stride = winograd_inputs(t, block.tiles, block.frames);
  for (int64_t i = 0; i < depth / channels; ++i) {
    const Element* frame = conv_frame<Element>(t, block.b, block.t * t.stride_t + i);
    if (!frame) continue;
    float* to = inputs + i * channels;
    for (int64_t tile = block.tile; tile < block.tile + block.tiles; ++tile, to += depth) {
      for (int64_t c = 0; c < channels; c += F32::lanes) {
        fill_points<Filter, Element, Weight>(t, frame, tile_top(t, tile), tile_left(t, tile), c, to + c, stride);
      }
    }
  }
}

template <class Filter, class Element, class Weight>
void fill_pairs(const WinogradTask& t, const WinogradBlock& block, float* inputs) {
  constexpr int POINTS = Filter::points * Filter::points;
  const int64_t channels = winograd_channels(t), depth = winograd_depth(t, block.frames);
  const int64_t stride = winograd_inputs(t, block.tiles, block.frames), count = block.frames + 2;
  const Element* frames[WINOGRAD_PAIRED + 2];
  for (int64_t i = 0; i < count; ++i) frames[i] = conv_frame<Element>(t, block.b, block.t + i);
  for (int64_t tile = block.tile; tile < block.tile + block.tiles; ++tile, inputs += depth) {
    for (int64_t c = 0; c < channels; c += F32::lanes) {
      float points[WINOGRAD_PAIRED + 2][POINTS * F32::lanes];
      for (int64_t i = 0; i < count; ++i) {
        if (frames[i]) {
          fill_points<Filter, Element, Weight>(t, frames[i], tile_top(t, tile), tile_left(t, tile), c, points[i],
                                               F32::lanes);
        } else {
          std::memset(points[i], 0, sizeof points[i]);
        }
      }
      for (int64_t i = 0; i < block.frames; i += 2) {
        for (int64_t point = 0; point < POINTS; ++point) {
          const auto at = [&](int64_t frame) { return load(points[i + frame] + point * F32::lanes); };
          const F32 d[4] = {at(0), at(1), at(2), at(3)};
          F32 v[4];
          TwoPixels::to_points(d, v);
          VERAX_UNROLL
          for (int64_t k = 0; k < 4; ++k) store(inputs + point * stride + (2 * i + k) * channels + c, v[k]);
        }
      }
    }
  }
}

// Registers of sums, and vectors of output channels among them. AVX2 has 16 registers, the others 32.
#if defined(VERAX_PORTABLE) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr int TILES = 6, VECTORS = 2;
#else
constexpr int TILES = 8, VECTORS = 3;
#endif
static_assert(CONV_GROUP % (F32::lanes * VECTORS) == 0, "a group is a whole number of register tiles");

// Inputs whose weights stay in the first cache level while all tiles of a block are multiplied with them: 27 KB.
// Each such part is added up by itself, which also keeps the error of long sums small.
constexpr int64_t DEPTH = 144;

template <int R>
void multiply(Matrix inputs, Matrix weights, int64_t depth, Matrix to, bool first) {
  F32 sums[R][VECTORS];
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < VECTORS; ++c) sums[r][c] = zero();
  add_products<F32Cells, R, VECTORS>(sums, inputs, weights, depth);
  VERAX_UNROLL
  for (int r = 0; r < R; ++r)
    VERAX_UNROLL
    for (int c = 0; c < VECTORS; ++c) {
      float* at = to.row(r) + c * F32::lanes;
      store(at, first ? sums[r][c] : add(load(at), sums[r][c]));
    }
}

template <int R = TILES>
void multiply_rows(int64_t rows, Matrix inputs, Matrix weights, int64_t depth, Matrix to, bool first) {
  if (rows == R) return multiply<R>(inputs, weights, depth, to, first);
  if constexpr (R > 1) multiply_rows<R - 1>(rows, inputs, weights, depth, to, first);
}

// to[frame and tile, channel] = inputs[tile, depth of the frame] . weights[depth, channel]: one point of a group, and a
// matrix of weights for all frames. Of pairs, such frames are every fourth sum.
void multiply_frames(const WinogradTask& t, const WinogradBlock& block, float* inputs, float* weights, float* to,
                     int64_t vectors) {
  const int64_t channels = winograd_channels(t), stride = winograd_depth(t, block.frames);
  const int64_t depth = t.pairs ? channels : t.KT * channels, frames = t.pairs ? block.frames / 2 : block.frames;
  const int64_t step = (t.pairs ? 4 : t.stride_t) * channels, sums_step = (t.pairs ? 4 : 1) * block.tiles * CONV_GROUP;
  const int64_t parts = (depth + DEPTH - 1) / DEPTH, blocks = (block.tiles + TILES - 1) / TILES;
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t column = 0; column < vectors * F32::lanes; column += VECTORS * F32::lanes) {
      for (int64_t frame = 0; frame < frames; ++frame) {
        const int64_t zeros = t.pairs ? 0 : conv_zero_frames(t, block.t + frame) * channels;
        const int64_t begin = std::max(depth * part / parts, zeros), end = std::max(depth * (part + 1) / parts, zeros);
        const Matrix a{inputs + frame * step + begin, stride};
        const Matrix b{weights + begin * CONV_GROUP + column, CONV_GROUP};
        const Matrix sums{to + frame * sums_step + column, CONV_GROUP};
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t row = block.tiles * i / blocks, rows = block.tiles * (i + 1) / blocks - row;
          multiply_rows(rows, {a.row(row), a.stride}, b, end - begin, {sums.row(row), sums.stride}, part == 0);
        }
      }
    }
  }
}

// The sums of one frame's points: of its own products, or of the products of its pair.
template <class Filter, class Element>
void finish(const WinogradTask& t, const WinogradBlock& block, int64_t channel, int64_t count, const float* sums) {
  constexpr int N = Filter::points, M = Filter::size;
  const int64_t stride = winograd_sums(t, block.tiles, block.frames), products = block.tiles * CONV_GROUP;
  float bias[CONV_GROUP] = {};
  if (t.bias) std::memcpy(bias, t.bias + channel, count * sizeof(float));
  const auto to_pixels = [](const F32(&m)[N], F32(&y)[M]) { Filter::to_pixels(m, y); };
  for (int64_t i = 0; i < block.frames * block.tiles; ++i) {
    const int64_t frame = i / block.tiles, tile = block.tile + i % block.tiles;
    const int64_t h = tile / t.tiles_w * M, w = tile % t.tiles_w * M;
    const float* from = sums + (t.pairs ? frame / 2 * 4 : frame) * products + i % block.tiles * CONV_GROUP;
    float pixels[M][M][CONV_GROUP];
    for (int64_t c = 0; c < count; c += F32::lanes) {
      const auto sum = [&](int k, int l) { return from + (k * N + l) * stride + c; };
      const auto store_pixel = [&](int k, int l, F32 value) { store(&pixels[k][l][c], add(value, load(bias + c))); };
      const auto product = [&](int k, int l, int m) { return load(sum(k, l) + m * products); };
      const auto first = [&](int k, int l) { return add(product(k, l, 0), add(product(k, l, 1), product(k, l, 2))); };
      const auto last = [&](int k, int l) { return add(product(k, l, 3), sub(product(k, l, 1), product(k, l, 2))); };
      if (!t.pairs) both_ways<N, M>(to_pixels, [&](int k, int l) { return load(sum(k, l)); }, store_pixel);
      else if (frame % 2 == 0) both_ways<N, M>(to_pixels, first, store_pixel);
      else both_ways<N, M>(to_pixels, last, store_pixel);
    }
    const int64_t row = ((block.b * t.T_out + block.t + frame) * t.H_out + h) * t.W_out + w;
    Element* to = static_cast<Element*>(t.y) + row * t.O + channel;
    for (int k = 0; k < M && h + k < t.H_out; ++k) {
      for (int l = 0; l < M && w + l < t.W_out; ++l) round_row(to + (k * t.W_out + l) * t.O, pixels[k][l], count);
    }
  }
}

template <class Filter, class Element, class Weight>
void convolve(const WinogradTask& t, const WinogradBlock& block, void* scratch) {
  const int64_t points = winograd_points(t), input_stride = winograd_inputs(t, block.tiles, block.frames);
  const int64_t sum_stride = winograd_sums(t, block.tiles, block.frames);
  float* inputs = static_cast<float*>(scratch);
  float* sums = inputs + points * input_stride;
  const auto fill = t.pairs ? fill_pairs<Filter, Element, Weight> : fill_frames<Filter, Element, Weight>;
  fill(t, block, inputs);
  for (int64_t group = block.group; group < block.group + block.groups; ++group) {
    const int64_t channel = (t.group + group) * CONV_GROUP;
    const int64_t count = t.O - channel < CONV_GROUP ? t.O - channel : CONV_GROUP;
    const int64_t vectors = (count + F32::lanes - 1) / F32::lanes;
    for (int64_t point = 0; point < points; ++point) {
      float* weights = t.packed + (group * points + point) * winograd_weights(t) * CONV_GROUP;
      for (int64_t product = 0; product < (t.pairs ? 4 : 1); ++product) {
        const int64_t offset = product * winograd_channels(t);
        multiply_frames(t, block, inputs + point * input_stride + offset, weights + offset * CONV_GROUP,
                        sums + point * sum_stride + product * block.tiles * CONV_GROUP, vectors);
      }
    }
    finish<Filter, Element>(t, block, channel, count, sums);
  }
}

// Packed weights of more bytes than this are stored past the caches, which would not keep them.
constexpr int64_t STREAMED_BYTES = 16 * 1024 * 1024;

// Frames of the kernel that are packed at a time, and rows for their taps or for the four sums of a pair.
constexpr int64_t FRAMES = 3, ROWS_OF_TAPS = 4 * 9;
static_assert(ROWS_OF_TAPS >= (FRAMES * 9 + F32::lanes - 1) / F32::lanes * F32::lanes, "whole squares are transposed");
using Taps = Strided<CONV_GROUP>;

// Taps of frames [kt, kt + frames) for channel c of the input, by channels of the output from `channel` on.
template <class Weight>
void load_taps(const WinogradTask& t, int64_t channel, int64_t c, int64_t kt, int64_t frames, Taps to) {
  static constexpr Weight zeros[ROWS_OF_TAPS] = {};
  const Weight* rows[CONV_GROUP];
  for (int64_t o = 0; o < CONV_GROUP; ++o) {
    const bool is_there = c < t.C && channel + o < t.O;
    rows[o] = is_there ? static_cast<const Weight*>(t.weight) + (((channel + o) * t.C + c) * t.KT + kt) * 9 : zeros;
  }
  // Whole registers read into the channel of the input after this one, where there is one.
  const int64_t taps = frames * 9, whole = (taps + F32::lanes - 1) / F32::lanes * F32::lanes;
  pack_columns<Singles<Weight>>({to.at, to.stride}, rows, rows, CONV_GROUP, c + 1 < t.C ? whole : taps);
}

// The points of a frame of the kernel.
template <class Filter, bool STREAMED>
void pack_frame(Taps taps, float* to, int64_t point_stride) {
  constexpr int N = Filter::points;
  const auto to_weights = [](const F32(&g)[3], F32(&u)[N]) { Filter::to_weights(g, u); };
  for (int64_t o = 0; o < CONV_GROUP; o += F32::lanes) {
    both_ways<3, N>(
        to_weights, [&](int k, int l) { return load(taps.row(k * 3 + l) + o); },
        [&](int k, int l, F32 value) {
          float* at = to + (k * N + l) * point_stride + o;
          STREAMED ? stream(at, value) : store(at, value);
        });
  }
}

template <class Filter, class Weight, bool STREAMED>
void pack(const WinogradTask& t, int64_t begin, int64_t end) {
  const int64_t channels = winograd_channels(t), point_stride = winograd_weights(t) * CONV_GROUP;
  alignas(64) float memory[ROWS_OF_TAPS * CONV_GROUP];
  const Taps taps{memory};
  for (int64_t i = begin; i < end; ++i) {
    const int64_t group = i / channels, c = i % channels, channel = (t.group + group) * CONV_GROUP;
    float* to = t.packed + group * winograd_packed_floats(t) + c * CONV_GROUP;
    for (int64_t kt = 0; kt < t.KT; kt += FRAMES) {
      const int64_t frames = std::min(FRAMES, t.KT - kt);
      load_taps<Weight>(t, channel, c, kt, frames, taps);
      for (int64_t o = 0; t.pairs && o < 9 * CONV_GROUP; o += F32::lanes) {
        const auto at = [&](int64_t frame) { return taps.row(frame * 9) + o; };
        const F32 g[3] = {load(at(0)), load(at(1)), load(at(2))};
        F32 sums[4];
        TwoPixels::to_weights(g, sums);
        for (int64_t sum = 0; sum < 4; ++sum) store(at(sum), sums[sum]);
      }
      for (int64_t tap = 0; tap < (t.pairs ? 4 : frames); ++tap) {
        pack_frame<Filter, STREAMED>({taps.row(tap * 9)}, to + (kt + tap) * channels * CONV_GROUP, point_stride);
      }
    }
  }
  if (STREAMED) end_stream();
}

// The case of a task: its filter, and the types of its pixels and weights.
template <class Filter>
void convolve(const WinogradTask& t, const WinogradBlock& block, void* scratch) {
  if (t.weight_bf16) {
    t.x_bf16 ? convolve<Filter, bf16, bf16>(t, block, scratch) : convolve<Filter, float, bf16>(t, block, scratch);
  } else {
    t.x_bf16 ? convolve<Filter, bf16, float>(t, block, scratch) : convolve<Filter, float, float>(t, block, scratch);
  }
}

template <class Filter>
void pack(const WinogradTask& t, int64_t begin, int64_t end) {
  if (4 * t.groups * winograd_packed_floats(t) > STREAMED_BYTES) {
    t.weight_bf16 ? pack<Filter, bf16, true>(t, begin, end) : pack<Filter, float, true>(t, begin, end);
  } else {
    t.weight_bf16 ? pack<Filter, bf16, false>(t, begin, end) : pack<Filter, float, false>(t, begin, end);
  }
}

}  // namespace

void winograd_pack(const WinogradTask& task, int64_t begin, int64_t end) {
  task.size == FourPixels::size ? pack<FourPixels>(task, begin, end) : pack<TwoPixels>(task, begin, end);
}

void winograd_block(const WinogradTask& task, const WinogradBlock& block, void* scratch) {
  task.size == FourPixels::size ? convolve<FourPixels>(task, block, scratch)
                                : convolve<TwoPixels>(task, block, scratch);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
