// inputs[point, tile, frame and channel] = B d B^T              (for each tile, frame and channel: B is `to_points`)
// for each group of output channels:
//   for each point and output frame:  sums[tile, channel] = inputs[tile, its frames and channels] . weights[:, channel]
//   for each output frame and tile:   y = A^T sums A + bias, rounded                          (A^T is `to_pixels`)
//
// weights[point] = G g G^T (`to_weights`) are computed once for a call. All is float32, also for bfloat16: the points'
// inputs are sums of pixels, and would lose in rounding what the fewer products gain.
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

// The part of a frame that tiles read: `at` is the pixel above and left of the frame's first by the zeros there.
template <class Element>
struct Frame {
  const Element* at;
  int64_t H, W, C;
};

template <class Filter, class Element, class Weight>
void fill_tile(const Frame<Element>& frame, int64_t h, int64_t w, float* to, int64_t point_stride) {
  constexpr int N = Filter::points;
  const bool inside = h >= 0 && w >= 0 && h + N <= frame.H && w + N <= frame.W;
  const Element* first = frame.at + (h * frame.W + w) * frame.C;
  const auto to_points = [](const F32(&d)[N], F32(&v)[N]) { Filter::to_points(d, v); };
  for (int64_t c = 0; c < frame.C; c += F32::lanes) {
    const auto store_point = [&](int i, int j, F32 value) { store(to + (i * N + j) * point_stride + c, value); };
    const auto pixel = [&](int i, int j) { return first + (i * frame.W + j) * frame.C + c; };
    if (inside && c + F32::lanes <= frame.C) {
      both_ways<N, N>(to_points, [&](int i, int j) { return load_pixels<Element, Weight>(pixel(i, j)); }, store_point);
      continue;
    }
    const auto pixel_or_zero = [&](int i, int j) {
      if (h + i < 0 || h + i >= frame.H || w + j < 0 || w + j >= frame.W) return zero();
      Element buffer[F32::lanes];
      return load_pixels<Element, Weight>(padded(pixel(i, j), frame.C - c, buffer));
    };
    both_ways<N, N>(to_points, pixel_or_zero, store_point);
  }
}

// Zero frames before the first frame that output frame `t` reads. They are left out.
inline int64_t zero_frames(const WinogradTask& task, int64_t t) {
  const int64_t zeros = task.T_zeros - t * task.stride_t;
  return zeros < 0 ? 0 : zeros < task.KT ? zeros : task.KT;
}

template <class Filter, class Element, class Weight>
void fill(const WinogradTask& t, const WinogradBlock& block, float* inputs) {
  const int64_t channels = winograd_channels(t), depth = winograd_depth(t, block.frames), image = t.H * t.W * t.C;
  const int64_t stride = winograd_inputs(t, block.tiles, block.frames), first = block.t * t.stride_t - t.T_zeros;
  for (int64_t i = first < 0 ? -first : 0; i < depth / channels; ++i) {
    const int64_t at = first + i;
    const Frame<Element> frame{at < t.T_before
                                   ? static_cast<const Element*>(t.before) + (block.b * t.T_before + at) * image
                                   : static_cast<const Element*>(t.x) + (block.b * t.T + at - t.T_before) * image,
                               t.H, t.W, t.C};
    float* to = inputs + i * channels;
    for (int64_t tile = block.tile; tile < block.tile + block.tiles; ++tile, to += depth) {
      const int64_t h = tile / t.tiles_w * t.size - t.top, w = tile % t.tiles_w * t.size - t.left;
      fill_tile<Filter, Element, Weight>(frame, h, w, to, stride);
      // Levels' vectors differ: what they leave of the last sixteen channels.
      const int64_t filled = (t.C + F32::lanes - 1) / F32::lanes * F32::lanes;
      for (int64_t point = 0; filled < channels && point < winograd_points(t); ++point) {
        std::memset(to + point * stride + filled, 0, (channels - filled) * sizeof(float));
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

// to[frame and tile, channel] = inputs[tile, depth of the frame] . weights[depth, channel]: one point of a group.
void multiply_point(const WinogradTask& t, const WinogradBlock& block, float* inputs, float* weights, float* to,
                    int64_t vectors) {
  const int64_t channels = winograd_channels(t), depth = t.KT * channels, stride = winograd_depth(t, block.frames);
  const int64_t parts = (depth + DEPTH - 1) / DEPTH, blocks = (block.tiles + TILES - 1) / TILES;
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t column = 0; column < vectors * F32::lanes; column += VECTORS * F32::lanes) {
      for (int64_t frame = 0; frame < block.frames; ++frame) {
        const int64_t zeros = zero_frames(t, block.t + frame) * channels;
        const int64_t begin = std::max(depth * part / parts, zeros), end = std::max(depth * (part + 1) / parts, zeros);
        const Matrix a{inputs + frame * t.stride_t * channels + begin, stride};
        const Matrix b{weights + begin * CONV_GROUP + column, CONV_GROUP};
        const Matrix sums{to + frame * block.tiles * CONV_GROUP + column, CONV_GROUP};
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t row = block.tiles * i / blocks, rows = block.tiles * (i + 1) / blocks - row;
          multiply_rows(rows, {a.row(row), a.stride}, b, end - begin, {sums.row(row), sums.stride}, part == 0);
        }
      }
    }
  }
}

template <class Filter, class Element>
void finish(const WinogradTask& t, const WinogradBlock& block, int64_t channel, int64_t count, const float* sums) {
  constexpr int N = Filter::points, M = Filter::size;
  const int64_t stride = winograd_sums(block.tiles, block.frames);
  float bias[CONV_GROUP] = {};
  if (t.bias) std::memcpy(bias, t.bias + channel, count * sizeof(float));
  const auto to_pixels = [](const F32(&m)[N], F32(&y)[M]) { Filter::to_pixels(m, y); };
  for (int64_t i = 0; i < block.frames * block.tiles; ++i, sums += CONV_GROUP) {
    const int64_t frame = block.b * t.T_out + block.t + i / block.tiles, tile = block.tile + i % block.tiles;
    const int64_t h = tile / t.tiles_w * M, w = tile % t.tiles_w * M;
    float pixels[M][M][CONV_GROUP];
    for (int64_t c = 0; c < count; c += F32::lanes) {
      both_ways<N, M>(
          to_pixels, [&](int k, int l) { return load(sums + (k * N + l) * stride + c); },
          [&](int k, int l, F32 value) { store(&pixels[k][l][c], add(value, load(bias + c))); });
    }
    Element* to = static_cast<Element*>(t.y) + ((frame * t.H_out + h) * t.W_out + w) * t.O + channel;
    for (int k = 0; k < M && h + k < t.H_out; ++k) {
      for (int l = 0; l < M && w + l < t.W_out; ++l) round_row(to + (k * t.W_out + l) * t.O, pixels[k][l], count);
    }
  }
}

template <class Filter, class Element, class Weight>
void convolve(const WinogradTask& t, const WinogradBlock& block, void* scratch) {
  const int64_t points = winograd_points(t), input_stride = winograd_inputs(t, block.tiles, block.frames);
  const int64_t weight_stride = winograd_depth(t, 1) * CONV_GROUP, sum_stride = winograd_sums(block.tiles, block.frames);
  float* inputs = static_cast<float*>(scratch);
  float* sums = inputs + points * input_stride;
  fill<Filter, Element, Weight>(t, block, inputs);
  for (int64_t group = block.group; group < block.group + block.groups; ++group) {
    const int64_t channel = (t.group + group) * CONV_GROUP;
    const int64_t count = t.O - channel < CONV_GROUP ? t.O - channel : CONV_GROUP;
    for (int64_t point = 0; point < points; ++point) {
      multiply_point(t, block, inputs + point * input_stride, t.packed + (group * points + point) * weight_stride,
                     sums + point * sum_stride, (count + F32::lanes - 1) / F32::lanes);
    }
    finish<Filter, Element>(t, block, channel, count, sums);
  }
}

template <class Filter, class Weight>
void pack(const WinogradTask& t, int64_t begin, int64_t end) {
  constexpr int N = Filter::points;
  const int64_t channels = winograd_channels(t), depth = winograd_depth(t, 1);
  const auto to_weights = [](const F32(&g)[3], F32(&u)[N]) { Filter::to_weights(g, u); };
  for (int64_t i = begin; i < end; ++i) {
    const int64_t group = i / depth, kt = i % depth / channels, c = i % channels;
    const int64_t channel = (t.group + group) * CONV_GROUP;
    const int64_t count = c >= t.C ? 0 : t.O - channel < CONV_GROUP ? t.O - channel : CONV_GROUP;
    float taps[9][CONV_GROUP];
    if (count < CONV_GROUP) std::memset(taps, 0, sizeof taps);
    for (int64_t o = 0; o < count; ++o) {
      const Weight* from = static_cast<const Weight*>(t.weight) + (((channel + o) * t.C + c) * t.KT + kt) * 9;
      for (int tap = 0; tap < 9; ++tap) {
        if constexpr (sizeof(Weight) == sizeof(float)) taps[tap][o] = from[tap];
        else taps[tap][o] = widen(from[tap]);
      }
    }
    float* to = t.packed + group * winograd_packed_floats(t) + (kt * channels + c) * CONV_GROUP;
    for (int64_t o = 0; o < CONV_GROUP; o += F32::lanes) {
      both_ways<3, N>(
          to_weights, [&](int k, int l) { return load(&taps[k * 3 + l][o]); },
          [&](int k, int l, F32 value) { store(to + (k * N + l) * depth * CONV_GROUP + o, value); });
    }
  }
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
  t.weight_bf16 ? pack<Filter, bf16>(t, begin, end) : pack<Filter, float>(t, begin, end);
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
